# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module over a recorded sysfs tree; what it makes of odd trees is tested with module_utils/fabric.py."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.modules import fabric_info

SYSFS = Path(__file__).parents[3] / "fixtures/sysfs/rxe-debian13"
SHOWN = [
    {"ifname": "lo", "addr_info": [{"local": "127.0.0.1", "prefixlen": 8}]},
    {"ifname": "enP7s7", "addr_info": [{"local": "192.168.1.5", "prefixlen": 24}]},
    {"ifname": "enp1s0f0np0", "addr_info": [{"local": "10.77.0.1", "prefixlen": 24}]},
]
ROUTES = [{"dst": "default", "dev": "enP7s7"}]
DEVINFO = "hca_id:\trocep1s0f0\n\t\tport:\t1\n\t\t\tactive_mtu:\t\t4096 (5)\n"
IP = {
    "-j -4 address show": (0, json.dumps(SHOWN), ""),
    "-j -4 route show default": (0, json.dumps(ROUTES), ""),
}


@pytest.fixture(autouse=True)
def no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)


@pytest.fixture
def read(run_module: Callable[..., Any], commands: Any) -> Callable[..., Any]:
    """The module over the recorded tree, with commands that answer."""
    commands.add("ip", IP)
    commands.add("ibv_devinfo", {"": (0, DEVINFO, "")})
    return lambda **options: run_module(fabric_info.main, **{"sysfs_root": str(SYSFS), **options})


def test_facts(read: Callable[..., Any], commands: Any) -> None:
    result = read()
    assert not result["changed"] and result["errors"] == [] and result["management"] == "enP7s7"
    (port,) = result["ports"]
    assert (port["hca"], port["netdev"], port["state"], port["active_mtu"]) == (
        "rocep1s0f0",
        "enp1s0f0np0",
        "ACTIVE",
        4096,
    )
    assert port["addresses"] == ["10.77.0.1/24"] and [gid["ipv4"] for gid in port["gids"]] == [None, "10.77.0.1"]
    names = [interface["name"] for interface in result["interfaces"]]
    assert names == sorted(path.name for path in (SYSFS / "class/net").iterdir())
    assert commands.calls("ip") == list(IP) and commands.calls("ibv_devinfo") == [""]


def test_check_mode_finds_the_same_and_only_reads(read: Callable[..., Any], tmp_path: Path) -> None:
    """R15."""
    tree = tmp_path / "sys"
    shutil.copytree(SYSFS, tree)
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*")}
    assert read(sysfs_root=str(tree), check=True) == read(sysfs_root=str(tree), check=False)
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*")} == before


def test_the_device_of_the_ssh_connection(read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.77.0.9 50000 10.77.0.1 22")
    assert read()["management"] == "enp1s0f0np0"
    monkeypatch.setenv("SSH_CONNECTION", "10.77.0.9 50000")
    assert read()["management"] == "enP7s7"


@pytest.mark.parametrize("answer", [(1, "", "No IB devices found\n"), None])
def test_without_rdma_tools(answer: Any, run_module: Callable[..., Any], commands: Any) -> None:
    commands.add("ip", IP)
    if answer:
        commands.add("ibv_devinfo", {"": answer})
    result = run_module(fabric_info.main, sysfs_root=str(SYSFS))
    assert [port["active_mtu"] for port in result["ports"]] == [0] and result["errors"] == []


def test_a_node_without_rdma(read: Callable[..., Any], tmp_path: Path) -> None:
    shutil.copytree(SYSFS / "class/net", tmp_path / "class/net")
    result = read(sysfs_root=str(tmp_path))
    assert result["ports"] == [] and result["errors"] == [] and result["interfaces"]


def test_sysfs_that_may_not_be_read(read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.listdir

    def refuse(path: Any = ".") -> list[str]:
        if str(path).endswith("class/infiniband"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert read()["errors"] == [f"{SYSFS}/class/infiniband: Permission denied"]


@pytest.mark.parametrize("failing", list(IP))
def test_ip_fails(failing: str, run_module: Callable[..., Any], commands: Any) -> None:
    commands.add("ip", {**IP, failing: (255, "", 'Object "x" is unknown, try "ip help".\n')})
    result = run_module(fabric_info.main, sysfs_root=str(SYSFS))
    assert result["failed"]
    assert result["msg"] == f'ip {failing} failed: Object "x" is unknown, try "ip help".'


@pytest.mark.parametrize("printed", ["no JSON", "{}", "[1]", '[{"addr_info": 1}]'])
def test_ip_prints_something_else(printed: str, run_module: Callable[..., Any], commands: Any) -> None:
    commands.add("ip", {**IP, "-j -4 address show": (0, printed, "")})
    result = run_module(fabric_info.main, sysfs_root=str(SYSFS))
    assert result["failed"] and result["msg"].startswith("`ip -j` printed something else than expected: ")


def test_without_ip(run_module: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(module: Any, name: str, required: bool = False, **more: Any) -> None:
        assert (name, required) == ("ip", True)
        module.fail_json(msg=f"Failed to find required executable {name}")

    monkeypatch.setattr(fabric_info.AnsibleModule, "get_bin_path", nowhere)
    result = run_module(fabric_info.main, sysfs_root=str(SYSFS))
    assert result["failed"] and "executable ip" in result["msg"]


def test_recorded_outputs_replace_the_commands(run_module: Callable[..., Any], commands: Any, tmp_path: Path) -> None:
    (tmp_path / "ip-address.json").write_text(json.dumps(SHOWN))
    result = run_module(fabric_info.main, sysfs_root=str(SYSFS), commands_root=str(tmp_path))
    assert (result["ports"][0]["addresses"], result["ports"][0]["active_mtu"], result["management"]) == (
        ["10.77.0.1/24"],
        0,
        "",
    )
    (tmp_path / "ip-route.json").write_text(json.dumps(ROUTES))
    (tmp_path / "ibv_devinfo.txt").write_text(DEVINFO)
    result = run_module(fabric_info.main, sysfs_root=str(SYSFS), commands_root=str(tmp_path))
    assert (result["ports"][0]["active_mtu"], result["management"]) == (4096, "enP7s7")
    assert commands.calls("ip") == []
