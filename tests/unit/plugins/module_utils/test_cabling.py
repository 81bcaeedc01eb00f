# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Pairing, from facts of whole and of broken clusters; broken ones must be told with a repair, and never break it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import cabling, fabric
from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import lines
from cablings import HCA, LAN, LINK_LOCAL, NETDEV, PORTS, V1, Cluster, cluster, gid, joined, port, rank, table, told
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

TOPOLOGIES = [
    *(("direct2", 2, rails) for rails in (1, 2)),
    *(("switch", nodes, rails) for nodes in (2, 3, 4) for rails in (1, 2)),
    *(("triangle3", 3, rails) for rails in (1, 2)),
    *(("ring4", 4, rails) for rails in (1, 2)),
]


def finding(survey: dict[str, Any], kind: str, host: str = "") -> dict[str, Any]:
    """The one finding of a kind (on a host)."""
    (found,) = [f for f in survey["findings"] if f["id"] == kind and host in ("", f["host"])]
    return dict(found)


def hcas(survey: dict[str, Any]) -> list[str]:
    return [each["hcas"] for each in survey["ranks"].values()]


def exact(*keys: str) -> str:
    return "=" + ",".join(f"{HCA[key]}:1" for key in keys)


# Whole clusters


@pytest.mark.parametrize(("topology", "nodes", "rails"), TOPOLOGIES)
def test_a_whole_cluster(topology: str, nodes: int, rails: int) -> None:
    made = cluster(topology, nodes, rails)
    survey = made.survey()
    assert survey["findings"] == []
    assert survey["topology"] == topology and list(survey["ranks"]) == list(made.ports)
    groups = cabling.groups(cabling.TOPOLOGIES[topology], list(made.ports))
    assert len(survey["links"]) == rails * sum(len(list(itertools.combinations(group, 2))) for group in groups)
    for link in survey["links"]:
        one, two = link["ends"]
        # Each end is told with its own values.
        for end in link["ends"]:
            (own,) = [p for p in made.ports[end["host"]].values() if p["netdev"] == end["netdev"]]
            assert (f"{end['address']}/24", end["hca"], end["gid_index"]) == (own["addresses"][0], own["hca"], 3)
        assert link["network"] == f"{one['address'].rpartition('.')[0]}.0/24"
        assert one["address"].rpartition(".")[0] == two["address"].rpartition(".")[0]
        assert one["host"] != two["host"] and (link["state"], link["reason"]) == ("unproven", "")


@pytest.mark.parametrize(
    ("topology", "rails", "keys", "networks"),
    [
        ("direct2", 1, [["f0"]] * 2, [[0]] * 2),
        ("direct2", 2, [["f0", "F0"]] * 2, [[0, 1]] * 2),
        ("switch", 2, [["f0", "F0"]] * 2, [[0, 1]] * 2),
        ("triangle3", 1, [["f0", "f1"]] * 3, [[0, 2], [4, 0], [2, 4]]),
        ("triangle3", 2, [["f0", "f1", "F0", "F1"]] * 3, [[0, 2, 1, 3], [4, 0, 5, 1], [2, 4, 3, 5]]),
        ("ring4", 1, [["f0", "f1"]] * 4, [[0, 6], [2, 0], [4, 2], [6, 4]]),
    ],
)
def test_rails_of_each_rank(topology: str, rails: int, keys: list[list[str]], networks: list[list[int]]) -> None:
    survey = cluster(topology, rails=rails).survey()
    ranks = list(survey["ranks"].values())
    assert hcas(survey) == [exact(*each) for each in keys]
    assert [each["hca_names"] for each in ranks] == [",".join(HCA[key] for key in each) for each in keys]
    assert [[rail["network"] for rail in each["rails"]] for each in ranks] == [
        [f"10.77.{number}.0/24" for number in each] for each in networks
    ]
    assert all(each["gid_index"] == "" for each in ranks), "NCCL chooses"


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_rails_are_in_the_same_order_on_every_rank(nodes: int) -> None:
    """R6, R9: another port, other names, another order of names."""
    made = cluster("switch", nodes)
    last = f"spark{nodes}"
    for key, other in (("f0", "f1"), ("F0", "F1")):
        made.change(last, other, *made.ports[last][key]["addresses"], state="ACTIVE", mtu=9000, active_mtu=4096)
        made.unplug(last, key)
    made.ports["spark1"] = dict(reversed(made.ports["spark1"].items()))
    survey = made.survey()
    assert survey["findings"] == []
    assert hcas(survey) == [exact("f0", "F0")] * (nodes - 1) + [exact("f1", "F1")]
    for each in survey["ranks"].values():
        assert [(rail["rail"], rail["network"]) for rail in each["rails"]] == [(0, "10.77.0.0/24"), (1, "10.77.1.0/24")]


@pytest.mark.parametrize(("topology", "nodes", "rails"), TOPOLOGIES)
def test_sockets_and_paths(topology: str, nodes: int, rails: int) -> None:
    ranks = cluster(topology, nodes, rails).survey()["ranks"]
    lan = topology in ("triangle3", "ring4")
    for number, (host, each) in enumerate(ranks.items(), 1):
        expected = (f"192.168.1.{number}", LAN) if lan else (f"10.77.0.{number}", NETDEV["f0"])
        assert (each["address"], each["socket_interface"]) == expected
        assert each["head_address"] == ranks["spark1"]["address"]
        for other, path in each["paths"].items():
            assert path == {
                "local": ranks[other]["paths"][host]["remote"],
                "remote": ranks[other]["paths"][host]["local"],
            }
        assert each["from_head"] == each["paths"].get("spark1", {"local": expected[0], "remote": expected[0]})


@pytest.mark.parametrize(
    ("topology", "pair", "path"),
    [
        ("direct2", (2, 1), ("10.77.0.2", "10.77.0.1")),
        ("triangle3", (1, 3), ("10.77.2.1", "10.77.2.3")),
        ("triangle3", (3, 2), ("10.77.4.3", "10.77.4.2")),
        ("ring4", (4, 1), ("10.77.6.4", "10.77.6.1")),
        # Opposite ranks have no rail.
        ("ring4", (1, 3), ("192.168.1.1", "192.168.1.3")),
    ],
)
def test_the_path_between_two_ranks(topology: str, pair: tuple[int, int], path: tuple[str, str]) -> None:
    one, two = (f"spark{number}" for number in pair)
    found = cluster(topology).survey()["ranks"][one]["paths"][two]
    assert (found["local"], found["remote"]) == path


def test_without_rdma_only_sockets_are_found() -> None:
    made = cluster("direct2")
    for host in made.ports:
        made.ports[host] = {}
    survey = made.survey(rdma=False)
    assert survey["findings"] == [] and survey["links"] == [] and hcas(survey) == ["", ""]
    assert [each["address"] for each in survey["ranks"].values()] == ["192.168.1.1", "192.168.1.2"]
    assert [each["socket_interface"] for each in survey["ranks"].values()] == [LAN, LAN]


def test_without_rdma_ports_are_left_alone() -> None:
    made = cluster("direct2")
    made.state("spark1", env={"NCCL_IB_HCA": "other", "NCCL_IB_GID_INDEX": "77"})
    survey = made.survey(rdma=False)
    assert survey["findings"] == [] and survey["links"] == []


@pytest.mark.parametrize(
    ("nodes", "hosts", "expected"),
    [
        ("direct2", "ab", ["ab"]),
        ("switch", "abcd", ["abcd"]),
        ("triangle3", "abc", ["ab", "ac", "bc"]),
        ("ring4", "abcd", ["ab", "bc", "cd", "da"]),
    ],
)
def test_groups(nodes: str, hosts: str, expected: list[str]) -> None:
    assert cabling.groups(cabling.TOPOLOGIES[nodes], hosts) == [tuple(group) for group in expected]


def test_max_rails() -> None:
    survey = cluster("direct2").survey(max_rails=1)
    assert hcas(survey) == [exact("f0")] * 2
    assert survey["findings"] == [], "the other half is not wanted"
    survey = cluster("triangle3").survey(max_rails=1)
    assert hcas(survey) == [exact("f0", "f1")] * 3 and survey["findings"] == []


def test_max_rails_does_not_hide_what_is_lost() -> None:
    made = cluster("triangle3", max_rails=1)
    made.change("spark1", "f1", "10.99.0.1/24")
    made.change("spark1", "F1", "10.99.1.1/24")
    assert ("fabric.stray", "spark1") in told(made.survey(), "info")


# Cases of the field (facts/ansible.md 4.1)


def pair(one: list[dict[str, Any]], *addresses: str) -> dict[str, Any]:
    """A node with some ports against a whole Spark that holds other addresses of the same networks."""
    other = [port(HCA[key], NETDEV[key], address) for key, address in zip(PORTS, addresses, strict=False)]
    infos = {
        host: {
            "ports": ports,
            "interfaces": [
                {"name": p["netdev"], "mtu": p["mtu"], "state": "up", "pci": "", "addresses": p["addresses"]}
                for p in ports
            ],
            "management": LAN,
            "errors": [],
        }
        for host, ports in {"spark1": one, "spark2": other}.items()
    }
    plan = {"topology": "direct2", "rdma": True, "mtu": 9000, "min_rails": 1, "max_rails": 0}
    return cabling.survey(plan, [rank("spark1"), rank("spark2")], infos)


# show_gids of NVIDIA/nccl#1131, with its columns.
SHOW_GIDS = """\
mlx5_0 1 0 fe80:0000:0000:0000:a288:c2ff:fe5b:03ec            v1 ens3np0
mlx5_0 1 1 fe80:0000:0000:0000:a288:c2ff:fe5b:03ec            v2 ens3np0
mlx5_0 1 2 0000:0000:0000:0000:0000:ffff:0b00:0048 11.0.0.72  v1 ens3np0
mlx5_0 1 3 0000:0000:0000:0000:0000:ffff:0b00:0048 11.0.0.72  v2 ens3np0
"""
R3 = [gid(int(words[2]), words[3], words[-2], words[-1]) for words in (line.split() for line in SHOW_GIDS.splitlines())]


@pytest.mark.parametrize(
    ("ports", "others", "expected"),
    [
        pytest.param(
            [
                port("rocep1s0f1", "a", "192.168.177.11/24", gids=[gid(3, "192.168.177.11", netdev="a")]),
                port("roceP2p1s0f1", "b", "192.168.178.11/24", gids=[gid(4, "192.168.178.11", netdev="b")]),
            ],
            ["192.168.177.12/24", "192.168.178.12/24"],
            [("a", 3), ("b", 4)],
            id="R1: each port has an index of its own",
        ),
        pytest.param([port("mlx5_0", "ens3np0", "11.0.0.72/24", gids=R3)], ["11.0.0.73/24"], [("ens3np0", 3)], id="R3"),
        pytest.param(
            [
                port("mlx5_0", "w", "169.254.9.9/16"),
                port("mgmt", LAN, "10.0.0.2/24"),
                port("mlx5_2", "d", "192.168.177.99/24", state="DOWN"),
                port("mlx5_11", "e", "192.168.200.11/24"),
                port("mlx5_1", "c", "192.168.177.11/24"),
            ],
            ["192.168.177.12/24", "10.0.0.3/24", "169.254.9.10/16"],
            [("c", 3)],
            id="R5, R7, R9, R10: neither the first, nor the management, nor a port to elsewhere",
        ),
        pytest.param(
            [port("mlx5_0", "a", "192.168.177.11/24", gids=[gid(3, "192.168.177.11")])],
            ["192.168.177.12/24"],
            [("a", 3)],
            id="a GID whose device cannot be read",
        ),
        pytest.param(
            [
                port(
                    "bond",
                    "bond0",
                    "192.168.177.1/24",
                    "192.168.177.11/24",
                    gids=[gid(9, "192.168.177.1", netdev="bond0"), gid(5, "192.168.177.11", netdev="bond0")],
                )
            ],
            ["192.168.177.12/24"],
            [("bond0", 9)],
            id="two addresses of one network",
        ),
        pytest.param(
            [port("mlx5_0", "a", "192.168.177.11/24"), port("mlx5_1", "b", "192.168.178.11/24")],
            ["192.168.178.12/24", "192.168.177.12/24"],
            [("a", 3), ("b", 3)],
            id="the first rank's order is everyone's",
        ),
    ],
)
def test_field_cases(ports: list[dict[str, Any]], others: list[str], expected: list[tuple[str, int]]) -> None:
    survey = pair(ports, *others)
    assert told(survey) == []
    rails = survey["ranks"]["spark1"]["rails"]
    assert [(rail["netdev"], rail["gid_index"]) for rail in rails] == expected
    assert survey["ranks"]["spark1"]["hcas"] == "=" + ",".join(f"{rail['hca']}:1" for rail in rails)
    networks = [rail["network"] for rail in rails]
    assert [rail["network"] for rail in survey["ranks"]["spark2"]["rails"]] == networks


# Bad input: what is changed in a whole cluster, and what is told of it

Break = Callable[[Cluster], None]


def on(host: str, key: str, *addresses: str, **changes: Any) -> Break:
    return lambda made: made.change(host, key, *addresses, **changes)


def every(*breaks: Break) -> Break:
    def run(made: Cluster) -> None:
        for each in breaks:
            each(made)

    return run


def no_ports(made: Cluster) -> None:
    made.ports["spark2"] = {}


def on_lo(made: Cluster) -> None:
    made.bare("spark1", "f0")
    made.others["spark1"] = {"lo": ["10.77.0.1/32"]}


def unreachable(made: Cluster) -> None:
    made.silent.add("spark2")


F0 = f"{HCA['f0']} ({NETDEV['f0']})"
TRIANGLE_PORT = "spark1 reaches spark2 and spark3 through the same port f0"


@pytest.mark.parametrize(
    ("topology", "broken", "kind", "host", "seen", "repair"),
    [
        pytest.param("direct2", no_ports, "fabric.rdma", "spark2", "no RDMA device", "mlx5_ib", id="no HCA"),
        pytest.param(
            "direct2",
            on("spark1", "f0", state="DOWN", phys_state="Disabled"),
            "fabric.port_state",
            "spark1",
            f"{F0} is DOWN, Disabled and holds 10.77.0.1/24",
            "cable",
            id="HCA down",
        ),
        pytest.param(
            "direct2",
            on("spark2", "f0", state="INIT"),
            "fabric.port_state",
            "spark2",
            f"{F0} is INIT, LinkUp",
            "cable",
            id="HCA initialising",
        ),
        pytest.param(
            "direct2",
            on("spark2", "f0", link_layer="InfiniBand"),
            "fabric.link_layer",
            "spark2",
            f"{F0} has link layer InfiniBand",
            "LINK_TYPE",
            id="InfiniBand",
        ),
        pytest.param(
            "direct2",
            on("spark1", "f0", gids=[gid(2, "10.77.0.1", V1, NETDEV["f0"]), gid(1, LINK_LOCAL)]),
            "fabric.gid_type",
            "spark1",
            f"{F0} has the GID of 10.77.0.1/24 as IB/RoCE v1 only",
            "cma_roce_mode",
            id="v1 only",
        ),
        pytest.param(
            "direct2",
            on("spark1", "f0", gids=table(NETDEV["f0"], [])),
            "fabric.gid",
            "spark1",
            f"{F0} has no GID of 10.77.0.1/24",
            f"ip link set {NETDEV['f0']} down",
            id="link-local GIDs only",
        ),
        pytest.param(
            "direct2",
            on("spark1", "f0", gids=[gid(3, "10.77.0.1", netdev="other")]),
            "fabric.gid",
            "spark1",
            "has no GID of 10.77.0.1/24",
            "ip link set",
            id="R7: the GID belongs to another device",
        ),
        pytest.param(
            "direct2",
            on("spark2", "f0", "169.254.7.7/16"),
            "fabric.address",
            "spark2",
            f"{F0} has 169.254.7.7/16",
            "fabric_configure",
            id="link-local address only",
        ),
        pytest.param(
            "direct2",
            lambda made: made.bare("spark2", "f0"),
            "fabric.address",
            "spark2",
            f"{F0} has no IPv4 address",
            "fabric_configure",
            id="no address",
        ),
        pytest.param(
            "direct2", on_lo, "fabric.address", "spark1", "has no IPv4 address", "take 10.77.0.1/32 off lo", id="on lo"
        ),
        pytest.param(
            "direct2",
            every(on_lo, lambda made: made.state("spark1", address="10.77.0.1")),
            "fabric.address",
            "spark1",
            "10.77.0.1 is on lo",
            "fabric_configure",
            id="stated address on lo",
        ),
        pytest.param(
            "direct2",
            every(
                lambda made: made.bare("spark1", "f0", state="ACTIVE"),
                on("spark1", "f1", "10.77.0.1/24"),
            ),
            "fabric.port_state",
            "spark1",
            f"{HCA['f1']} ({NETDEV['f1']}) is DOWN, Disabled and holds 10.77.0.1/24",
            f"move the cable, or the address to {NETDEV['f0']}, which is ACTIVE and has none",
            id="address on the wrong port, or a swapped cable",
        ),
        pytest.param(
            "direct2",
            on("spark2", "f0", mtu=1500, active_mtu=1024),
            "fabric.mtu",
            "spark2",
            f"{NETDEV['f0']} has MTU 1500",
            f"ip link set {NETDEV['f0']} mtu 9000",
            id="R14: one end MTU 1500",
        ),
        pytest.param(
            "direct2",
            on("spark2", "f0", "10.99.0.2/24"),
            "fabric.topology",
            "spark2",
            "0 networks that join spark1, spark2",
            "fabric_configure",
            id="another subnet",
        ),
        pytest.param(
            "direct2",
            on("spark2", "f0", "10.77.0.1/24"),
            "fabric.topology",
            "spark2",
            "0 networks that join spark1, spark2",
            "fabric_configure",
            id="the same address twice",
        ),
        pytest.param(
            "switch",
            on("spark2", "f0", "10.77.0.2/32"),
            "fabric.address",
            "spark2",
            "10.77.0.2/32",
            "fabric_configure",
            id="R16: an address without a network",
        ),
        pytest.param("direct2", unreachable, "node.unreachable", "spark2", "no answer", "power", id="unreachable"),
        pytest.param(
            "triangle3",
            every(lambda made: made.unplug("spark1", "f1"), on("spark1", "F0", "10.77.2.1/24", state="ACTIVE")),
            "fabric.cabling",
            "spark1",
            TRIANGLE_PORT,
            "own port",
            id="two cables on the same port, by its two functions",
        ),
        pytest.param(
            "triangle3",
            every(lambda made: made.unplug("spark1", "f1"), on("spark1", "f0", "10.77.0.1/24", "10.77.2.1/24")),
            "fabric.cabling",
            "spark1",
            TRIANGLE_PORT,
            "own port",
            id="two cables on the same port, by two addresses",
        ),
        pytest.param(
            "ring4",
            every(lambda made: made.unplug("spark3", "f1"), on("spark3", "F0", "10.77.2.3/24", state="ACTIVE")),
            "fabric.cabling",
            "spark3",
            "spark3 reaches spark2 and spark4 through the same port f0",
            "own port",
            id="ring: two cables on the same port",
        ),
        pytest.param(
            "triangle3",
            lambda made: made.lan.update(spark3=["172.20.0.3/24"]),
            "fabric.socket",
            "spark3",
            f"{LAN} 172.20.0.3/24",
            "LAN",
            id="no LAN that joins all",
        ),
    ],
)
def test_bad_input(topology: str, broken: Break, kind: str, host: str, seen: str, repair: str) -> None:
    made = cluster(topology, rails=1)
    broken(made)
    survey = made.survey()
    (found,) = [f for f in survey["findings"] if f["id"] == kind and f["host"] == host and seen in f["found"]]
    assert found["severity"] == "error" and found["needed"] and repair in found["repair"]
    for link in survey["links"]:
        assert link["state"] != "ok"
    assert json.loads(json.dumps(survey)) == survey
    # Exactly one line names it.
    assert sum(seen in line and f"[{kind}]" in line for line in lines(survey["findings"])) == 1


def test_whole_clusters_have_no_cabling_finding_where_a_switch_joins_all() -> None:
    made = cluster("switch", 3)
    survey = made.survey(topology="triangle3")
    assert "fabric.cabling" not in [kind for kind, _ in told(survey)]
    assert {f["repair"] for f in survey["findings"] if f["id"] == "fabric.topology"} == {
        "set spark_fabric_topology: switch"
    }


@pytest.mark.parametrize(
    ("shape", "nodes", "said", "repair"),
    [
        ("triangle3", 3, "switch", "set spark_fabric_topology: triangle3"),
        ("ring4", 4, "switch", "set spark_fabric_topology: ring4"),
        ("switch", 4, "ring4", "set spark_fabric_topology: switch"),
    ],
)
def test_another_topology_is_recognised(shape: str, nodes: int, said: str, repair: str) -> None:
    survey = cluster(shape, nodes).survey(topology=said)
    assert {f["repair"] for f in survey["findings"] if f["id"] == "fabric.topology"} == {repair}


def test_the_order_of_a_ring_is_suggested() -> None:
    made = cluster("ring4")
    made.ports = {host: made.ports[host] for host in ("spark1", "spark3", "spark2", "spark4")}
    survey = made.survey()
    repairs = {f["repair"] for f in survey["findings"] if f["id"] == "fabric.topology"}
    assert repairs == {"set spark_fabric_topology: ring4, ranks in the order spark1, spark2, spark3, spark4"}
    assert "0 networks that join spark1, spark3" in [f["found"] for f in survey["findings"]]


def test_a_topology_finding_shows_where_everyone_is() -> None:
    made = cluster("direct2", rails=1)
    made.change("spark2", "f0", "10.99.0.2/24")
    assert finding(made.survey(), "fabric.topology")["evidence"].splitlines() == [
        f"spark1: {NETDEV['f0']} 10.77.0.1 of 10.77.0.0/24",
        f"spark2: {NETDEV['f0']} 10.99.0.2 of 10.99.0.0/24",
    ]
    on_lo(made)
    assert (
        "spark1: no usable port; lo 127.0.0.1/8 10.77.0.1/32; " in finding(made.survey(), "fabric.topology")["evidence"]
    )


def test_a_node_that_is_silent_does_not_blame_the_others() -> None:
    made = cluster("direct2")
    unreachable(made)
    survey = made.survey()
    assert told(survey, "error", "warning", "info") == [
        ("node.unreachable", "spark2"),
        *[("fabric.stray", "spark1")] * 2,
    ]
    made = cluster("triangle3")
    unreachable(made)
    assert told(made.survey()) == [("node.unreachable", "spark2")]


def test_what_is_wrong_with_the_others_is_told_while_a_node_is_silent() -> None:
    made = cluster("direct2", rails=1)
    unreachable(made)
    made.change("spark1", "f0", state="DOWN")
    kinds = [f for f in made.survey()["findings"] if f["id"] == "fabric.port_state" and "10.77.0.1" in f["found"]]
    assert [f["host"] for f in kinds] == ["spark1"]


def test_unreadable_sysfs_is_not_called_a_missing_device() -> None:
    made = cluster("direct2")
    info = {**made.info("spark2"), "ports": [], "errors": ["/sys/class/infiniband: Permission denied"]}
    survey = cabling.survey(
        made.fabric, [rank("spark1"), rank("spark2")], {"spark1": made.info("spark1"), "spark2": info}
    )
    assert told(survey) == [("fabric.sysfs", "spark2")]
    found = finding(survey, "fabric.sysfs")
    assert found["found"] == "/sys/class/infiniband: Permission denied" and "become" in found["repair"]


def test_a_port_to_nowhere_is_told_and_not_used() -> None:
    """R9: up, with an address, but its peer is missing from the inventory."""
    made = cluster("direct2", rails=1)
    made.change("spark1", "f1", "10.88.0.1/24", state="ACTIVE", mtu=9000)
    survey = made.survey()
    assert hcas(survey) == [exact("f0")] * 2
    assert told(survey, "error", "warning") == []
    found = finding(survey, "fabric.stray")
    assert (found["host"], found["severity"]) == ("spark1", "info")
    assert found["found"] == f"{NETDEV['f1']} is up, and no other rank is in the network of 10.88.0.1/24"


def test_a_management_port_with_roce_is_no_rail() -> None:
    made = cluster("direct2", rails=1)
    for number, host in enumerate(made.ports, 1):
        made.ports[host]["m"] = port("rocep7s0", LAN, f"192.168.1.{number}/24")
    survey = made.survey()
    assert hcas(survey) == [exact("f0")] * 2 and survey["findings"] == []
    roles = {p["netdev"]: p["role"] for p in survey["ports"]["spark1"]}
    assert roles == {NETDEV["f0"]: "rail", LAN: "management", NETDEV["f1"]: "unused"}


def test_a_management_port_that_alone_joins_the_ranks() -> None:
    made = cluster("direct2", rails=1)
    made.management = dict.fromkeys(made.ports, NETDEV["f0"])
    survey = made.survey()
    assert hcas(survey) == [exact("f0")] * 2
    assert told(survey) == []
    # What else there is, and why it does not serve.
    assert told(survey, "warning") == [
        (kind, host) for host in made.ports for kind in ("fabric.management", "fabric.port_state")
    ]
    for number, host in enumerate(made.ports, 1):
        made.state(host, address=f"10.77.0.{number}")
    assert made.survey()["findings"] == [], "stated, so meant"


def test_two_addresses_on_one_port() -> None:
    made = cluster("direct2", rails=1)
    made.change("spark1", "f0", "10.88.0.1/24", "10.77.0.1/24")
    survey = made.survey()
    assert survey["findings"] == []
    (rail,) = survey["ranks"]["spark1"]["rails"]
    assert (rail["address"], rail["gid_index"]) == ("10.77.0.1", 5)


def test_two_addresses_on_one_port_do_not_hide_the_next_port() -> None:
    made = cluster("direct2")
    made.change("spark1", "f0", "10.77.0.1/24", "10.77.0.11/24")
    for number, host in enumerate(made.ports, 1):
        made.change(host, "F0", f"10.77.0.{20 + number}/24")
    survey = made.survey()
    assert hcas(survey) == [exact("f0", "F0")] * 2
    assert [rail["address"] for rail in survey["ranks"]["spark1"]["rails"]] == ["10.77.0.1", "10.77.0.21"]
    assert told(survey, "error", "warning") == [("fabric.same_subnet", "spark1"), ("fabric.same_subnet", "spark2")]


def test_two_ports_that_share_two_networks_are_two_rails() -> None:
    made = cluster("direct2")
    for number, host in enumerate(made.ports, 1):
        made.change(host, "f0", f"10.77.0.{number}/24", f"10.77.1.{number + 10}/24")
    survey = made.survey()
    assert hcas(survey) == [exact("f0", "F0")] * 2 and told(survey) == []


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (on("spark2", "F0", state="DOWN"), "is DOWN"),
        (lambda made: made.bare("spark2", "F0"), "has no IPv4 address"),
        (on("spark2", "F0", "10.99.0.2/24"), "no other rank is in the network of 10.99.0.2/24"),
        (on("spark2", "F0", gids=[]), "has no GID of 10.77.1.2/24"),
    ],
)
def test_half_a_cable(broken: Break, why: str) -> None:
    """R6."""
    made = cluster("direct2")
    broken(made)
    survey = made.survey()
    assert hcas(survey) == [exact("f0")] * 2 and told(survey) == []
    found = finding(survey, "fabric.half", "spark2")
    assert found["severity"] == "warning" and found["repair"]
    assert found["found"].startswith(f"only {NETDEV['f0']} carries traffic of cable f0, {NETDEV['F0']} does not: ")
    assert why in found["found"]
    assert ("fabric.topology", "spark2") in told(made.survey(min_rails=2))


def test_the_lost_end_of_a_rail_on_another_cable() -> None:
    made = cluster("direct2", rails=1)
    for number, host in enumerate(made.ports, 1):
        made.change(host, "f1", f"10.77.9.{number}/24", state="ACTIVE", mtu=9000)
    made.change("spark2", "f1", state="DOWN")
    found = finding(made.survey(), "fabric.port_state")
    assert (found["host"], found["severity"]) == ("spark2", "warning")


def test_mtu_of_the_other_end_is_named() -> None:
    made = cluster("direct2", rails=1)
    made.change("spark1", "f0", mtu=1500, active_mtu=1024)
    survey = made.survey()
    found = finding(survey, "fabric.mtu")
    assert found["host"] == "spark1" and found["needed"] == f"9000 (spark2 {NETDEV['f0']} at the other end has 9000)"
    assert [(link["state"], link["reason"]) for link in survey["links"]] == [("failed", f"{NETDEV['f0']} has MTU 1500")]


def test_the_larger_mtu_of_both_ends_is_needed() -> None:
    made = cluster("direct2", rails=1)
    made.change("spark1", "f0", mtu=4000, active_mtu=2048)
    found = finding(made.survey(mtu=1500), "fabric.mtu")
    assert found["needed"].startswith("9000 ") and f"ip link set {NETDEV['f0']} mtu 9000" in found["repair"]


def test_mtu_too_small_at_both_ends_is_a_warning() -> None:
    made = cluster("direct2", rails=1)
    for host in made.ports:
        made.change(host, "f0", mtu=1500, active_mtu=1024)
    survey = made.survey()
    assert told(survey, "error", "warning") == [("fabric.mtu", "spark1"), ("fabric.mtu", "spark2")]
    assert told(survey) == []
    assert made.survey(mtu=1500)["findings"] == []


@pytest.mark.parametrize(("active", "expected"), [(4096, []), (0, []), (1024, [("fabric.active_mtu", "spark1")])])
def test_rdma_mtu_below_what_the_port_allows(active: int, expected: list[tuple[str, str]]) -> None:
    made = cluster("direct2", rails=1)
    made.change("spark1", "f0", active_mtu=active)
    assert told(made.survey(), "error", "warning") == expected


def test_a_container_bridge_joins_nobody() -> None:
    made = cluster("triangle3")
    made.others = {host: {"docker0": ["172.17.0.1/16"]} for host in made.ports}
    made.lan = {"spark1": ["192.168.1.1/24"], "spark2": ["192.168.1.2/24"], "spark3": ["192.168.2.3/24"]}
    survey = made.survey()
    assert told(survey) == [("fabric.socket", host) for host in made.ports]
    assert all(each["address"] == "" for each in survey["ranks"].values())


def test_lo_is_no_lan() -> None:
    made = cluster("triangle3")
    made.lan = dict.fromkeys(made.ports, [])
    made.others = {host: {"lo": [f"10.5.0.{number}/24"]} for number, host in enumerate(made.ports, 1)}
    assert told(made.survey()) == [("fabric.socket", host) for host in made.ports]


def test_all_ranks_take_the_same_lan() -> None:
    made = cluster("triangle3")
    made.others = {host: {"wlP9s9": [f"172.20.0.{number}/24"]} for number, host in enumerate(made.ports, 1)}
    made.management = {"spark1": "wlP9s9"}
    survey = made.survey()
    assert survey["findings"] == []
    assert [each["address"] for each in survey["ranks"].values()] == ["172.20.0.1", "172.20.0.2", "172.20.0.3"]
    assert [each["socket_interface"] for each in survey["ranks"].values()] == ["wlP9s9"] * 3


def test_a_rail_is_no_lan() -> None:
    """Sockets would only reach the neighbours over it."""
    made = cluster("ring4", rails=1)
    made.lan = dict.fromkeys(made.ports, [])
    assert told(made.survey()) == [("fabric.socket", host) for host in made.ports]


# Recorded nodes

RECORDED = Path(__file__).parents[3] / "fixtures/fabric"
BOTH = ["f0", "F0"]


def read(case: str, host: str) -> dict[str, Any]:
    """The facts of a recorded node."""

    def output(name: str) -> str:
        path = RECORDED / case / host / "commands" / name
        return path.read_text() if path.exists() else ""

    names = ("ip-address.json", "ip-route.json", "ibv_devinfo.txt")
    return fabric.read(str(RECORDED / case / host / "sys"), fabric.Outputs(*map(output, names))).to_dict()


CASES: dict[str, tuple[list[str], list[int], list[tuple[str, str, str, str]]]] = {
    "two-rails": (BOTH, [1, 1], []),
    "two-addresses": (BOTH, [1, 1], []),
    "moved-index": (BOTH, [2, 1], []),
    "management-roce": (BOTH, [1, 1], []),
    "no-ibverbs-tools": (BOTH, [1, 1], []),
    "one-end-1500": (
        ["F0"],
        [1],
        [
            ("fabric.rail_dropped", "spark1", "rail 0 (10.77.0.0/24) fails and is left out", "restart.yml"),
            ("fabric.mtu", "spark2", f"{NETDEV['f0']} has MTU 1500", f"ip link set {NETDEV['f0']} mtu 9000"),
        ],
    ),
    "port-down": (
        ["f0"],
        [1],
        [
            ("fabric.half", "spark1", "is DOWN, Polling and holds 10.78.0.1/24", "cable"),
            ("fabric.half", "spark2", "no other rank is in the network of 10.78.0.2/24", "fabric_configure"),
        ],
    ),
    "no-address": (
        ["f0"],
        [1],
        [
            ("fabric.half", "spark1", "no other rank is in the network of 10.78.0.1/24", "fabric_configure"),
            ("fabric.half", "spark2", f"{NETDEV['F0']}) has no IPv4 address", "fabric_configure"),
        ],
    ),
    "link-local-only": (
        ["F0"],
        [1],
        [
            ("fabric.half", "spark1", "no other rank is in the network of 10.77.0.1/24", "fabric_configure"),
            ("fabric.half", "spark2", f"{NETDEV['f0']}) has 169.254.77.2/16", "fabric_configure"),
        ],
    ),
    "address-on-lo": (
        ["F0"],
        [1],
        [
            ("fabric.half", "spark1", f"{NETDEV['f0']}) has no IPv4 address", "take 10.77.0.1/32 off lo"),
            ("fabric.half", "spark2", "no other rank is in the network of 10.77.0.2/24", "fabric_configure"),
        ],
    ),
    "wrong-port": (
        ["F0"],
        [1],
        [
            ("fabric.half", "spark1", "no other rank is in the network of 10.77.0.1/24", "fabric_configure"),
            ("fabric.half", "spark2", f"{NETDEV['f0']}) has no IPv4 address", "fabric_configure"),
            ("fabric.port_state", "spark2", "is DOWN, Polling and holds 10.77.0.2/24", f"address to {NETDEV['f0']}"),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_recorded_nodes(case: str) -> None:
    keys, indexes, findings = CASES[case]
    plan = {"topology": "direct2", "rdma": True, "mtu": 9000, "min_rails": 1, "max_rails": 0}
    infos = {host: read(case, host) for host in ("spark1", "spark2")}
    survey = cabling.survey(plan, [rank(host) for host in infos], infos)
    assert hcas(survey) == [exact(*keys)] * 2
    assert [rail["gid_index"] for rail in survey["ranks"]["spark1"]["rails"]] == indexes
    network = "10.77.0" if keys[0] == "f0" else "10.78.0"
    for number, each in enumerate(survey["ranks"].values(), 1):
        assert (each["address"], each["socket_interface"]) == (f"{network}.{number}", NETDEV[keys[0]])
    assert all(info["management"] == LAN for info in infos.values())
    known = {port["active_mtu"] for info in infos.values() for port in info["ports"]}
    assert known == ({0} if case == "no-ibverbs-tools" else {1024, 4096})
    assert [(f["id"], f["host"], f["severity"]) for f in survey["findings"]] == [
        (kind, host, "warning") for kind, host, _, _ in findings
    ]
    for found, (_, _, seen, repair) in zip(survey["findings"], findings, strict=True):
        assert seen in found["found"] and repair in found["repair"]
    # Where both rails are needed, the same is an error.
    assert bool(told(cabling.survey({**plan, "min_rails": 2}, [rank(host) for host in infos], infos))) == bool(findings)


def test_recorded_nodes_without_rdma() -> None:
    made = cluster("direct2")
    infos = {host: read("no-hca", host) for host in made.ports}
    survey = cabling.survey(made.fabric, [rank(host) for host in infos], infos)
    assert told(survey, "error", "warning", "info") == [("fabric.rdma", host) for host in infos]
    assert hcas(survey) == ["", ""]


def test_every_recorded_case_is_read() -> None:
    recorded = {path.parents[1].name for path in RECORDED.glob("*/spark1/sys")}
    assert recorded == {*CASES, "no-hca"}


# What the inventory states


def test_a_stated_address_is_the_first_rail() -> None:
    made = cluster("direct2")
    made.state("spark2", address="10.77.1.2")
    survey = made.survey()
    assert survey["findings"] == []
    assert hcas(survey) == [exact("F0", "f0")] * 2, "on the head too"
    assert [each["address"] for each in survey["ranks"].values()] == ["10.77.1.1", "10.77.1.2"]


def test_a_stated_address_of_the_lan_decides_for_all() -> None:
    made = cluster("triangle3")
    made.others = {host: {"wlP9s9": [f"172.20.0.{number}/24"]} for number, host in enumerate(made.ports, 1)}
    made.state("spark2", address="172.20.0.2")
    survey = made.survey()
    assert survey["findings"] == []
    assert [each["address"] for each in survey["ranks"].values()] == ["172.20.0.1", "172.20.0.2", "172.20.0.3"]


def test_stated_rails_win_and_order() -> None:
    made = cluster("direct2")
    made.state("spark1", rails=[{"netdev": NETDEV["F0"], "address": "10.77.1.1/24"}, {"netdev": NETDEV["f0"]}])
    survey = made.survey()
    assert survey["findings"] == [] and hcas(survey) == [exact("F0", "f0")] * 2
    made.state("spark1", rails=[{"netdev": NETDEV["F0"]}])
    survey = made.survey()
    assert hcas(survey) == [exact("F0")] * 2
    assert told(survey, "error") == []


@pytest.mark.parametrize("how", ["rails", "address"])
def test_a_stated_rail_of_the_management_port(how: str) -> None:
    made = cluster("direct2")
    made.management = dict.fromkeys(made.ports, NETDEV["f0"])
    assert hcas(made.survey()) == [exact("F0")] * 2
    for number, host in enumerate(made.ports, 1):
        rails = [{"netdev": NETDEV["f0"]}, {"netdev": NETDEV["F0"]}]
        made.state(host, **({"rails": rails} if how == "rails" else {"address": f"10.77.0.{number}"}))
    assert hcas(made.survey()) == [exact("f0", "F0")] * 2


@pytest.mark.parametrize(
    ("stated", "broken", "kind", "seen", "needed"),
    [
        pytest.param(
            {"address": "10.99.0.1"},
            None,
            "fabric.address",
            "10.77.0.1/24",
            "spark_fabric_address 10.99.0.1",
            id="nowhere",
        ),
        pytest.param(
            {"address": "192.168.1.1"},
            None,
            "fabric.address",
            f"192.168.1.1 is on {LAN}, which has no usable RDMA port",
            "ACTIVE RoCE port",
            id="on the LAN",
        ),
        pytest.param(
            {"address": "10.77.0.1"},
            on("spark1", "f0", state="DOWN"),
            "fabric.port_state",
            "is DOWN",
            "spark_fabric_address 10.77.0.1",
            id="on a port that is down",
        ),
        pytest.param(
            {"rails": [{"netdev": "enp9s9"}]},
            None,
            "fabric.address",
            f"no RDMA port on enp9s9; found {NETDEV['f0']}, {NETDEV['F0']}",
            "a port of spark_fabric_rails",
            id="a port that is not there",
        ),
        pytest.param(
            {"rails": [{"netdev": NETDEV["f0"], "address": "10.77.0.7/24"}]},
            None,
            "fabric.address",
            f"{NETDEV['f0']} does not hold 10.77.0.7",
            "10.77.0.7 of spark_fabric_rails",
            id="a port without the stated address",
        ),
    ],
)
def test_stated_values_that_are_wrong(
    stated: dict[str, Any], broken: Break | None, kind: str, seen: str, needed: str
) -> None:
    made = cluster("direct2")
    made.state("spark1", **stated)
    if broken:
        broken(made)
    found = finding_with(made.survey(), kind, needed)
    assert seen in found["found"] and found["host"] == "spark1" and found["severity"] == "error" and found["repair"]


def finding_with(survey: dict[str, Any], kind: str, needed: str) -> dict[str, Any]:
    (found,) = [f for f in survey["findings"] if f["id"] == kind and needed in f["needed"]]
    return dict(found)


def test_a_stated_rail_that_is_down_is_never_left_out_in_silence() -> None:
    made = cluster("direct2", rails=1)
    for host in made.ports:
        made.state(host, rails=[{"netdev": NETDEV["f0"]}, {"netdev": NETDEV["f1"]}])
    assert told(made.survey(), "warning") == [("fabric.port_state", "spark1"), ("fabric.port_state", "spark2")]
    made.change("spark1", "f1", "10.88.0.1/24", state="ACTIVE")
    assert ("fabric.stray", "spark1") in told(made.survey(), "warning")


# GID indexes


def moved(made: Cluster, host: str, key: str, index: int) -> None:
    """The GID of a port's address at another index."""
    port = made.ports[host][key]
    made.change(host, key, gids=[{**entry, "index": index} for entry in port["gids"][-1:]])


@pytest.mark.parametrize(
    ("pins", "bad"),
    [
        pytest.param({"spark1": 3, "spark2": 3}, {}, id="right"),
        pytest.param({"spark1": "3"}, {}, id="as text, on one rank"),
        pytest.param({"spark1": 2}, {"spark1": "10.77.0.1 on rocep1s0f0, 10.77.1.1 on roceP2p1s0f0"}, id="v1"),
        pytest.param({"spark2": 1}, {"spark2": "10.77.0.2 on rocep1s0f0"}, id="link-local"),
        pytest.param({"spark2": 77}, {"spark2": "10.77.0.2 on rocep1s0f0"}, id="beyond the table"),
    ],
)
def test_a_pin(pins: dict[str, Any], bad: dict[str, str]) -> None:
    made = cluster("direct2")
    for host, pin in pins.items():
        made.state(host, gid_index=pin)
    survey = made.survey()
    assert told(survey) == [("fabric.gid_index", host) for host in bad]
    for host, seen in bad.items():
        found = finding(survey, "fabric.gid_index", host)
        assert seen in found["found"] and f"{HCA['f0']} 3; {HCA['F0']} 3" in found["needed"]
        assert f"{HCA['F0']}:1   3 " in found["evidence"] and found["repair"]
    for host, each in survey["ranks"].items():
        assert each["gid_index"] == str(pins.get(host, ""))


def test_different_pins_on_different_ranks() -> None:
    made = cluster("direct2")
    for key in ("f0", "F0"):
        moved(made, "spark2", key, 4)
    made.state("spark1", gid_index=3)
    made.state("spark2", gid_index=4)
    survey = made.survey()
    assert survey["findings"] == []
    assert [end["gid_index"] for end in survey["links"][0]["ends"]] == [3, 4]


def test_a_pin_that_is_right_on_one_hca_only() -> None:
    """R1 fixture A."""
    made = cluster("direct2")
    moved(made, "spark1", "F0", 4)
    made.state("spark1", gid_index=3)
    survey = made.survey()
    assert told(survey) == [("fabric.gid_index", "spark1")]
    seen = finding(survey, "fabric.gid_index")["found"]
    assert seen == f"GID index 3 is pinned; it is no RoCE v2 GID of 10.77.1.1 on {HCA['F0']}"


@pytest.mark.parametrize("where", ["argv", "env"])
def test_an_engine_that_needs_an_index(where: str) -> None:
    made = cluster("direct2")
    needs = {"argv": ["--gid", "{gid_index}"]} if where == "argv" else {"env": {"TF_RDMA_GID_INDEX": "{gid_index}"}}
    for host in made.ports:
        made.state(host, **needs)
    survey = made.survey()
    assert survey["findings"] == []
    assert [each["gid_index"] for each in survey["ranks"].values()] == ["3", "3"]
    moved(made, "spark2", "F0", 4)
    survey = made.survey()
    assert told(survey) == [("fabric.gid_index", "spark2")]
    found = finding(survey, "fabric.gid_index")
    assert found["found"] == f"no common GID index: {HCA['f0']} 3; {HCA['F0']} 4"
    assert f"{HCA['F0']}:1   4 " in found["evidence"]
    assert survey["ranks"]["spark2"]["gid_index"] == ""


def test_the_lowest_common_index_is_taken() -> None:
    made = cluster("direct2")
    for key, number in (("f0", 0), ("F0", 1)):
        entries = [gid(index, f"10.77.{number}.1", netdev=NETDEV[key]) for index in (9 - number, 11, 12)]
        made.change("spark1", key, gids=entries)
    made.state("spark1", argv=["{gid_index}"])
    assert made.survey()["ranks"]["spark1"]["gid_index"] == "11"


@pytest.mark.parametrize(
    ("env", "pin", "bad"),
    [
        ({"NCCL_IB_GID_INDEX": "3"}, None, []),
        ({"NCCL_IB_GID_INDEX": "0"}, None, ["GID index 0 "]),
        ({"NCCL_IB_GID_INDEX": ""}, None, ["GID index  "]),
        ({"NCCL_IB_GID_INDEX": "x"}, 3, ["GID index x "]),
        ({"NCCL_IB_GID_INDEX": "1"}, 2, ["GID index 2 ", "GID index 1 "]),
    ],
)
def test_a_literal_index(env: dict[str, str], pin: int | None, bad: list[str]) -> None:
    made = cluster("direct2")
    made.state("spark1", env=env, gid_index=pin)
    found = [f["found"] for f in made.survey()["findings"]]
    assert len(found) == len(bad) and all(seen.startswith(start) for seen, start in zip(found, bad, strict=True))


# Variables that are stated as they are


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("NCCL_SOCKET_IFNAME", "{socket_interface}", None),
        ("NCCL_SOCKET_IFNAME", NETDEV["f0"], None),
        ("NCCL_SOCKET_IFNAME", "enp1", None),
        ("NCCL_SOCKET_IFNAME", f"={NETDEV['f0']},eth0", None),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", None),
        ("NCCL_SOCKET_IFNAME", "=enp1", "does not choose"),
        ("NCCL_SOCKET_IFNAME", "^enp1", "does not choose"),
        ("NCCL_SOCKET_IFNAME", "^=enp1", None),
        ("NCCL_SOCKET_IFNAME", f"^={NETDEV['f0']}", "does not choose"),
        ("NCCL_SOCKET_IFNAME", "eno1", "does not choose"),
        ("GLOO_SOCKET_IFNAME", NETDEV["f0"], None),
        ("GLOO_SOCKET_IFNAME", "enp1", "does not choose"),
        ("GLOO_SOCKET_IFNAME", LAN, "does not choose"),
        ("NCCL_IB_HCA", "{hcas}", None),
        ("NCCL_IB_HCA", f"={HCA['f0']}:1,{HCA['F0']}:1", None),
        ("NCCL_IB_HCA", "roce", None),
        ("NCCL_IB_HCA", f"={HCA['F0']}", None),
        ("NCCL_IB_HCA", f"={HCA['F0']}:1:0:1", None),
        ("NCCL_IB_HCA", "^=other", None),
        ("NCCL_IB_HCA", f"={HCA['f0']}:2", "chooses no port"),
        ("NCCL_IB_HCA", "mlx5", "chooses no port"),
        ("NCCL_IB_HCA", "=roce", "chooses no port"),
        ("NCCL_IB_HCA", "^roce", "chooses no port"),
        ("NCCL_IB_HCA", f"={HCA['f1']}", "chooses no port"),
        ("NCCL_IB_HCA", "rocep*", "cannot be read"),
        ("NCCL_IB_HCA", "", None),
    ],
)
def test_literal_variables(name: str, value: str, seen: str | None) -> None:
    made = cluster("direct2")
    made.state("spark2", env={name: value})
    survey = made.survey()
    found = [f["found"] for f in survey["findings"] if f["id"] == "fabric.env"]
    assert len(found) == (seen is not None) == len(told(survey))
    if seen:
        assert found[0].startswith(f"{name}={value} ") and seen in found[0]


def test_a_literal_hca_that_also_matches_another() -> None:
    """R5."""
    one = [port("mlx5_1", "a", "192.168.177.11/24"), port("mlx5_11", "b", "192.168.200.11/24")]
    made = cluster("direct2", rails=1)
    made.ports["spark1"] = {"a": one[0], "b": one[1]}
    made.change("spark2", "f0", "192.168.177.12/24")
    made.state("spark1", env={"NCCL_IB_HCA": "mlx5_1"})
    assert finding(made.survey(), "fabric.env")["found"] == "NCCL_IB_HCA=mlx5_1 chooses mlx5_1:1, mlx5_11:1"
    made.state("spark1", env={"NCCL_IB_HCA": "=mlx5_1"})
    assert told(made.survey()) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("mlx5_1", (False, False, [("mlx5_1", None)])),
        ("=mlx5_1:1,mlx5_2:2", (False, True, [("mlx5_1", 1), ("mlx5_2", 2)])),
        ("^mlx5_1", (True, False, [("mlx5_1", None)])),
        ("^=mlx5_1:1:0:3, b", (True, True, [("mlx5_1", 1), ("b", None)])),
        ("", (False, False, [])),
    ],
)
def test_parse_hcas(value: str, expected: Any) -> None:
    assert cabling.parse_hcas(value) == expected


@pytest.mark.parametrize("value", ["mlx5_*", "a:b", ":1", "a b"])
def test_parse_hcas_refuses(value: str) -> None:
    with pytest.raises(ValueError, match=r"is not name\[:port\]"):
        cabling.parse_hcas(value)


# Probes


def saw(kind: str, rail: int, peer: str, ok: bool = True, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "rail": rail, "peer": peer, "ok": ok, "detail": "details", "evidence": "rows", **more}


def all_ok(made: Cluster) -> dict[str, list[dict[str, Any]]]:
    survey = made.survey()
    results: dict[str, list[dict[str, Any]]] = {host: [] for host in made.ports}
    for host in results:
        for rail in cabling.probe_plan(survey, host, 18600):
            results[host] += [saw(kind, rail["rail"], rail["peer"]) for kind in ("ping", "rdma")]
    return results


@pytest.mark.parametrize(("topology", "nodes", "rails"), TOPOLOGIES)
def test_proven(topology: str, nodes: int, rails: int) -> None:
    made = cluster(topology, nodes, rails)
    survey = made.survey(all_ok(made))
    assert survey["findings"] == [] and {link["state"] for link in survey["links"]} == {"ok"}


def test_a_failing_rail_is_left_out_and_said() -> None:
    made = cluster("direct2")
    results = {**all_ok(made), "spark2": [saw("ping", 1, "spark1"), saw("rdma", 1, "spark1", ok=False)]}
    survey = made.survey(results)
    assert hcas(survey) == [exact("f0")] * 2
    assert [link["state"] for link in survey["links"]] == ["ok", "dropped"]
    assert told(survey) == []
    found = finding(survey, "fabric.rail_dropped")
    assert found["severity"] == "warning" and "10.77.1.0/24" in found["found"] and "min_rails is 1" in found["needed"]
    path = finding(survey, "fabric.rdma_path")
    assert (path["host"], path["severity"], path["evidence"]) == ("spark2", "warning", "rows")
    assert path["found"] == (f"{HCA['F0']} {NETDEV['F0']} 10.77.1.2 to spark1 {NETDEV['F0']} 10.77.1.1: details")


def test_a_failing_rail_is_an_error_where_all_are_needed() -> None:
    made = cluster("direct2", min_rails=2)
    survey = made.survey({"spark2": [saw("rdma", 1, "spark1", ok=False)]})
    assert told(survey) == [("fabric.rdma_path", "spark2")]
    assert [link["state"] for link in survey["links"]] == ["unproven", "failed"]
    assert hcas(survey) == [exact("f0", "F0")] * 2, "what is meant, though it fails"


def test_the_rail_of_a_stated_address_is_not_left_out() -> None:
    """Sockets go over it."""
    made = cluster("direct2")
    for number, host in enumerate(made.ports, 1):
        made.state(host, address=f"10.77.0.{number}")
    assert told(made.survey({"spark2": [saw("ping", 0, "spark1", ok=False)]})) == [("fabric.path", "spark2")]
    assert told(made.survey({"spark2": [saw("ping", 1, "spark1", ok=False)]})) == []


def test_the_first_rail_left_out_moves_the_sockets() -> None:
    made = cluster("direct2")
    survey = made.survey({"spark2": [saw("ping", 0, "spark1", ok=False)]})
    assert [each["address"] for each in survey["ranks"].values()] == ["10.77.1.1", "10.77.1.2"]
    assert survey["ranks"]["spark1"]["paths"]["spark2"] == {"local": "10.77.1.1", "remote": "10.77.1.2"}


def test_a_rail_of_a_switch_is_left_out_on_all_ranks() -> None:
    made = cluster("switch", 3)
    survey = made.survey({"spark3": [saw("rdma", 1, "spark1", ok=False)]})
    assert hcas(survey) == [exact("f0")] * 3
    assert [link["state"] for link in survey["links"] if link["rail"] == 1] == ["dropped"] * 3


def test_only_the_broken_link_of_a_needed_rail_has_failed() -> None:
    made = cluster("switch", 3, rails=1)
    survey = made.survey({"spark3": [saw("ping", 0, "spark1", ok=False), saw("ping", 0, "spark2")]})
    states = {tuple(end["host"] for end in link["ends"]): link["state"] for link in survey["links"]}
    assert states == {
        ("spark1", "spark2"): "unproven",
        ("spark1", "spark3"): "failed",
        ("spark2", "spark3"): "ok",
    }


def test_rails_of_one_pair_do_not_stand_in_for_another() -> None:
    made = cluster("triangle3", rails=1)
    survey = made.survey({"spark3": [saw("ping", 1, "spark1", ok=False)]})
    assert told(survey) == [("fabric.path", "spark3")]
    assert survey["ranks"]["spark1"]["paths"]["spark3"]["remote"] == "192.168.1.3"


def test_a_swapped_cable_fails_both_ways() -> None:
    """Two cables swapped between ports that are all up: addresses suit each other, frames arrive elsewhere."""
    made = cluster("direct2")
    results = {
        host: [saw("ping", rail, peer, ok=False) for rail in (0, 1)]
        for host, peer in (("spark1", "spark2"), ("spark2", "spark1"))
    }
    survey = made.survey(results)
    assert sorted(told(survey)) == [("fabric.path", "spark1")] * 2 + [("fabric.path", "spark2")] * 2
    assert all("cable" in f["repair"] for f in survey["findings"])
    assert [link["state"] for link in survey["links"]] == ["failed", "failed"]


def test_a_missing_tool_and_low_bandwidth_are_warnings() -> None:
    made = cluster("direct2", rails=1)
    tool = {"kind": "tool", "ok": False, "tool": "ibv_rc_pingpong", "package": "ibverbs-utils"}
    slow = saw("bandwidth", 0, "spark2", ok=False, gbps=9.0, needed_gbps=80.0)
    survey = made.survey({"spark1": [saw("ping", 0, "spark2"), tool, slow]})
    assert told(survey) == [] and [link["state"] for link in survey["links"]] == ["ok"]
    assert finding(survey, "fabric.probe_tool")["repair"] == "apt-get install ibverbs-utils"
    assert finding(survey, "fabric.bandwidth")["needed"] == "80.0 Gb/s or more, of a link of 200 Gb/s"


def test_probes_of_rails_that_are_gone_are_passed_over() -> None:
    made = cluster("direct2", rails=1)
    survey = made.survey({"spark1": [saw("ping", 5, "spark2", ok=False), saw("ping", 0, "spark9", ok=False)], "x": []})
    assert survey["findings"] == []


def test_probe_plan() -> None:
    made = cluster("triangle3")
    made.change("spark2", "f1", active_mtu=1024)
    moved(made, "spark2", "f1", 9)
    survey = made.survey()
    plans = {host: cabling.probe_plan(survey, host, "18600") for host in made.ports}
    first, (other, *_) = plans["spark1"][0], plans["spark2"]
    assert first == {
        "rail": 0,
        "peer": "spark2",
        "netdev": NETDEV["f0"],
        "hca": HCA["f0"],
        "port": 1,
        "gid_index": 3,
        "mtu": 9000,
        "rate_gbps": 200.0,
        "path_mtu": 1024,
        "local": "10.77.0.1",
        "remote": "10.77.0.2",
        "serves": True,
        "tcp_port": 18600,
    }
    assert (other["serves"], other["gid_index"], other["tcp_port"], other["remote"]) == (False, 9, 18600, "10.77.0.1")
    ports: dict[int, list[bool]] = {}
    for rail in itertools.chain(*plans.values()):
        ports.setdefault(rail["tcp_port"], []).append(rail["serves"])
    assert sorted(ports) == list(range(18600, 18606))
    assert all(sorted(serves) == [False, True] for serves in ports.values())


def test_rails_that_cannot_work_are_not_probed() -> None:
    made = cluster("direct2")
    made.change("spark2", "F0", mtu=1500)
    assert [rail["rail"] for rail in cabling.probe_plan(made.survey(), "spark1", 1)] == [0]
    made.change("spark2", "f0", mtu=1500)
    assert cabling.probe_plan(made.survey(), "spark1", 1) == []


def test_an_unknown_rdma_mtu_is_the_smallest_usual_one() -> None:
    made = cluster("direct2", rails=1)
    for host in made.ports:
        made.change(host, "f0", active_mtu=0)
    assert [rail["path_mtu"] for rail in cabling.probe_plan(made.survey(), "spark2", 1)] == [1024]


def test_survey_plan_takes_what_ansible_registered() -> None:
    made = cluster("direct2", rails=1)
    plan = {"fabric": made.fabric, "ranks": [rank("spark1"), rank("spark2")]}
    reads = {host: {"changed": False, **made.info(host)} for host in made.ports}
    assert cabling.survey_plan(plan, reads)["findings"] == []
    probed = {"spark1": {"results": [saw("ping", 0, "spark2", ok=False)]}, "spark2": {"skipped": True}}
    assert told(cabling.survey_plan(plan, reads, probed)) == [("fabric.path", "spark1")]
    assert told(cabling.survey_plan(plan, {"spark1": reads["spark1"]})) == [("node.unreachable", "spark2")]
    silent = {**reads, "spark2": {"unreachable": True, "msg": "no route"}}
    assert told(cabling.survey_plan(plan, silent)) == [("node.unreachable", "spark2")]
    failed = cabling.survey_plan(plan, {**reads, "spark2": {"failed": True, "msg": "ip is missing"}})
    assert told(failed) == [("fabric.sysfs", "spark2")]
    assert finding(failed, "fabric.sysfs")["found"] == "ip is missing"


def test_cables_are_named_for_people() -> None:
    made = cluster("direct2")
    cables = {p["netdev"]: p["cable"] for p in made.survey()["ports"]["spark1"]}
    assert cables == {NETDEV[key]: key.lower() for key in PORTS}
    made.ports["spark1"]["x"] = port("mlx5_9", "eth9", pci="")
    made.ports["spark1"]["y"] = port("mlx5_8", "enp5s0", pci="0000:05:00.0")
    cables = {p["netdev"]: p["cable"] for p in made.survey()["ports"]["spark1"]}
    assert (cables["eth9"], cables["enp5s0"], cables[NETDEV["f1"]]) == ("eth9", "05:00.0", "01:00.1")
    assert cables[NETDEV["f1"]] == cables[NETDEV["F1"]]


# Properties


NAMES = st.permutations([*(f"mlx5_{number}" for number in range(12)), "rocep1s0f0", "rocep1s0f1"])


def entries(draw: st.DrawFn, netdev: str, addresses: list[str], others: list[str]) -> list[dict[str, Any]]:
    """A GID table as kernels fill it: sparse, long, with entries of other addresses, versions and devices."""
    ips = [address.partition("/")[0] for address in addresses]
    wanted = [(ip, kind, netdev) for ip in ips for kind in ("RoCE v2", "IB/RoCE v1")]
    noise = [(LINK_LOCAL, "RoCE v2", netdev), (LINK_LOCAL, "IB/RoCE v1", netdev)]
    noise += [(ip, "RoCE v2", "gone0") for ip in ips] + [(ip, "RoCE v2", netdev) for ip in others]
    kept = [*wanted, *draw(st.lists(st.sampled_from(noise), max_size=6, unique=True))]
    slots = draw(st.lists(st.integers(0, 1023), min_size=len(kept), max_size=len(kept), unique=True))
    return sorted((gid(slot, *entry) for slot, entry in zip(slots, kept, strict=True)), key=lambda e: int(e["index"]))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Cluster, set[frozenset[tuple[str, str]]]]:
    """A cluster that works, with all that may be odd about it, and the pairs of ports that its rails join."""
    topology, nodes, rails = draw(st.sampled_from(TOPOLOGIES))
    made = cluster(topology, nodes, rails, min_rails=draw(st.integers(0, rails)))
    intended: dict[str, list[tuple[str, str]]] = {}
    for number, host in enumerate(made.ports, 1):
        names, ports = draw(NAMES), made.ports[host]
        for key, name in zip(list(ports), names, strict=False):
            netdev = draw(st.sampled_from([NETDEV[key], f"eth{number}{key}"]))
            if ports[key]["state"] == "ACTIVE":
                own = ports[key]["addresses"]
                intended.setdefault(f"{own[0].rpartition('.')[0]}", []).append((host, netdev))
                private = f"10.{100 + number}.{list(PORTS).index(key)}.9/24"
                extra = draw(
                    st.lists(st.sampled_from([private, "169.254.3.4/16", "10.9.9.9/32"]), max_size=2, unique=True)
                )
                addresses = draw(st.permutations([*own, *extra]))
                gids = entries(draw, netdev, addresses, ["10.254.0.1"])
                changes: dict[str, Any] = {"active_mtu": draw(st.sampled_from([0, 4096]))}
            else:
                leftover = [f"10.{150 + number}.0.1/24"] if draw(st.booleans()) else []
                addresses, gids, changes = leftover, table(netdev, leftover), {}
                changes["state"] = draw(st.sampled_from(["DOWN", "INIT", "ARMED"]))
                changes["link_layer"] = draw(st.sampled_from(["Ethernet", "InfiniBand"]))
            # A predictable name tells the function as well.
            pci = draw(st.sampled_from([PORTS[key][2], *([""] if netdev == NETDEV[key] else [])]))
            made.change(host, key, hca=name, netdev=netdev, addresses=addresses, gids=gids, pci=pci, **changes)
        if draw(st.booleans()):
            ports["m"] = port(names[-1], LAN, *made.lan[host])
        made.ports[host] = dict(draw(st.permutations(list(ports.items()))))
        made.others[host] = {"docker0": ["172.17.0.1/16"]}
    pairs = {frozenset(two) for ends in intended.values() for two in itertools.combinations(ends, 2)}
    return made, pairs


# The same examples each time; shrinking a failure may take minutes, so it is left to whoever looks into one.
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True, database=None, phases=[Phase.generate])


@PROPERTY
@given(clusters())
def test_whatever_works_is_found(drawn: tuple[Cluster, set[frozenset[tuple[str, str]]]]) -> None:
    made, pairs = drawn
    survey = made.survey()
    assert told(survey) == []
    assert joined(survey) == pairs
    for host, each in survey["ranks"].items():
        mine = {netdev for two in pairs for name, netdev in two if name == host}
        assert {rail["netdev"] for rail in each["rails"]} == mine
        for rail in each["rails"]:
            (own,) = [p for p in made.ports[host].values() if p["netdev"] == rail["netdev"]]
            (entry,) = [e for e in own["gids"] if e["index"] == rail["gid_index"]]
            assert (entry["ipv4"], entry["type"], entry["netdev"]) == (rail["address"], "RoCE v2", rail["netdev"])
        assert each["address"] and each["socket_interface"] not in ("", "lo", "docker0")
    if made.fabric["topology"] in ("direct2", "switch"):
        orders = [[(rail["rail"], rail["network"]) for rail in each["rails"]] for each in survey["ranks"].values()]
        assert all(order == orders[0] for order in orders)


def without_address(made: Cluster, host: str, key: str) -> None:
    made.change(host, key, addresses=[], gids=[])


def wrong_subnet(made: Cluster, host: str, key: str) -> None:
    made.change(host, key, "10.201.7.7/24")


def port_down(made: Cluster, host: str, key: str) -> None:
    made.change(host, key, state="DOWN")


def without_gid(made: Cluster, host: str, key: str) -> None:
    port = made.ports[host][key]
    ips = [address.partition("/")[0] for address in port["addresses"] if address.startswith("10.77.")]
    made.change(host, key, gids=[entry for entry in port["gids"] if entry["ipv4"] not in ips])


def unequal_mtu(made: Cluster, host: str, key: str) -> None:
    made.change(host, key, mtu=1500, active_mtu=1024)


BREAKS = [without_address, wrong_subnet, port_down, without_gid, unequal_mtu]


@PROPERTY
@given(clusters(), st.sampled_from(BREAKS), st.data())
def test_whatever_is_broken_is_told(
    drawn: tuple[Cluster, set[frozenset[tuple[str, str]]]], broken: Callable[..., None], data: st.DataObject
) -> None:
    made, pairs = drawn
    ends = sorted(
        (host, key) for host in made.ports for key, p in made.ports[host].items() if p["mtu"] == 9000 and key != "m"
    )
    host, key = data.draw(st.sampled_from(ends))
    netdev = made.ports[host][key]["netdev"]
    broken(made, host, key)
    survey = made.survey()
    rails = len({link["rail"] for link in survey["links"]})
    assert all((host, netdev) not in pair for pair in joined(survey))
    if told(survey):
        return
    assert made.fabric["min_rails"] < 2 and rails > 0
    warnings = [f for f in survey["findings"] if f["severity"] == "warning" and f["host"] == host]
    named = [f"{f['found']} {f['evidence']}" for f in warnings]
    assert any(netdev in seen for seen in named)
    # The management port may stand in, and that is said.
    assert {two for two in joined(survey) if LAN not in [netdev for _, netdev in two]} <= pairs


WORD = st.sampled_from(
    [
        "",
        "a",
        "lo",
        "enp1s0f0np0",
        "enP2p1s0f1np1",
        "rocep1s0f0",
        "0000:01:00.0",
        "ACTIVE",
        "Ethernet",
        "::",
        "spark1",
        "=",
        "{",
    ]
)
ADDRESS = st.sampled_from(
    [
        "10.0.0.1/24",
        "10.0.0.2/24",
        "10.0.0.3/0",
        "0.0.0.0/0",
        "127.0.0.1/8",
        "10.0.0.1/32",
        "10.0.0.1",
        "",
        "x",
        "1.2.3.4/99",
    ]
)
NUMBER = st.integers(-1, 10000)
GID = st.fixed_dictionaries(
    {"index": NUMBER, "gid": WORD, "type": st.sampled_from(["", "v2", "RoCE v2", V1]), "netdev": WORD}
).flatmap(lambda entry: st.sampled_from([None, "", "10.0.0.1", "10.0.0.2"]).map(lambda ip: {**entry, "ipv4": ip}))
ANY_PORT = st.fixed_dictionaries(
    {
        **dict.fromkeys(("hca", "pci", "netdev", "phys_state"), WORD),
        "state": st.sampled_from(["ACTIVE", "DOWN", ""]),
        "link_layer": st.sampled_from(["Ethernet", "InfiniBand", ""]),
        **dict.fromkeys(("port", "mtu", "active_mtu"), NUMBER),
        "rate_gbps": st.floats(allow_nan=False, allow_infinity=False),
        "addresses": st.lists(ADDRESS, max_size=3),
        "gids": st.lists(GID, max_size=4),
    }
)
INTERFACE = st.fixed_dictionaries(
    {"name": WORD, "mtu": NUMBER, "state": WORD, "pci": WORD, "addresses": st.lists(ADDRESS, max_size=3)}
)
INFO = st.none() | st.fixed_dictionaries(
    {
        "ports": st.lists(ANY_PORT, max_size=4),
        "interfaces": st.lists(INTERFACE, max_size=4),
        "management": WORD,
        "errors": st.lists(WORD, max_size=1),
    }
)
STATED = st.fixed_dictionaries(
    {
        "address": st.sampled_from(["", "10.0.0.1", "10.0.0.2"]),
        "rails": st.lists(st.fixed_dictionaries({"netdev": WORD}, optional={"address": ADDRESS}), max_size=2),
        "gid_index": st.none() | NUMBER | st.sampled_from(["", "²", "x", "3"]),
        "argv": st.lists(st.sampled_from(["{gid_index}", "x"]), max_size=1),
        "env": st.dictionaries(st.sampled_from(["NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_IB_GID_INDEX"]), WORD),
    }
)
RESULT = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["ping", "rdma", "bandwidth"]),
        "rail": st.integers(-1, 3),
        "peer": st.sampled_from(["spark1", "spark2", "x"]),
        "ok": st.booleans(),
        "detail": WORD,
        "needed_gbps": st.floats(0, 400),
    }
)


@settings(PROPERTY, max_examples=120)
@given(st.sampled_from([("direct2", 2), ("switch", 3), ("triangle3", 3), ("ring4", 4)]), st.data())
def test_garbage_is_survived(topology: tuple[str, int], data: st.DataObject) -> None:
    name, nodes = topology
    hosts = [f"spark{number}" for number in range(1, nodes + 1)]
    plan = {"topology": name, "rdma": data.draw(st.booleans()), "mtu": 9000, "min_rails": 1, "max_rails": 0}
    ranks = [{"host": host, **data.draw(STATED)} for host in hosts]
    infos = {host: data.draw(INFO) for host in hosts}
    results = {host: data.draw(st.lists(RESULT, max_size=3)) for host in hosts}
    survey = cabling.survey(plan, ranks, infos, results)
    json.dumps(survey)
    for told_of in survey["findings"]:
        assert told_of["repair"] and told_of["needed"] and told_of["host"] in hosts
    for host in hosts:
        cabling.probe_plan(survey, host, 18600)
    if all(info is None for info in infos.values()):
        assert told(survey) == [("node.unreachable", host) for host in hosts]
