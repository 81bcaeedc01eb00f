# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The wait in real processes, one per rank as Ansible forks them; only the answer of the node is a script."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ansible_cli
import pytest
from ansible import constants
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.playbook.task import Task
from ansible_collections.sparkwright.dsv41.plugins.action import engine_wait

FORK = multiprocessing.get_context("fork")
Result = dict[str, Any]
Sample = dict[str, Any] | Exception


def up(**more: Any) -> Sample:
    return {
        "exists": True,
        "running": True,
        "log_tail": ["loading"],
        "log_bytes": 1,
        "cpu_s": 1.0,
        "healthy": None,
        **more,
    }


def moving(count: int) -> list[Sample]:
    return [up(log_bytes=n) for n in range(count)]


HEALTHY = up(healthy=True)
DEAD = up(running=False, status="exited", exit_code=137, log_tail=["Killed"])
LOST = AnsibleConnectionFailure("Connection timed out")
DAEMON = {"failed": True, "msg": "docker container inspect failed"}


def wait_on(number: int, samples: Sequence[Sample], check: bool = False, **options: Any) -> Result:
    """The action of one rank; the last sample stays."""
    task = Task()
    task._uuid = "one-task"
    task.check_mode = check
    base = {"container": f"r{number}", "rank": number, "world_size": 2, "deadline_s": 20, "stall_s": 20}
    task.args = {**base, **options}
    connection = SimpleNamespace(_shell=SimpleNamespace(tmpdir="on the node"))
    action = engine_wait.ActionModule(task, connection, SimpleNamespace(), None, None, None)
    answers = iter(samples)
    last: list[Sample] = []

    def answer(**call: Any) -> Result:
        assert call["module_name"] == "sparkwright.dsv41.engine_state"
        last[:] = [next(answers, last[-1] if last else up())]
        sample = last[0]
        if isinstance(sample, Exception):
            raise sample
        return sample if "failed" in sample else {"state": {**sample, "host": call["module_args"]["host"]}}

    action._execute_module = answer
    return action.run(task_vars={"inventory_hostname": f"spark{number + 1}"})


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ansible's directory of this run, and a tenth of a second between samples."""
    monkeypatch.setattr(constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _seconds: time.sleep(0.02))
    monkeypatch.setattr(engine_wait, "time", clock)


@pytest.fixture
def together() -> Callable[..., list[Result]]:
    def run(*scripts: Sequence[Sample], options: Sequence[dict[str, Any]] = ({}, {})) -> list[Result]:
        queue: Any = FORK.Queue()

        def one(rank: int) -> None:
            try:
                queue.put((rank, wait_on(rank, scripts[rank], **options[rank])))
            except Exception as error:
                queue.put((rank, {"verdict": repr(error)}))

        processes = [FORK.Process(target=one, args=(rank,)) for rank in range(len(scripts))]
        for process in processes:
            process.start()
        results = dict(queue.get(timeout=15) for _ in processes)
        for process in processes:
            process.join(5)
        return [results[rank] for rank in range(len(scripts))]

    return run


def test_ready(together: Callable[..., list[Result]]) -> None:
    for result in together([*moving(5), HEALTHY], moving(3)):
        assert (result["verdict"], result["changed"], result.get("failed")) == ("ready", False, None)


@pytest.mark.parametrize(("head", "worker"), [(moving(10_000), [*moving(5), DEAD]), ([HEALTHY], [DEAD])])
def test_one_dead_rank_ends_the_wait_of_the_other(
    head: list[Sample], worker: list[Sample], together: Callable[..., list[Result]]
) -> None:
    """Also when the endpoint of the other rank already answers (N2, N5)."""
    for result in together(head, worker):
        assert (result["verdict"], result["failed"]) == ("dead", True)
        assert "rank 1 on spark2 exited with code 137:\nKilled" in result["msg"]
        assert result["seconds"] < 5


@pytest.mark.parametrize(
    ("failure", "words"), [(LOST, "Connection timed out"), (DAEMON, "docker container inspect failed")]
)
def test_a_node_that_is_gone_ends_the_wait_of_the_other(
    failure: Sample, words: str, together: Callable[..., list[Result]]
) -> None:
    for result in together(moving(10_000), [*moving(3), failure]):
        assert (result["verdict"], result["failed"]) == ("dead", True)
        assert f"rank 1 on spark2 does not answer: {words}" in result["msg"]


def test_a_node_that_misses_a_sample_is_given_another(together: Callable[..., list[Result]]) -> None:
    for result in together([*moving(20), HEALTHY], [up(), LOST, LOST, *moving(3), DAEMON, *moving(9)]):
        assert result["verdict"] == "ready"


def test_a_sibling_that_gave_up_is_not_waited_for(together: Callable[..., list[Result]]) -> None:
    head, worker = together([up()], [up()], options=({"stall_s": 20}, {"stall_s": 1}))
    assert worker["verdict"] == head["verdict"] == "stalled"
    assert head["msg"] == worker["msg"] and head["seconds"] < 5


def test_the_deadline(together: Callable[..., list[Result]]) -> None:
    for result in together(moving(10_000), moving(10_000), options=({"deadline_s": 1}, {"deadline_s": 1})):
        assert result["verdict"] == "stalled" and "deadline 1 s" in result["msg"]


def test_no_rank_is_ready_before_all_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_wait, "_PEERS_S", 0.5)
    started = time.monotonic()
    assert wait_on(0, [HEALTHY])["verdict"] == "ready"
    assert time.monotonic() - started > 0.5
    # The late one finds the sample that the first has left.
    assert wait_on(1, [up()])["verdict"] == "ready"


def test_a_late_rank_finds_the_verdict_of_one_that_left() -> None:
    assert wait_on(1, [DEAD])["verdict"] == "dead"
    result = wait_on(0, [HEALTHY])
    assert result["failed"] and "rank 1 on spark2 exited with code 137" in result["msg"]


def test_another_task_does_not_see_these_samples(tmp_path: Path) -> None:
    wait_on(1, [DEAD])
    (tmp_path / "engine-wait-one-task").rename(tmp_path / "engine-wait-earlier-task")
    assert wait_on(0, [HEALTHY], world_size=1)["verdict"] == "ready"


def test_all_is_in_the_directory_that_ansible_removes(tmp_path: Path) -> None:
    wait_on(0, [HEALTHY], world_size=1)
    assert os.listdir(tmp_path) == ["engine-wait-one-task"]
    assert os.listdir(tmp_path / "engine-wait-one-task") == ["0.json"]


@pytest.mark.parametrize("rank", [0, 1])
def test_progress_is_told_by_rank_0_alone(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(engine_wait, "Display", lambda: SimpleNamespace(display=told.append))
    now = iter(range(0, 10_000, 4))
    clock = SimpleNamespace(monotonic=lambda: float(next(now)), sleep=lambda _seconds: None)
    monkeypatch.setattr(engine_wait, "time", clock)
    wait_on(rank, [*moving(9), HEALTHY], world_size=1, deadline_s=1000, stall_s=1000)
    assert bool(told) is (rank == 0)
    assert all(line.startswith("  engine: ") and "rank 0: loading" in line for line in told)


def test_check_mode_asks_no_node() -> None:
    result = wait_on(0, [DEAD], check=True)
    assert result["skipped"] and not result["changed"] and not result.get("failed")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"deadline_s": None}, "deadline_s"), ({"rank": "first"}, "rank"), ({"unknown": 1}, "unknown")],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AnsibleActionFail, match=words):
        wait_on(0, [HEALTHY], **options)


PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - sparkwright.dsv41.engine_wait:
        container: "r{{ rank }}"
        rank: "{{ rank }}"
        world_size: 2
        deadline_s: 30
        stall_s: 30
"""


def test_under_ansible(
    tmp_path: Path, commands: Any, recorded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forks of a real ansible-playbook, over a real connection, with a docker that gives recorded answers."""
    running, exited = recorded("container-running"), recorded("container-exited")
    logs = (0, "2026-11-29T21:01:45.553042692Z Killed\n", "")
    commands.add(
        "docker",
        {
            "container inspect r0": (0, running, ""),
            "logs --timestamps --tail 20 r0": logs,
            "top r0 -eo pid": (0, "PID\n1\n", ""),
            "container inspect r1": (0, exited, ""),
            "logs --timestamps --tail 20 r1": logs,
        },
    )
    monkeypatch.setenv("PATH", f"{commands.directory}:/usr/bin:/bin")
    playbook, hosts = tmp_path / "wait.yml", tmp_path / "hosts.yml"
    playbook.write_text(PLAYBOOK)
    names = {f"node{n}": {"ansible_connection": "local", "rank": n} for n in (0, 1)}
    hosts.write_text(json.dumps({"all": {"hosts": names}}))
    done = ansible_cli.run("playbook", playbook, "-i", hosts, "-e", f"ansible_python_interpreter={sys.executable}")
    assert done.returncode != 0
    for node in names:
        assert f"fatal: [{node}]" in done.stdout or f"[{node}]: FAILED" in done.stdout
    assert done.stdout.count("rank 1 on node1 exited with code 3:") >= 2, done.stdout


def test_a_known_error_in_the_log_is_told_with_its_repair(together: Callable[..., list[Result]]) -> None:
    log = (ansible_cli.ROOT / "tests/fixtures/nccl-logs/gid-local-empty.log").read_text().splitlines()
    for result in together(moving(10_000), [up(), {**DEAD, "log_tail": log}]):
        assert "spark2: [fabric.gid] found" in result["msg"] and "; repair: " in result["msg"]
