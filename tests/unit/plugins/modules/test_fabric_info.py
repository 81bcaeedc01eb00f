# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module over a recorded sysfs tree, as it is and as the field broke it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.modules import fabric_info

RECORDED = Path(__file__).parents[3] / "fixtures/sysfs/rxe-debian13"
PORT = "class/infiniband/rocep1s0f0/ports/1"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
ADDRESS, GID = "10.77.0.1", "0000:0000:0000:0000:0000:ffff:0a4d:0001"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    root = tmp_path / "sys"
    shutil.copytree(RECORDED / "class", root / "class")
    return root


@pytest.fixture
def read(run_module: Callable[..., Any], commands: Any, recorded: Any, sysfs: Path) -> Callable[..., Any]:
    def run(address: str = ADDRESS, addresses: str = "", check: bool = False) -> Any:
        commands.add("ip", {"-j -4 address show": (0, addresses or recorded("ip-address"), "")})
        result = run_module(fabric_info.main, check=check, address=address, host="spark1", sysfs_root=str(sysfs))
        assert not result.get("failed") and not result["changed"]
        return result

    return run


def move_gid(sysfs: Path, index: int) -> None:
    """The IPv4-mapped GID of the recording, at another index."""
    for name, empty in (("gids", EMPTY), ("gid_attrs/types", None), ("gid_attrs/ndevs", None)):
        old, new = (sysfs / PORT / name / str(n) for n in (1, index))
        new.write_text(old.read_text())
        old.unlink()
        if empty:
            old.write_text(empty)


def test_the_recorded_tree(read: Callable[..., Any]) -> None:
    result = read()
    assert result["findings"] == []
    assert result["fabric"] == {
        "address": ADDRESS,
        "socket_interface": "enp1s0f0np0",
        "mtu": 9000,
        "hcas": "=rocep1s0f0:1",
        "gids": {"rocep1s0f0:1": 1},
    }
    (port,) = result["ports"]
    assert (port["state"], port["phys_state"], port["link_layer"]) == ("ACTIVE", "LinkUp", "Ethernet")
    assert [(gid["index"], gid["ipv4"]) for gid in port["gids"]] == [(0, None), (1, ADDRESS)]
    interfaces = {entry["name"]: entry for entry in result["interfaces"]}
    assert interfaces["enp1s0f0np0"] == {
        "name": "enp1s0f0np0",
        "mtu": 9000,
        "state": "up",
        "addresses": [ADDRESS],
    }
    assert interfaces["enP7s7"]["mtu"] == 1500


def test_check_mode_finds_the_same(read: Callable[..., Any]) -> None:
    """R15."""
    assert read(check=True) == read(check=False)


@pytest.mark.parametrize("index", [3, 4, 15, 200])
def test_the_index_is_wherever_the_gid_is(index: int, sysfs: Path, read: Callable[..., Any]) -> None:
    """R1: it differs between nodes and drifts; empty slots before it are normal."""
    move_gid(sysfs, index)
    result = read()
    assert result["fabric"]["gids"] == {"rocep1s0f0:1": index}
    assert result["findings"] == []


def test_a_sparse_table(sysfs: Path, read: Callable[..., Any]) -> None:
    move_gid(sysfs, 1023)
    for name in range(2, 16):
        (sysfs / PORT / "gids" / str(name)).unlink()
    (sysfs / PORT / "gids" / "readme").write_text("not an entry")
    result = read()
    assert result["fabric"]["gids"] == {"rocep1s0f0:1": 1023}


def test_numbers_are_in_order_of_value(sysfs: Path, read: Callable[..., Any]) -> None:
    for index in ("9", "10"):
        (sysfs / PORT / "gids" / index).write_text("fe80:0000:0000:0000:0000:0000:0000:0001")
    assert [gid["index"] for gid in read()["ports"][0]["gids"]] == [0, 1, 9, 10]


@pytest.mark.parametrize("kind", ["IB/RoCE v1", ""])
def test_a_gid_that_is_not_roce_v2(kind: str, sysfs: Path, read: Callable[..., Any]) -> None:
    """R3: link-local, whatever its type, and RoCE v1 are not enough."""
    (sysfs / PORT / "gid_attrs/types/1").write_text(kind)
    result = read()
    assert result["fabric"]["hcas"] == ""
    (finding,) = result["findings"]
    assert finding["id"] == "fabric.gid"
    assert GID in finding["found"] and ADDRESS in finding["needed"]


def add_hca(sysfs: Path, name: str, gid: str, netdev: str) -> Path:
    hca = sysfs / "class/infiniband" / name
    shutil.copytree(sysfs / "class/infiniband/rocep1s0f0", hca)
    (hca / "ports/1/gids/1").write_text(gid)
    for index in ("0", "1"):
        (hca / f"ports/1/gid_attrs/ndevs/{index}").write_text(netdev)
    return hca


def test_a_name_that_begins_like_another(sysfs: Path, read: Callable[..., Any]) -> None:
    """R5: without the exact form rocep1s0f0 would also match rocep1s0f01."""
    add_hca(sysfs, "rocep1s0f01", GID.replace("0001", "0009"), "enP7s7")
    assert read()["fabric"]["hcas"] == "=rocep1s0f0:1"


@pytest.mark.parametrize(
    ("gid", "netdev"),
    [
        ("0000:0000:0000:0000:0000:ffff:a9fe:0909", "enP7s7"),
        ("0000:0000:0000:0000:0000:ffff:0a4c:000b", "enP7s7"),
        # The same address, stale, on a device that does not own it.
        (GID, "enP7s7"),
    ],
)
def test_an_active_port_of_another_network(gid: str, netdev: str, sysfs: Path, read: Callable[..., Any]) -> None:
    """R7, R9: 169.254/16 and management are not the fabric."""
    add_hca(sysfs, "aaa", gid, netdev)
    result = read()
    assert result["fabric"]["hcas"] == "=rocep1s0f0:1"
    assert result["findings"] == []


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED"])
def test_a_port_that_is_not_active(state: str, sysfs: Path, read: Callable[..., Any]) -> None:
    """R7."""
    (sysfs / PORT / "state").write_text(f"{state}\n")
    result = read()
    (finding,) = result["findings"]
    assert finding["id"] == "fabric.port_state"
    assert finding["found"] == f"rocep1s0f0 port 1 is {state[3:]}"
    assert result["fabric"]["hcas"] == ""


def test_names_follow_the_address(sysfs: Path, recorded: Any, read: Callable[..., Any]) -> None:
    """R9: another node, other names."""
    new = "enP2p1s0f1np1"
    (sysfs / "class/net/enp1s0f0np0").rename(sysfs / "class/net" / new)
    (sysfs / "class/infiniband/rocep1s0f0").rename(sysfs / "class/infiniband/roceP2p1s0f1")
    for index in ("0", "1"):
        (sysfs / f"class/infiniband/roceP2p1s0f1/ports/1/gid_attrs/ndevs/{index}").write_text(new)
    result = read(addresses=recorded("ip-address").replace("enp1s0f0np0", new))
    assert (result["fabric"]["socket_interface"], result["fabric"]["hcas"]) == (new, "=roceP2p1s0f1:1")


def test_an_address_that_no_device_has(read: Callable[..., Any]) -> None:
    result = read(address="10.99.0.1")
    (finding,) = result["findings"]
    assert finding["id"] == "fabric.address"
    # R10: what is there is told, and never taken instead.
    assert "enp1s0f0np0 10.77.0.1" in finding["found"] and "10.99.0.1" in finding["needed"]
    assert result["fabric"]["socket_interface"] == ""


@pytest.mark.parametrize(
    "gone",
    [
        f"{PORT}/gid_attrs/types/0",
        f"{PORT}/gids/0",
        f"{PORT}/link_layer",
        f"{PORT}/rate",
        f"{PORT}/phys_state",
        "class/net/enP7s7/mtu",
        "class/net/enP7s7",
    ],
)
def test_entries_that_vanish_or_refuse_to_be_read(gone: str, sysfs: Path, read: Callable[..., Any]) -> None:
    """A name that is listed and cannot be read, as an empty slot (EINVAL) or a device that leaves."""
    path = sysfs / gone
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to("nowhere")
    result = read()
    assert result["fabric"]["hcas"] == "=rocep1s0f0:1"
    assert result["findings"] == []


@pytest.mark.parametrize("gone", [PORT + "/gids", PORT + "/gid_attrs", PORT + "/state"])
def test_without_what_matters_there_is_a_finding(gone: str, sysfs: Path, read: Callable[..., Any]) -> None:
    path = sysfs / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert len(read()["findings"]) == 1


def test_a_node_without_rdma(sysfs: Path, read: Callable[..., Any]) -> None:
    shutil.rmtree(sysfs / "class/infiniband")
    result = read()
    assert result["ports"] == []
    assert (result["fabric"]["socket_interface"], result["fabric"]["hcas"]) == ("enp1s0f0np0", "")


def test_a_file_among_the_network_devices(sysfs: Path, read: Callable[..., Any]) -> None:
    (sysfs / "class/net/bonding_masters").write_text("")
    assert "bonding_masters" not in [entry["name"] for entry in read()["interfaces"]]


def test_ip_fails(run_module: Callable[..., Any], commands: Any, sysfs: Path) -> None:
    commands.add("ip", {"*": (255, "", 'Object "address" is unknown, try "ip help".\n')})
    result = run_module(fabric_info.main, address=ADDRESS, host="spark1", sysfs_root=str(sysfs))
    assert result["failed"] and "ip -j -4 address show failed" in result["msg"]


@pytest.mark.parametrize("addresses", ["", "[]", "[{},{}]", json.dumps([{"ifname": "lo"}])])
def test_no_addresses(addresses: str, run_module: Callable[..., Any], commands: Any, sysfs: Path) -> None:
    commands.add("ip", {"*": (0, addresses, "")})
    result = run_module(fabric_info.main, address=ADDRESS, host="spark1", sysfs_root=f"{sysfs}/")
    assert [finding["found"] for finding in result["findings"]] == ["no IPv4 address"]
