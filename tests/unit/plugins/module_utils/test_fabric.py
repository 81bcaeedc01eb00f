# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Facts of a node from trees in the form of sysfs, as recorded and as kernels change them while they are read."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import fabric
from cablings import mapped

RECORDED = Path(__file__).parents[3] / "fixtures/sysfs/rxe-debian13"
NO_OUTPUT = fabric.Outputs("", "")
HCA, NETDEV = "class/infiniband/rocep1s0f0", "enp1s0f0np0"
PORT = f"{HCA}/ports/1"


@pytest.mark.parametrize(
    ("gid", "address"),
    [
        ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "10.77.0.1"),
        ("0000:0000:0000:0000:0000:FFFF:C0A8:B10B", "192.168.177.11"),
        ("fe80:0000:0000:0000:5054:00ff:fe77:0001", None),
        ("fe80:0000:0000:0000:0000:ffff:0a4d:0001", None),
        ("0000:0000:0000:0000:0000:0000:0a4d:0001", None),
        ("0000:0000:0000:0000:0000:ffff:0a4d", None),
        ("0000:0000:0000:0000:0000:ffff:0a4d:000g", None),
        ("0000:0000:0000:0000:0000:0000:0000:0000", None),
        ("", None),
        ("(null)", None),
    ],
)
def test_mapped_ipv4(gid: str, address: str | None) -> None:
    assert fabric.mapped_ipv4(gid) == address


@pytest.mark.parametrize(
    ("text", "expected"),
    [("RoCE v2", True), ("v2", True), (" RoCE v2\n", True), ("IB/RoCE v1", False), ("v1", False), ("", False)],
)
def test_is_roce_v2(text: str, expected: bool) -> None:
    assert fabric.is_roce_v2(text) is expected


@pytest.mark.parametrize(
    ("pci", "name", "expected"),
    [
        ("0002:01:00.1", "x", (2, 1, 0, 1)),
        ("000f:ff:1f.a", "enp1s0f0np0", (15, 255, 31, 10)),
        ("", "enp1s0f0np0", (0, 1, 0, 0)),
        ("", "enP2p1s0f1np1", (2, 1, 0, 1)),
        ("", "roceP2p1s0f1", (2, 1, 0, 1)),
        ("", "enP7s7", None),
        ("", "enp17s0", (0, 17, 0, 0)),
        ("rxe0", "eth0", None),
        ("", "", None),
    ],
)
def test_pci_function(pci: str, name: str, expected: tuple[int, ...] | None) -> None:
    assert fabric.pci_function(pci, name) == expected


@pytest.mark.parametrize(
    ("mtu", "expected"),
    [(9000, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (1120, 1024), (1119, 512), (352, 256), (351, 0), (0, 0)],
)
def test_roce_mtu(mtu: int, expected: int) -> None:
    assert fabric.roce_mtu(mtu) == expected


DEVINFO = """\
hca_id:\trocep1s0f0
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t28.45.4028
\tphys_port_cnt:\t\t\t2
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t1024 (3)
\t\t\tlink_layer:\t\tEthernet
\t\tport:\t2
\t\t\tactive_mtu:\t\t4096 (5)

hca_id:\troceP2p1s0f0
\t\tport:\t1
\t\t\tactive_mtu:\t\tinvalid MTU (0)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DEVINFO, {("rocep1s0f0", 1): 1024, ("rocep1s0f0", 2): 4096}),
        ("No IB devices found\n", {}),
        ("", {}),
    ],
)
def test_active_mtus(text: str, expected: dict[tuple[str, int], int]) -> None:
    assert fabric.active_mtus(text) == expected


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the recorded tree, without what its kernel refused to read."""
    shutil.copytree(RECORDED / "class", tmp_path / "sys/class")
    return tmp_path / "sys"


def outputs(addresses: Any = (), routes: Any = ()) -> fabric.Outputs:
    return fabric.Outputs(json.dumps(list(addresses)), json.dumps(list(routes)))


def held(name: str, *addresses: str) -> dict[str, Any]:
    """One device of `ip -j -4 address show`."""
    infos = [{"local": text.partition("/")[0], "prefixlen": int(text.partition("/")[2])} for text in addresses]
    return {"ifname": name, "addr_info": infos}


def test_a_recorded_tree() -> None:
    node = fabric.read(str(RECORDED), outputs([held(NETDEV, "10.77.0.1/24", "10.78.0.1/16")]))
    (port,) = node.ports
    assert (port.hca, port.port, port.netdev, port.pci) == ("rocep1s0f0", 1, NETDEV, "")
    assert (port.state, port.phys_state, port.link_layer) == ("ACTIVE", "LinkUp", "Ethernet")
    assert (port.rate_gbps, port.mtu, port.active_mtu) == (2.5, 9000, 0)
    assert port.addresses == ["10.77.0.1/24", "10.78.0.1/16"]
    assert [(gid.index, gid.type, gid.netdev, gid.ipv4) for gid in port.gids] == [
        (0, "RoCE v2", NETDEV, None),
        (1, "RoCE v2", NETDEV, "10.77.0.1"),
    ]
    assert node.errors == []
    names = {interface.name: interface for interface in node.interfaces}
    assert (names[NETDEV].state, names[NETDEV].mtu, names[NETDEV].addresses) == ("up", 9000, port.addresses)
    assert json.loads(json.dumps(node.to_dict()))["ports"][0]["gids"][1]["ipv4"] == "10.77.0.1"


def test_a_trailing_slash_and_a_missing_root(tree: Path) -> None:
    assert fabric.read(f"{tree}/", NO_OUTPUT) == fabric.read(str(tree), NO_OUTPUT)
    assert fabric.read(str(tree / "nowhere"), NO_OUTPUT) == fabric.Node([], [], "", [])


def put_gid(tree: Path, index: int, gid: str, kind: str = "RoCE v2", netdev: str = NETDEV) -> None:
    for table, text in (("gids", gid), ("gid_attrs/types", kind), ("gid_attrs/ndevs", netdev)):
        (tree / PORT / table / str(index)).write_text(f"{text}\n")


def test_a_long_and_sparse_table(tree: Path) -> None:
    shutil.rmtree(tree / PORT / "gids")
    (tree / PORT / "gids").mkdir()
    for index in range(1024):
        (tree / PORT / "gids" / str(index)).write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    (tree / PORT / "gids/name").write_text("no entry")
    for index in (1023, 7, 100, 20):
        put_gid(tree, index, mapped(f"10.77.{index % 256}.1"))
    (port,) = fabric.read(str(tree), NO_OUTPUT).ports
    assert [(gid.index, gid.ipv4) for gid in port.gids] == [
        (index, f"10.77.{index % 256}.1") for index in (7, 20, 100, 1023)
    ]


def test_ports_in_order_of_name_with_their_own_device(tree: Path) -> None:
    """Two ports of one function are told apart by dev_port."""
    shutil.copytree(tree / PORT, tree / HCA / "ports/2")
    (tree / HCA / "ports/lost+found").mkdir()
    for number, name in enumerate(("ensb", "ensa")):
        (tree / HCA / "device/net" / name).mkdir(parents=True)
        (tree / "class/net" / name).mkdir()
        (tree / "class/net" / name / "dev_port").write_text(f"{number}\n")
        (tree / "class/net" / name / "mtu").write_text("4200\n")
    ports = fabric.read(str(tree), NO_OUTPUT).ports
    assert [(port.port, port.netdev, port.mtu) for port in ports] == [(1, "ensb", 4200), (2, "ensa", 4200)]


def test_the_device_of_the_driver_wins(tree: Path) -> None:
    (tree / HCA / "device/net/enP7s7").mkdir(parents=True)
    (tree / "class/net/enP7s7/dev_port").write_text("1\n")
    assert fabric.read(str(tree), NO_OUTPUT).ports[0].netdev == "enP7s7"


def test_without_gids_soft_roce_names_its_parent(tree: Path) -> None:
    shutil.rmtree(tree / PORT / "gids")
    (port,) = fabric.read(str(tree), NO_OUTPUT).ports
    assert (port.netdev, port.gids) == (NETDEV, [])


@pytest.mark.parametrize(("target", "pci"), [("../../../0002:01:00.1", "0002:01:00.1"), ("../../virtual", "")])
def test_the_pci_address(target: str, pci: str, tree: Path) -> None:
    (tree / HCA / "device").symlink_to(target)
    (tree / "class/net" / NETDEV / "device").unlink(missing_ok=True)
    (tree / "class/net" / NETDEV / "device").symlink_to(target)
    node = fabric.read(str(tree), NO_OUTPUT)
    assert node.ports[0].pci == pci
    assert [interface.pci for interface in node.interfaces if interface.name == NETDEV] == [pci]


@pytest.mark.parametrize(
    ("text", "rate"), [("200 Gb/sec (4X HDR)", 200.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("", 0.0), ("unknown", 0.0)]
)
def test_the_rate(text: str, rate: float, tree: Path) -> None:
    (tree / PORT / "rate").write_text(text)
    assert fabric.read(str(tree), NO_OUTPUT).ports[0].rate_gbps == rate


def test_what_is_unknown_says_so(tree: Path) -> None:
    for name in ("state", "phys_state", "link_layer", "rate"):
        (tree / PORT / name).unlink()
    (tree / "class/net" / NETDEV / "operstate").unlink()
    node = fabric.read(str(tree), NO_OUTPUT)
    (port,) = node.ports
    assert (port.state, port.phys_state, port.link_layer, port.rate_gbps) == ("unknown", "unknown", "unknown", 0.0)
    assert [interface.state for interface in node.interfaces if interface.name == NETDEV] == ["unknown"]


def test_the_rdma_mtu_of_ibv_devinfo() -> None:
    assert fabric.read(str(RECORDED), fabric.Outputs("", "", DEVINFO)).ports[0].active_mtu == 1024


@pytest.mark.parametrize(
    ("reached_at", "management"),
    [
        ("192.168.1.5", "enP7s7"),
        ("10.77.0.1", NETDEV),
        # A forwarded connection, sudo without the variable, IPv6.
        ("127.0.0.1", "wlP9s9"),
        ("", "wlP9s9"),
        ("fe80::1", "wlP9s9"),
        ("192.168.1.50", "wlP9s9"),
    ],
)
def test_the_management_device(reached_at: str, management: str) -> None:
    shown = [held("lo", "127.0.0.1/8"), held(NETDEV, "10.77.0.1/24"), held("enP7s7", "192.168.1.5/24")]
    routes = [{"dst": "default", "nexthops": []}, {"dst": "default", "dev": "wlP9s9"}, {"dst": "default", "dev": "x"}]
    assert fabric.read(str(RECORDED), outputs(shown, routes), reached_at).management == management


def test_without_a_default_route() -> None:
    """R10."""
    assert fabric.read(str(RECORDED), outputs([held("enP7s7", "192.168.1.5/24")])).management == ""


@pytest.mark.parametrize("text", ["", " \n", "[ ]", "[]", "[{},{}]", '[{"ifname": "lo"}]'])
def test_no_addresses(text: str) -> None:
    node = fabric.read(str(RECORDED), fabric.Outputs(text, text))
    assert all(interface.addresses == [] for interface in node.interfaces) and node.interfaces


@pytest.mark.parametrize(
    "text", ["no JSON", "{}", "[1]", "null", '"x"', '[{"addr_info": 1}]', '[{"addr_info": [1]}]', "[" * 10]
)
def test_an_output_that_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        fabric.read(str(RECORDED), fabric.Outputs(text, ""))
    if "addr_info" not in text:
        with pytest.raises(ValueError):
            fabric.read(str(RECORDED), fabric.Outputs("", text))


# Kernels change the tree while it is read


def refuse(monkeypatch: pytest.MonkeyPatch, code: int, wanted: Callable[[str], bool], function: str) -> None:
    """Answer as the kernel does, with an error number, wherever a path is wanted. (Modes stop nothing for root.)"""
    real = getattr(os, function)

    def answer(path: Any, *more: Any) -> Any:
        if wanted(str(path)):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *more)

    monkeypatch.setattr(os, function, answer)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOENT, errno.ENODEV, errno.EIO])
@pytest.mark.parametrize(
    "end", ["gids/0", "types/0", "ndevs/0", "phys_state", "rate", "enP7s7/mtu", "operstate", "lo/mtu"]
)
def test_an_entry_vanishes_while_it_is_read(end: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, code, lambda path: path.endswith(end), "open")
    node = fabric.read(str(RECORDED), NO_OUTPUT)
    assert node.errors == []
    assert (1, "10.77.0.1") in [(gid.index, gid.ipv4) for gid in node.ports[0].gids]


def test_reading_fails_after_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty slot opens, and answers EINVAL to read()."""
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None

    def answer(file: int, size: int) -> bytes:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "read", answer)
    node = fabric.read(str(RECORDED), NO_OUTPUT)
    assert node.errors == [] and node.ports[0].gids == [] and node.interfaces == []
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before, "files stay open"


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR])
@pytest.mark.parametrize("end", ["/ports", "/gids", "/infiniband", "class/net"])
def test_a_directory_vanishes_while_it_is_read(end: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, code, lambda path: path.endswith(end), "listdir")
    node = fabric.read(str(RECORDED), NO_OUTPUT)
    assert node.errors == [] and (node.ports == []) == (end in ("/ports", "/infiniband"))


@pytest.mark.parametrize("end", ["class/infiniband", "class/net", "gids"])
def test_a_directory_that_may_not_be_read(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EACCES, lambda path: path.endswith(end), "listdir")
    (error,) = fabric.read(str(RECORDED), NO_OUTPUT).errors
    assert error.endswith(f"{end}: Permission denied")


def test_a_table_that_may_not_be_read_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EACCES, lambda path: "/gids/" in path, "open")
    node = fabric.read(str(RECORDED), NO_OUTPUT)
    assert node.errors == [f"{RECORDED}/{PORT}/gids: Permission denied"]
    assert node.ports[0].gids == []
