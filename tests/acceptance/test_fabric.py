# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The fabric role against two kernels with Soft-RoCE: the tests follow one another, as an owner's days do."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from machines import HOSTS, INVENTORY, Outcome, playbook, ssh
from vm import ROOT

HCAS = "=rocep1s0f0:1,roceP2p1s0f0:1"
NETDEVS = ("enp1s0f0np0", "enP2p1s0f0np0")
OURS = "/etc/netplan/90-sparkwright-fabric.yaml"


def fabric(*arguments: str) -> Outcome:
    return playbook("site.yml", "--tags", "fabric", *arguments)


def record(host: str) -> dict[str, Any]:
    return json.loads(ssh(host, "cat /var/lib/sparkwright/fabric.json"))  # type: ignore[no-any-return]


def addresses(host: str) -> set[str]:
    shown = json.loads(ssh(host, "ip -j -4 address show"))
    return {f"{entry['ifname']} {i['local']}/{i['prefixlen']}" for entry in shown for i in entry["addr_info"]}


def pingpong(indexes: dict[str, int]) -> bool:
    """Whether an RDMA pingpong over rail 0 passes when each end uses the index that is given for it."""
    base = f"timeout 30 ibv_rc_pingpong -d rocep1s0f0 -n 20 -p {18700 + sum(indexes.values()) % 100}"
    server = f"{base} -g {indexes['spark1']}; echo rc=$?"
    client = f"sleep 3; {base} -g {indexes['spark2']} 10.77.0.1; echo rc=$?"
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(lambda end: ssh(*end), [("spark1", server), ("spark2", client)]))
    return all("rc=0" in end for end in ends)


def test_rails_are_found_and_proven() -> None:
    first = fabric()
    assert first.rc == 0, first.text
    assert "WARN" not in first.text and "fabric." not in first.text, "nothing is wrong"
    for number, host in enumerate(HOSTS, 1):
        found = record(host)
        assert found["hcas"] == HCAS
        assert [rail["address"] for rail in found["rails"]] == [f"10.77.0.{number}", f"10.78.0.{number}"]
        assert (found["address"], found["socket_interface"]) == (f"10.77.0.{number}", NETDEVS[0])
    assert fabric().changed == [0, 0]


def test_the_chosen_gid_carries_and_its_neighbour_does_not() -> None:
    chosen = {host: record(host)["rails"][0]["gid_index"] for host in HOSTS}
    assert pingpong(chosen)
    assert not pingpong({**chosen, "spark2": chosen["spark2"] + 1})
    pinned = fabric("-e", f"spark_fabric_gid_index={chosen['spark2'] + 1}")
    assert pinned.rc != 0 and pinned.text.count("[fabric.gid_index]") >= 2, "both ranks, at once"
    assert "0000:0000:0000:0000:0000:ffff:0a4d:0001" in pinned.text, "the table"


def test_an_address_change_moves_the_index_and_the_next_run_follows() -> None:
    before = record("spark1")["rails"][0]["gid_index"]
    port = NETDEVS[0]
    ssh("spark1", f"ip address add 10.99.0.1/24 dev {port}; ip address del 10.77.0.1/24 dev {port}; sleep 1;"
                  f"ip address add 10.98.0.1/24 dev {port}; ip address add 10.77.0.1/24 dev {port}; sleep 1;"
                  f"ip address del 10.98.0.1/24 dev {port}; ip address del 10.99.0.1/24 dev {port}")  # fmt: skip
    outcome = fabric()
    assert outcome.rc == 0, outcome.text
    after = record("spark1")["rails"][0]["gid_index"]
    assert after != before
    assert ssh("spark1", f"cat /sys/class/infiniband/rocep1s0f0/ports/1/gids/{after}").endswith("0a4d:0001")
    assert pingpong({"spark1": after, "spark2": record("spark2")["rails"][0]["gid_index"]})
    assert not pingpong({"spark1": before, "spark2": record("spark2")["rails"][0]["gid_index"]})


def test_one_end_with_another_mtu_is_found() -> None:
    ssh("spark2", f"ip link set {NETDEVS[1]} mtu 1500")
    both = json.dumps({"spark_recipe_set": {"fabric": {"min_rails": 2}}})
    refused = fabric("-e", both)
    assert refused.rc != 0
    assert f"spark2: [fabric.mtu] found {NETDEVS[1]} has MTU 1500; needed 9000" in refused.text
    spared = fabric()
    assert spared.rc == 0 and "[fabric.rail_dropped]" in spared.text, "one rail is enough by default, and it is said"
    assert record("spark1")["hcas"] == "=rocep1s0f0:1"
    ssh("spark2", f"ip link set {NETDEVS[1]} mtu 9000")


def test_a_cable_that_ends_elsewhere_is_found_by_the_probes_and_drawn() -> None:
    """Frames of rail 1 go to a machine that is not the peer."""
    ssh("spark1", f"ip neigh replace 10.78.0.2 lladdr 02:00:00:00:00:99 dev {NETDEVS[1]} nud permanent")
    doctor = playbook("playbooks/doctor.yml")
    ssh("spark1", f"ip neigh del 10.78.0.2 dev {NETDEVS[1]}")
    assert doctor.rc != 0, "the machines have no Docker"
    assert "spark1: [node.docker]" in doctor.text and "spark2: [node.docker]" in doctor.text
    assert f"[fabric.path] found {NETDEVS[1]} 10.78.0.1 to spark2 {NETDEVS[1]} 10.78.0.2: no answer" in doctor.text
    assert "[fabric.rail_dropped]" in doctor.text
    picture = (ROOT / "artifacts/acceptance/fabric.svg").read_text()
    assert all(word in picture for word in (*HOSTS, *NETDEVS, "10.78.0.0/24"))
    healed = fabric()
    assert healed.rc == 0 and record("spark1")["hcas"] == HCAS


@pytest.fixture
def rails(tmp_path: Path) -> list[str]:
    """An inventory on top of the usual one that states new addresses for both rails."""
    stated = {
        host: {
            "spark_fabric_rails": [
                {"netdev": netdev, "address": f"10.{87 + rail}.0.{number}/24"} for rail, netdev in enumerate(NETDEVS)
            ]
        }
        for number, host in enumerate(HOSTS, 1)
    }
    (tmp_path / "rails.yml").write_text(yaml.safe_dump({"all": {"hosts": stated}}))
    return ["-i", str(tmp_path / "rails.yml"), "-e", "fabric_configure=true"]


def test_a_strangers_broken_file_is_named_and_nothing_changes(rails: list[str]) -> None:
    stranger = "/etc/netplan/90-NM-stranger.yaml"
    ssh("spark2", f"printf 'network:\\n  ethernets: [\\n' > {stranger}; chmod 600 {stranger}")
    before = {host: addresses(host) for host in HOSTS}
    refused = fabric(*rails)
    ssh("spark2", f"rm {stranger}")
    assert refused.rc != 0 and "spark2: [fabric.netplan]" in refused.text and stranger in refused.text
    assert addresses("spark2") == before["spark2"]
    assert "No such file" in ssh("spark2", f"ls {OURS}", check=False)
    assert addresses("spark1") == before["spark1"], "on no node"


def test_netplan_is_written_applied_and_kept(rails: list[str]) -> None:
    management = {host: {text for text in addresses(host) if text.startswith("enP7s7")} for host in HOSTS}
    applied = fabric(*rails)
    assert applied.rc == 0, applied.text
    for number, host in enumerate(HOSTS, 1):
        held = addresses(host)
        assert {f"{netdev} 10.{87 + rail}.0.{number}/24" for rail, netdev in enumerate(NETDEVS)} <= held
        assert management[host] <= held
        assert ssh(host, f"stat -c '%a %U' {OURS}").split() == ["600", "root"]
        assert "mtu 9000" in ssh(host, f"ip link show {NETDEVS[0]}")
        assert record(host)["address"] == f"10.87.0.{number}"
    assert fabric(*rails).changed == [0, 0]
    for host in HOSTS:
        assert "inactive" in ssh(host, "systemctl is-active sparkwright-netplan-restore.timer", check=False)
        assert ssh(host, "ls /var/lib/sparkwright/netplan").split() == ["lock"], "nothing waits to be taken back"


def test_what_nobody_confirms_is_taken_back() -> None:
    before, content = addresses("spark1"), ssh("spark1", f"cat {OURS}")
    ports = [{"netdev": NETDEVS[0], "address": "10.97.0.1/24"}]
    arguments = {"host": "spark1", "ports": ports, "management_address": "10.0.21.15", "deadline_s": 90}
    argv = ["ansible", "spark1", "-i", INVENTORY, "-b", "-m", "sparkwright.dsv41.fabric_netplan"]
    done = subprocess.run(
        [*argv, "-a", json.dumps(arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout
    assert f"{NETDEVS[0]} 10.97.0.1/24" in addresses("spark1")
    for _ in range(100):
        time.sleep(2)
        if addresses("spark1") == before:
            break
    assert addresses("spark1") == before
    assert ssh("spark1", f"cat {OURS}") == content
