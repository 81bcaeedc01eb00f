# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module over a procfs tree and a docker that gives recorded answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.modules import node_check

VERSION = "version --format {{.Server.Version}}"
INSPECT = "container inspect --format {{.State.Running}} sparkwright-lab-r0"
NONE = (1, "\n", "Error response from daemon: No such container: sparkwright-lab-r0\n")
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
DOCKER = {VERSION: (0, "28.2.2\n", ""), INSPECT: NONE}

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
# Port 8000 on 127.0.0.1, listening; then a connection to port 29521 of somebody else.
TCP = HEAD + (
    "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0  0 4242 1 0 100 0 0 10 0\n"
    "   1: 0100007F:C350 0100007F:7351 01 00000000:00000000 00:00000000 00000000     0  0 4343 1 0 20 4 30 10 -1\n"
)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    root = tmp_path / "proc"
    (root / "net").mkdir(parents=True)
    (root / "net/tcp").write_text(TCP)
    (root / "net/tcp6").write_text(HEAD)
    (root / "meminfo").write_text("MemTotal: 4000000 kB\nMemFree: 10 kB\nMemAvailable: 2097152 kB\n")
    (root / "77/fd").mkdir(parents=True)
    (root / "77/comm").write_text("python3\n")
    (root / "77/fd/3").symlink_to("socket:[4242]")
    (root / "78/fd").mkdir(parents=True)
    return root


@pytest.fixture
def check(run_module: Callable[..., Any], commands: Any, proc: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(docker: dict[str, Any] | None = DOCKER, **options: Any) -> tuple[list[str], dict[str, Any]]:
        if docker:
            commands.add("docker", docker)
        base = {
            "host": "spark1",
            "container": "sparkwright-lab-r0",
            "disk_path": str(tmp_path / "not/yet/there"),
            "proc_root": str(proc),
        }
        result = run_module(node_check.main, **{**base, **options})
        assert not result.get("failed") and not result["changed"]
        return [f"{finding['id']}: {finding['found']}" for finding in result["findings"]], result["facts"]

    return run


def test_a_good_node(check: Callable[..., Any]) -> None:
    lines, facts = check(ports=[29521], memory_bytes=2 << 30, disk_bytes=1)
    assert lines == []
    assert facts["mem_available"] == 2 << 30
    assert facts["listeners"] == {} and not facts["ours_running"]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"ports": [8000, 29521]}, ["node.port: port 8000 is taken by python3 (pid 77)"]),
        ({"memory_bytes": (2 << 30) + 1}, ["node.memory: 2.00 GiB available"]),
        ({"commands": ["rsync", "docker"]}, ["node.command: no rsync"]),
        ({"python_modules": ["json", "no_such_module"]}, ["node.python: no Python module no_such_module"]),
    ],
)
def test_one_finding(options: dict[str, Any], lines: list[str], check: Callable[..., Any]) -> None:
    assert check(**options)[0] == lines


def test_disk(check: Callable[..., Any], tmp_path: Path) -> None:
    (line,) = check(disk_bytes=1 << 60)[0]
    assert line.startswith("node.disk: ") and str(tmp_path / "not/yet/there") in line


def test_free_space_of_a_path_that_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stat = os.statvfs(tmp_path)
    assert node_check.disk_free("not/there") == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.2)


@pytest.mark.parametrize(
    ("docker", "line"),
    [
        (None, "node.docker: no docker command"),
        ({VERSION: (1, "\n", f"{DOWN}\n"), INSPECT: (1, "\n", f"{DOWN}\n")}, f"node.docker: {DOWN}"),
        ({VERSION: (1, "\n", ""), INSPECT: NONE}, "node.docker: docker version failed"),
    ],
)
def test_no_engine(docker: dict[str, Any] | None, line: str, check: Callable[..., Any]) -> None:
    assert check(docker)[0] == [line]


@pytest.mark.parametrize(("said", "counted"), [("true\n", False), ("false\n", True)])
def test_our_own_container(said: str, counted: bool, check: Callable[..., Any]) -> None:
    """While it runs its ports and memory are its own; once it has ended they count again."""
    lines, facts = check({**DOCKER, INSPECT: (0, said, "")}, ports=[8000], memory_bytes=1 << 50)
    assert facts["ours_running"] is not counted
    assert bool(lines) is counted


def test_a_process_that_may_not_be_seen(check: Callable[..., Any], proc: Path) -> None:
    (proc / "77/fd/3").unlink()
    assert check(ports=[8000])[0] == ["node.port: port 8000 is taken by an unknown process"]


def test_a_listener_of_ipv6(check: Callable[..., Any], proc: Path) -> None:
    line = (
        "   0: 00000000000000000000000000000000:1F41 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 4242 1 0\n"
    )
    (proc / "net/tcp6").write_text(HEAD + line)
    assert check(ports=[8001])[0] == ["node.port: port 8001 is taken by python3 (pid 77)"]


def test_a_tree_without_answers(check: Callable[..., Any], proc: Path) -> None:
    for name in ("meminfo", "net/tcp", "net/tcp6"):
        (proc / name).unlink()
    assert check(ports=[8000], memory_bytes=1)[0] == ["node.memory: unknown"]


def test_every_finding_at_once(check: Callable[..., Any]) -> None:
    wanted = {"commands": ["rsync"], "python_modules": ["no_such_module"], "ports": [8000]}
    lines, _ = check(None, **wanted, memory_bytes=1 << 50, disk_bytes=1 << 60)
    assert [line.partition(":")[0] for line in lines] == [
        "node.docker",
        "node.command",
        "node.python",
        "node.port",
        "node.memory",
        "node.disk",
    ]


def test_check_mode_finds_the_same(run_module: Callable[..., Any], check: Callable[..., Any], proc: Path) -> None:
    options = {"host": "a", "container": "sparkwright-lab-r0", "disk_path": "/", "proc_root": str(proc)}
    check()
    assert run_module(node_check.main, check=True, **options)["findings"] == []
