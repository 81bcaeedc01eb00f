# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Clusters of Sparks as facts: what module fabric_info would tell of each node, whole first, then broken by a test."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.sparkwright.dsv41.plugins.module_utils import cabling, fabric

Facts = dict[str, Any]
V2, V1 = "RoCE v2", "IB/RoCE v1"
LINK_LOCAL = "fe80:0000:0000:0000:a288:c2ff:fe5b:03ec"

# QSFP port and PCI domain -> HCA, network device and PCI address on a Spark. Capitals: the twin in domain 2.
PORTS = {
    "f0": ("rocep1s0f0", "enp1s0f0np0", "0000:01:00.0"),
    "F0": ("roceP2p1s0f0", "enP2p1s0f0np0", "0002:01:00.0"),
    "f1": ("rocep1s0f1", "enp1s0f1np1", "0000:01:00.1"),
    "F1": ("roceP2p1s0f1", "enP2p1s0f1np1", "0002:01:00.1"),
}
HCA = {key: names[0] for key, names in PORTS.items()}
NETDEV = {key: names[1] for key, names in PORTS.items()}
LAN = "enP7s7"
# The cables of a topology, as (node, port) of both ends.
CABLES = {
    "direct2": [((1, 0), (2, 0))],
    "triangle3": [((1, 0), (2, 1)), ((1, 1), (3, 0)), ((2, 0), (3, 1))],
    "ring4": [((1, 0), (2, 1)), ((2, 0), (3, 1)), ((3, 0), (4, 1)), ((4, 0), (1, 1))],
}


def mapped(address: str) -> str:
    """The GID of an IPv4 address, in the form of sysfs."""
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def gid(index: int, text: str, kind: str = V2, netdev: str = "") -> Facts:
    """One entry of a GID table; `text` is a GID or an IPv4 address."""
    text = mapped(text) if text.count(".") == 3 else text
    return {"index": index, "gid": text, "type": kind, "netdev": netdev, "ipv4": fabric.mapped_ipv4(text)}


def table(netdev: str, addresses: Iterable[str]) -> list[Facts]:
    """The GID table that mlx5 fills: v1 and v2 of the link-local address, then v1 and v2 of each address."""
    texts = [LINK_LOCAL, *(address.partition("/")[0] for address in addresses)]
    kinds = itertools.product(texts, (V1, V2))
    return [gid(index, text, kind, netdev) for index, (text, kind) in enumerate(kinds)]


def port(hca: str, netdev: str, *addresses: str, pci: str = "", **changes: Any) -> Facts:
    """An RDMA port that is up; `addresses` as a.b.c.d/prefix."""
    return {
        "hca": hca,
        "port": 1,
        "pci": pci,
        "netdev": netdev,
        "state": "ACTIVE",
        "phys_state": "LinkUp",
        "link_layer": "Ethernet",
        "rate_gbps": 200.0,
        "mtu": 9000,
        "active_mtu": 4096,
        "addresses": list(addresses),
        "gids": table(netdev, addresses),
        **changes,
    }


def rank(host: str, **stated: Any) -> Facts:
    """A rank of the plan that states nothing but what is given."""
    return {"host": host, "address": "", "rails": [], "gid_index": None, "argv": [], "env": {}, **stated}


@dataclass
class Cluster:
    """Facts and plan of a cluster: `ports` by host and short name (f0, F0, f1, F1), LAN addresses by host."""

    fabric: Facts
    ports: dict[str, dict[str, Facts]]
    lan: dict[str, list[str]]
    stated: dict[str, Facts] = field(default_factory=dict)
    others: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    management: dict[str, str] = field(default_factory=dict)

    def info(self, host: str) -> Facts:
        """What fabric_info would tell of a host."""
        ports = list(self.ports[host].values())
        devices = {
            "lo": ["127.0.0.1/8"],
            LAN: self.lan[host],
            **{port["netdev"]: port["addresses"] for port in ports if port["netdev"]},
        }
        for name, addresses in self.others.get(host, {}).items():
            devices[name] = [*devices.get(name, []), *addresses]
        interfaces = [
            {"name": name, "mtu": 1500, "state": "up", "pci": "", "addresses": addresses}
            for name, addresses in devices.items()
        ]
        management = self.management.get(host, LAN)
        return copy.deepcopy({"ports": ports, "interfaces": interfaces, "management": management, "errors": []})

    def survey(self, probes: Mapping[str, Sequence[Facts]] | None = None, **fabric: Any) -> Facts:
        infos = {host: None if host in self.silent else self.info(host) for host in self.ports}
        ranks = [rank(host, **self.stated.get(host, {})) for host in self.ports]
        return cabling.survey({**self.fabric, **fabric}, ranks, infos, probes)

    def change(self, host: str, key: str, *addresses: str, **changes: Any) -> None:
        """Give a port other addresses (and the GIDs of them), or other values."""
        old = self.ports[host].get(key) or port(*PORTS[key][:2], pci=PORTS[key][2])
        if addresses:
            fresh = {"addresses": list(addresses), "gids": table(old["netdev"], addresses)}
            changes = {**fresh, **changes}
        self.ports[host][key] = {**old, **changes}

    def bare(self, host: str, key: str, **changes: Any) -> None:
        """Take the addresses of a port away."""
        self.change(host, key, **{"addresses": [], "gids": table(NETDEV[key], []), **changes})

    def unplug(self, host: str, key: str) -> None:
        self.bare(host, key, state="DOWN", phys_state="Disabled", mtu=1500, active_mtu=1024)

    def state(self, host: str, **stated: Any) -> None:
        """Write something into the inventory."""
        self.stated[host] = {**self.stated.get(host, {}), **stated}


def cluster(topology: str, nodes: int = 0, rails: int = 2, **fabric: Any) -> Cluster:
    """A whole cluster: rail r of the k-th cable has subnet 10.77.(2k+r).0/24, nodes are .1, .2, ...

    A node has f0 and f1, with two rails their twins too; what no cable ends at is down.
    """
    nodes = nodes or cabling.TOPOLOGIES[topology].nodes[0]
    hosts = [f"spark{number}" for number in range(1, nodes + 1)]
    cables = CABLES.get(topology) or [[(number, 0) for number in range(1, nodes + 1)]]
    made = Cluster(
        fabric={"topology": topology, "rdma": True, "mtu": 9000, "min_rails": 1, "max_rails": 0, **fabric},
        ports={host: {} for host in hosts},
        lan={host: [f"192.168.1.{number}/24"] for number, host in enumerate(hosts, 1)},
    )
    for host in hosts:
        for key in PORTS if rails == 2 else ("f0", "f1"):
            made.unplug(host, key)
    for number, ends in enumerate(cables):
        for rail in range(rails):
            for node, qsfp in ends:
                key = f"{'fF'[rail]}{qsfp}"
                hca, netdev, pci = PORTS[key]
                made.ports[f"spark{node}"][key] = port(hca, netdev, f"10.77.{2 * number + rail}.{node}/24", pci=pci)
    return made


def told(survey: Facts, *severities: str) -> list[tuple[str, str]]:
    """(id, host) of the findings of some severities, errors if none is named."""
    wanted = severities or ("error",)
    return [(finding["id"], finding["host"]) for finding in survey["findings"] if finding["severity"] in wanted]


def joined(survey: Facts) -> set[frozenset[tuple[str, str]]]:
    """The pairs of (host, network device) that a survey joins by rails that work, as far as is known."""
    return {
        frozenset((end["host"], end["netdev"]) for end in link["ends"])
        for link in survey["links"]
        if link["state"] not in ("dropped", "failed")
    }
