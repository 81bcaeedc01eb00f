# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import node

MIB = 1 << 20
NEEDS = node.Needs(
    commands=["rsync"],
    python_modules=["requests"],
    ports=[8000, 29521],
    memory_bytes=100 * node.GIB,
    disk_path="/var/lib/sparkwright",
    disk_bytes=5 * node.GIB,
)
GOOD: dict[str, Any] = {
    "docker_error": "",
    "missing_commands": [],
    "missing_modules": [],
    "listeners": {},
    "ours_running": False,
    "mem_available": 100 * node.GIB,
    "disk_free": 5 * node.GIB,
}

# A Spark's /proc/meminfo has these lines first.
MEMINFO = """\
MemTotal:       125513344 kB
MemFree:         1017268 kB
MemAvailable:   118045732 kB
Buffers:           12 kB
"""

# Recorded: sshd on every address, a resolver on 127.0.0.53, and one connection that is established.
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1377 1 0000000000000000 100 0 0 10 0
   1: 3500007F:0035 00000000:0000 0A 00000000:00000000 00:00000000 00000000   101        0 991 1 0000000000000000 100 0 0 10 5
   2: 0100007F:1F40 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 5555 1 0000000000000000 20 4 30 10 -1
"""  # noqa: E501
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000000000000000000000000000:1F40 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0000000000000000 100 0 0 10 0
"""  # noqa: E501


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MEMINFO, 118045732 * 1024),
        ("MemTotal: 1 kB\n", None),
        ("MemAvailable:\n", None),
        ("", None),
    ],
)
def test_mem_available(text: str, expected: int | None) -> None:
    assert node.mem_available(text) == expected


@pytest.mark.parametrize(
    ("table", "expected"),
    [(TCP, {22: "1377", 53: "991"}), (TCP6, {8000: "4242"}), ("", {}), (TCP.splitlines()[0], {}), ("x\ny z\n", {})],
)
def test_listening_ports(table: str, expected: dict[int, str]) -> None:
    assert node.listening_ports(table) == expected


def test_nothing_is_wrong_with_a_good_node() -> None:
    assert node.findings(GOOD, NEEDS, "spark1") == []


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        # M1: both sides of the limit.
        ({"mem_available": 100 * node.GIB - MIB}, "[node.memory] found 100.00 GiB available; needed 100.00 GiB"),
        ({"mem_available": None}, "[node.memory] found unknown; needed 100.00 GiB (weights + KV + runtime + margin"),
        ({"disk_free": 5 * node.GIB - 1}, "[node.disk] found 5.00 GiB free for /var/lib/sparkwright; needed 5.00 GiB"),
        ({"disk_free": None}, "[node.disk] found unknown for /var/lib/sparkwright; needed 5.00 GiB"),
        ({"docker_error": "no docker command"}, "[node.docker] found no docker command; needed a Docker engine"),
        (
            {"missing_commands": ["rsync"]},
            "[node.command] found no rsync; needed rsync in PATH; repair: apt-get install",
        ),
        (
            {"missing_commands": ["ssh"]},
            "[node.command] found no ssh; needed ssh in PATH; repair: apt-get install openssh",
        ),
        ({"missing_modules": ["requests"]}, "[node.python] found no Python module requests; needed requests"),
        ({"listeners": {8000: "python3 (pid 7)"}}, "[node.port] found port 8000 is taken by python3 (pid 7); needed a"),
    ],
)
def test_one_finding(facts: dict[str, Any], line: str) -> None:
    found = node.findings({**GOOD, **facts}, NEEDS, "spark1")
    assert len(found) == 1
    assert found[0].line().startswith(f"spark1: {line}")
    assert found[0].repair


@pytest.mark.parametrize("available", [100 * node.GIB, 100 * node.GIB + MIB])
def test_enough_memory(available: int) -> None:
    assert node.findings({**GOOD, "mem_available": available}, NEEDS, "spark1") == []


@pytest.mark.parametrize(
    ("kind", "missing", "package"),
    [
        ("missing_commands", "rrsync", "rsync"),
        ("missing_commands", "ip", "iproute2"),
        ("missing_modules", "packaging", "python3-packaging"),
        ("missing_modules", "ensurepip", "python3-venv"),
    ],
)
def test_the_repair_names_the_package(kind: str, missing: str, package: str) -> None:
    (finding,) = node.findings({**GOOD, kind: [missing]}, NEEDS, "spark1")
    assert finding.repair == f"apt-get install {package}"


def test_the_repair_of_docker_installs_no_package_over_docker_ce() -> None:
    (finding,) = node.findings({**GOOD, "docker_error": "x"}, NEEDS, "spark1")
    assert "docker.io" not in finding.repair


def test_our_own_container_is_not_held_against_the_node() -> None:
    ours = {"ours_running": True, "listeners": {8000: "vllm (pid 7)"}, "mem_available": node.GIB}
    assert node.findings({**GOOD, **ours}, NEEDS, "spark1") == []


def test_every_finding_at_once() -> None:
    bad = {
        "docker_error": "no docker command",
        "missing_commands": ["rsync", "ssh"],
        "missing_modules": ["requests"],
        "listeners": {8000: "a", 29521: "b"},
        "mem_available": None,
        "disk_free": None,
    }
    found = node.findings({**GOOD, **bad}, NEEDS, "spark1")
    assert [finding.id for finding in found] == [
        "node.docker",
        *["node.command"] * 2,
        "node.python",
        *["node.port"] * 2,
        "node.memory",
        "node.disk",
    ]
