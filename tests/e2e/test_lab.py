"""Whole playbooks on a deployed lab."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import ROOT, Lab, passed

TAGS = ["preflight", "fabric", "peers", "weights", "weight_sync", "engram", "image", "engine", "smoke"]
PLACE = "/var/lib/sparkwright/weights/arith-exl3-3bpw"


def test_second_run_changes_nothing_and_tells_no_secret(lab: Lab) -> None:
    started = time.monotonic()
    outcome = lab.playbook("site.yml")
    print(f"second run: {time.monotonic() - started:.0f} s")
    assert passed(outcome), outcome.output
    assert outcome.recap("changed") == {"spark1": 0, "spark2": 0}
    loud = lab.playbook("site.yml", "-vvv", "--diff")
    assert passed(loud)
    assert len(lab.key()) > 40 and lab.key() not in loud.output


@pytest.mark.parametrize("tag", TAGS)
def test_each_role_alone(lab: Lab, tag: str) -> None:
    outcome = lab.playbook("site.yml", "--tags", tag)
    assert outcome.rc == 0, outcome.output
    assert outcome.recap("changed") == {"spark1": 0, "spark2": 0}
    others = [other for other in TAGS if other != tag and f"TASK [{other} : " in outcome.output]
    # The fabric is read as it is now, every time.
    assert others == ([] if tag == "fabric" else ["fabric"])


def test_from_python_through_ansible_runner(lab: Lab, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("example", ROOT / "docs/examples/deploy_with_runner.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    outcome = example.deploy(ROOT / "inventory/lab", tmp_path)
    assert outcome == {"status": "successful", "changed": {}, "failures": [], "answer": "323"}
    artifacts = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    assert "PASS: 17*19" in artifacts and lab.key() not in artifacts


def test_verbs_show_the_plan_and_the_logs(lab: Lab) -> None:
    assert "--tensor-parallel-size 2  [engine vllm]" in lab.playbook("playbooks/plan.yml").output
    logs = lab.playbook("playbooks/logs.yml", "-e", "engine_log_lines=5")
    assert logs.rc == 0 and "GET /health" in logs.output
    assert lab.playbook("playbooks/smoke.yml").output.count("PASS: 17*19 = 323") == 1


def test_a_killed_worker_is_named_and_repaired(lab: Lab) -> None:
    assert lab.playbook("playbooks/status.yml").rc == 0
    head = lab.ssh("spark1", "docker inspect -f '{{.Id}}' sparkwright-lab-r0")
    lab.ssh("spark2", "docker kill sparkwright-lab-r1")
    status = lab.playbook("playbooks/status.yml")
    assert status.rc != 0 and "spark2: [engine.dead]" in status.output and "exit code 137" in status.output
    repaired = lab.playbook("playbooks/start.yml")
    assert repaired.rc == 0, repaired.output
    assert lab.playbook("playbooks/status.yml").rc == 0
    assert lab.ssh("spark1", "docker inspect -f '{{.Id}}' sparkwright-lab-r0") != head, "the pair was not restarted"
    assert lab.playbook("playbooks/start.yml").recap("changed") == {"spark1": 0, "spark2": 0}


def test_a_rank_that_dies_while_starting_ends_the_wait(lab: Lab) -> None:
    assert lab.playbook("playbooks/stop.yml").rc == 0
    run = lab.start("playbooks/start.yml")
    assert run.stdout
    seen = []
    for line in run.stdout:
        seen.append(line)
        if line.startswith("TASK [engine : Wait for the endpoint]"):
            lab.ssh("spark2", "docker kill sparkwright-lab-r1")
    output = "".join(seen)
    assert run.wait() != 0
    # Said by both ranks: none waits for the dead one.
    assert output.count("rank 1 on spark2 exited with code 137") >= 2, output
    assert lab.playbook("playbooks/start.yml").rc == 0


def test_an_unreachable_node_is_a_finding(lab: Lab) -> None:
    with lab.frozen("spark2"):
        status = lab.playbook("playbooks/status.yml", "--timeout", "5")
    assert status.rc != 0
    assert "spark2: [node.unreachable]" in status.output
    assert lab.playbook("playbooks/status.yml").rc == 0


def test_doctor_finds_nothing_on_a_healthy_lab_and_draws_it(lab: Lab) -> None:
    doctor = lab.playbook("playbooks/doctor.yml", "--check")
    assert doctor.rc == 0, doctor.output
    assert "Nothing is wrong on spark1, spark2" in doctor.output
    assert all(text in doctor.output for text in ("rocep1s0f0", "10.77.0.1", "10.77.0.2"))


def test_doctor_tells_everything_at_once(lab: Lab) -> None:
    """A frozen node, a wrong MTU and an error in a log do not hide each other; preflight says the same."""
    line = "[0] transport/net_ib.cc:123 NCCL WARN Call to ibv_modify_qp failed with 61 No data available"
    lab.ssh(
        "spark1", f"sh -c 'echo \"{line}\" > /proc/$(docker inspect -f {{{{.State.Pid}}}} sparkwright-lab-r0)/fd/1'"
    )
    lab.ssh("spark2", "ip link set enp1s0f0np0 mtu 1500")
    try:
        preflight = lab.playbook("site.yml", "--tags", "preflight")
        doctor = lab.playbook("playbooks/doctor.yml")
        with lab.frozen("spark2"):
            blind = lab.playbook("playbooks/doctor.yml", "--timeout", "5")
    finally:
        lab.ssh("spark2", "ip link set enp1s0f0np0 mtu 9000")
    mtu = "spark2: [fabric.mtu] found enp1s0f0np0 has MTU 1500; needed 9000"
    assert preflight.rc != 0 and mtu in preflight.flat
    assert doctor.rc != 0 and mtu in doctor.flat and "spark1: [fabric.gid]" in doctor.output
    assert blind.rc != 0 and "spark2: [node.unreachable]" in blind.output and "spark1: [fabric.gid]" in blind.output


def test_what_can_be_stopped_is_stopped(lab: Lab) -> None:
    with lab.frozen("spark2"):
        stop = lab.playbook("playbooks/stop.yml", "--timeout", "5")
    assert stop.rc != 0 and "Not reached, and perhaps still running: spark2" in stop.output
    assert not lab.ssh("spark1", "docker ps -aq").strip()
    # A rank of an earlier order of hosts is ours too.
    image = "$(docker image ls -q | head -n 1)"
    lab.ssh("spark1", f"docker create --name stray --label sparkwright.cluster=lab {image} true")
    assert lab.playbook("playbooks/start.yml").rc == 0
    assert lab.ssh("spark1", "docker ps -a --format '{{.Names}}'").split() == ["sparkwright-lab-r0"]


def test_an_inventory_without_a_cluster_is_not_a_success(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("all: {children: {sparks: {hosts: {a: {}}}}}\n")
    for inventory in (tmp_path / "hosts.yml", tmp_path / "mistyped"):
        outcome = lab.playbook("site.yml", "-i", str(inventory), inventory="")
        assert outcome.rc != 0 and "needed one head" in outcome.output


def test_a_part_of_the_ranks_is_refused(lab: Lab) -> None:
    outcome = lab.playbook("site.yml", "--tags", "engine", "--limit", "spark2")
    assert outcome.rc != 0 and "starts and stops on all 2 ranks together" in outcome.output


def test_wrong_inventory_is_refused_before_any_host_is_contacted(lab: Lab) -> None:
    wrong = {"spark_recipe_set": {"args": {"dtype": "x"}, "memori": {}}, "spark_api_prot": 1, "spark_head_ip": "x"}
    outcome = lab.playbook("site.yml", "-e", json.dumps(wrong))
    assert outcome.rc != 0
    for problem in ("did you mean 'memory'", "did you mean spark_api_port", "spark_head_ip was removed", "'dtype'"):
        assert problem in outcome.output
    assert "preflight" not in outcome.output


def test_tp_4_of_this_model_is_refused_by_the_kernels_check(lab: Lab) -> None:
    image = lab.ssh("spark1", "docker inspect -f '{{.Config.Image}}' sparkwright-lab-r0").strip()
    check = f"docker run --rm -v {PLACE}:/model:ro {image} sparkwright-exl3-check /model --tp"
    assert json.loads(lab.ssh("spark1", f"{check} 2"))["findings"] == []
    findings = json.loads(lab.ssh("spark1", f"{check} 4", check=False))["findings"]
    assert findings and all("128" in finding["needed"] for finding in findings)


def test_a_taken_port_is_found_with_its_owner(lab: Lab) -> None:
    assert lab.playbook("playbooks/stop.yml").rc == 0
    status = lab.playbook("playbooks/status.yml")
    assert status.rc != 0
    assert "spark1: [engine.missing]" in status.output and "spark2: [engine.missing]" in status.output
    lab.ssh("spark1", "systemd-run --unit=squatter python3 -m http.server 8000")
    try:
        outcome = lab.playbook("playbooks/start.yml")
    finally:
        lab.ssh("spark1", "systemctl stop squatter")
    assert outcome.rc != 0
    assert "spark1: [node.port] found port 8000 is taken by python3 (pid" in outcome.output
    assert not lab.ssh("spark2", "docker ps -q").strip(), "a rank was started although the head could not be"


def test_a_worker_without_the_room_is_told_before_anything_is_copied(lab: Lab) -> None:
    lab.ssh("spark2", f"mount -t tmpfs -o size=1m,mode=755 tmpfs {PLACE}")
    try:
        refused = lab.playbook("site.yml", "--tags", "weight_sync", "-e", "spark_weight_sync=rsync")
        chosen = lab.playbook("site.yml", "--tags", "weight_sync", "--check")
        left = lab.ssh("spark2", f"ls -A {PLACE}")
    finally:
        lab.ssh("spark2", f"umount {PLACE}")
    short = rf"spark2: the file system {PLACE} is too small for {PLACE}: \d+ - 1048576 = \d+ bytes"
    assert refused.rc != 0 and re.search(short, refused.flat), refused.output
    assert "Nothing was copied. Make room" in refused.flat
    assert re.search(f"nfs, since a copy does not fit: {short}", chosen.flat), chosen.output
    assert left == ""
    assert "rsync, since a copy fits on every worker" in lab.playbook("site.yml", "--tags", "weight_sync").flat


def test_half_a_file_is_refused_and_fetched_again(lab: Lab) -> None:
    lab.ssh("spark1", f"truncate -s 1000000 {PLACE}/model.safetensors")
    refused = lab.playbook("playbooks/start.yml")
    assert refused.rc != 0 and "model.safetensors" in refused.output
    assert not lab.ssh("spark2", "docker ps -q").strip()
    repaired = lab.playbook("site.yml", "--tags", "weights,weight_sync")
    assert repaired.rc == 0 and repaired.recap("changed")["spark1"] == 1


def test_a_file_that_the_hub_lacks_is_named(lab: Lab) -> None:
    catalog = (ROOT / "roles/recipe/files/weights.yml").read_text()
    revision = catalog.partition("arith-exl3-3bpw:")[2].partition("revision: ")[2].split()[0]
    entry = {
        "id": "x", "repo": "sparkwright/arith-exl3-3bpw", "revision": revision, "include": ["*"], "join": "",
        "must_exist": ["config.json", "model-00002-of-00002.safetensors"], "path": "/var/lib/sparkwright/weights/x",
    }  # fmt: skip
    outcome = lab.playbook("site.yml", "--tags", "weights", "-e", json.dumps({"weights_list": [entry]}))
    assert outcome.rc != 0 and "model-00002-of-00002.safetensors" in outcome.output
    assert not lab.ssh("spark1", "ls /var/lib/sparkwright/weights/x/*.safetensors", check=False)


def killed_at(lab: Lab, task: str) -> bool:
    """Run site.yml and kill it, forks and all, when a task begins; False when the task never began."""
    run = lab.start("site.yml")
    assert run.stdout
    for line in run.stdout:
        if line.startswith(f"TASK [{task}]"):
            time.sleep(1.5)
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            return True
    return False


def test_a_killed_controller_loses_nothing(lab: Lab) -> None:
    lab.playbook("playbooks/stop.yml")
    image = lab.ssh("spark2", "docker image ls --format '{{.Repository}}:{{.Tag}}' | grep ^sparkwright/").split()
    for host in ("spark1", "spark2"):
        lab.ssh(host, "docker image rm", *image)
        lab.ssh(host, "rm -r", PLACE)
    points = [
        "weights : Fetch and verify",
        "weight_sync : Copy from the head and verify",
        "image : Build the image",
        "image : Fetch the image from the head",
        "engine : Start the rank",
        "engine : Wait for the endpoint",
    ]
    for point in points:
        assert killed_at(lab, point), point
    # What the kill left running on a node (a build, a transfer) may still hold on for a moment.
    with contextlib.suppress(AssertionError):
        lab.ssh("spark1", "timeout 60 sh -c 'while pgrep -f buildx >/dev/null; do sleep 1; done'")
    final = lab.playbook("site.yml")
    assert passed(final), final.output
    assert lab.playbook("site.yml").recap("changed") == {"spark1": 0, "spark2": 0}
    assert len(lab.ssh("spark1", "docker ps -aq").split()) == 1
