# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import fabric

V2, V1 = "RoCE v2", "IB/RoCE v1"


@pytest.mark.parametrize(
    ("gid", "address"),
    [
        ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "10.77.0.1"),
        ("0000:0000:0000:0000:0000:ffff:c0a8:b10b", "192.168.177.11"),
        ("fe80:0000:0000:0000:5054:00ff:fe77:0001", None),
        ("fe80:0000:0000:0000:0000:ffff:0a4d:0001", None),
        ("0000:0000:0000:0000:0000:0000:0a4d:0001", None),
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


def mapped(address: str) -> str:
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def gid(index: int, text: str, kind: str = V2, netdev: str = "") -> dict[str, Any]:
    text = mapped(text) if text.count(".") == 3 else text
    return {"index": index, "gid": text, "type": kind, "netdev": netdev, "ipv4": fabric.mapped_ipv4(text)}


def port(hca: str, *gids: dict[str, Any], state: str = "ACTIVE", number: int = 1) -> dict[str, Any]:
    return {"hca": hca, "port": number, "state": state, "gids": list(gids)}


def net(name: str, *addresses: str, mtu: int = 9000) -> dict[str, Any]:
    return {"name": name, "mtu": mtu, "state": "up", "addresses": list(addresses)}


def select(ports: list[dict[str, Any]], interfaces: list[dict[str, Any]], address: str) -> tuple[Any, list[str]]:
    chosen, findings = fabric.select({"ports": ports, "interfaces": interfaces}, address, "spark1")
    return chosen, [finding.line() for finding in findings]


# show_gids of NVIDIA/nccl#1131, with its columns.
SHOW_GIDS = """\
mlx5_0 1 0 fe80:0000:0000:0000:a288:c2ff:fe5b:03ec            v1 ens3np0
mlx5_0 1 1 fe80:0000:0000:0000:a288:c2ff:fe5b:03ec            v2 ens3np0
mlx5_0 1 2 0000:0000:0000:0000:0000:ffff:0b00:0048 11.0.0.72  v1 ens3np0
mlx5_0 1 3 0000:0000:0000:0000:0000:ffff:0b00:0048 11.0.0.72  v2 ens3np0
"""
R3 = [gid(int(words[2]), words[3], words[-2], words[-1]) for words in (line.split() for line in SHOW_GIDS.splitlines())]
LINK_LOCAL = "fe80:0000:0000:0000:a288:c2ff:fe5b:03ec"
MGMT, RAIL = net("enP7s7", "10.0.0.2", mtu=1500), net("enp1s0f1np1", "192.168.177.11")


@pytest.mark.parametrize(
    ("ports", "interfaces", "address", "interface", "gids"),
    [
        pytest.param(
            [
                port("rocep1s0f1", gid(3, "192.168.177.11", V2, "enp1s0f1np1")),
                port("roceP2p1s0f1", gid(4, "192.168.178.11", V2, "enP2p1s0f1np1")),
            ],
            [MGMT, RAIL, net("enP2p1s0f1np1", "192.168.178.11")],
            "192.168.177.11",
            "enp1s0f1np1",
            {"rocep1s0f1:1": 3},
            id="R1 fixture A: the index of this port, not of the other",
        ),
        pytest.param(
            [port("rocep1s0f1", gid(4, "192.168.177.11", V2, "enp1s0f1np1"))],
            [RAIL],
            "192.168.177.11",
            "enp1s0f1np1",
            {"rocep1s0f1:1": 4},
            id="R1 fixture B: another index on another node",
        ),
        pytest.param(
            [port("mlx5_0", *R3)],
            [net("ens3np0", "11.0.0.72")],
            "11.0.0.72",
            "ens3np0",
            {"mlx5_0:1": 3},
            id="R3: neither link-local nor RoCE v1",
        ),
        pytest.param(
            [port("mlx5_1", gid(3, "11.0.0.72", V2, "a")), port("mlx5_11", gid(3, "11.0.0.73", V2, "b"))],
            [net("a", "11.0.0.72"), net("b", "11.0.0.73")],
            "11.0.0.72",
            "a",
            {"mlx5_1:1": 3},
            id="R5: an exact name",
        ),
        pytest.param(
            [
                port("rocep1s0f0", gid(3, "169.254.9.9", V2, "enp1s0f0np0")),
                port("mgmt", gid(3, "10.0.0.2", V2, "enP7s7")),
                port("rocep1s0f1", gid(3, "192.168.177.11", V2, "enp1s0f1np1")),
                port("rocep1s0f2", gid(3, "192.168.177.99", V2, "x"), state="DOWN"),
            ],
            [net("enp1s0f0np0", "169.254.9.9"), MGMT, RAIL],
            "192.168.177.11",
            "enp1s0f1np1",
            {"rocep1s0f1:1": 3},
            id="R7, R9, R10: by address alone, never the first one",
        ),
        pytest.param(
            [port("rocep1s0f1", gid(3, "192.168.177.11", V2, ""))],
            [RAIL],
            "192.168.177.11",
            "enp1s0f1np1",
            {"rocep1s0f1:1": 3},
            id="a GID whose device cannot be read",
        ),
        pytest.param(
            [port("bond", gid(5, "192.168.177.11", V2, "bond0"), gid(9, "192.168.177.11", V2, "bond0"))],
            [net("bond0", "192.168.177.1", "192.168.177.11")],
            "192.168.177.11",
            "bond0",
            {"bond:1": 5},
            id="a second address and a second entry",
        ),
    ],
)
def test_select(
    ports: list[dict[str, Any]], interfaces: list[dict[str, Any]], address: str, interface: str, gids: dict[str, int]
) -> None:
    chosen, lines = select(ports, interfaces, address)
    assert lines == []
    assert (chosen["socket_interface"], chosen["gids"], chosen["address"]) == (interface, gids, address)
    # R5: "=" asks NCCL for exact names.
    assert chosen["hcas"] == "=" + ",".join(gids)


def test_no_rdma_is_a_finding_where_it_is_needed() -> None:
    info = {"ports": [], "interfaces": [RAIL]}
    (finding,) = fabric.select(info, "192.168.177.11", "spark1")[1]
    assert (finding.id, finding.found) == ("fabric.rdma", "no RDMA device")
    chosen, findings = fabric.select(info, "192.168.177.11", "spark1", rdma=False)
    assert not findings and (chosen["socket_interface"], chosen["hcas"]) == ("enp1s0f1np1", "")


@pytest.mark.parametrize(
    ("ports", "interfaces", "line"),
    [
        pytest.param(
            [port("rocep1s0f1", gid(3, "192.168.177.11", V2, "enp1s0f1np1"))],
            [MGMT, net("lo")],
            "[fabric.address] found enP7s7 10.0.0.2; needed 192.168.177.11 on a fabric port",
            id="the address is on no device",
        ),
        pytest.param([], [], "[fabric.address] found no IPv4 address; needed", id="no address at all"),
        pytest.param(
            [port("rocep1s0f1", gid(3, "192.168.177.11", V2, "enp1s0f1np1"), state="DOWN")],
            [RAIL],
            "[fabric.port_state] found rocep1s0f1 port 1 is DOWN; needed ACTIVE",
            id="R7: a port that is down",
        ),
        pytest.param(
            [port("rocep1s0f1", gid(0, LINK_LOCAL, V2, "enp1s0f1np1"), gid(2, "192.168.177.11", V1, "enp1s0f1np1"))],
            [RAIL],
            f"[fabric.gid] found rocep1s0f1 0 {LINK_LOCAL} RoCE v2 enp1s0f1np1; rocep1s0f1 2 ",
            id="R3: nothing but link-local and v1",
        ),
        pytest.param(
            [port("rocep1s0f1")], [RAIL], "[fabric.gid] found an empty GID table; needed a RoCE v2 GID of", id="empty"
        ),
        pytest.param(
            [port("rocep1s0f0", gid(3, "192.168.177.11", V2, "enp1s0f0np0"))],
            [RAIL],
            "[fabric.gid] found rocep1s0f0 3",
            id="the GID belongs to another device than the address",
        ),
    ],
)
def test_one_finding(ports: list[dict[str, Any]], interfaces: list[dict[str, Any]], line: str) -> None:
    chosen, lines = select(ports, interfaces, "192.168.177.11")
    assert len(lines) == 1
    assert lines[0].startswith(f"spark1: {line}")
    assert chosen["hcas"] == "" and chosen["gids"] == {}
