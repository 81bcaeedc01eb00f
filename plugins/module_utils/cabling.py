# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Which ports join which ranks: pure functions over the fabric facts of all nodes.

`survey` pairs ports by subnet, takes into account what probes saw, and says what every rank needs to know.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple, TypeVar

from ansible_collections.sparkwright.dsv41.plugins.module_utils.fabric import is_roce_v2, pci_function, roce_mtu
from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding

REPAIR = "ansible-playbook site.yml -i INVENTORY --tags fabric"
CONFIGURE = "set the address (spark_fabric_rails with fabric_configure: true), then " + REPAIR

T = TypeVar("T")


@dataclass(frozen=True)
class Topology:
    """How ranks are cabled. `shape`: whom a rail joins (all ranks, a pair, neighbours); `sockets`: where TCP goes."""

    nodes: Tuple[int, ...]
    shape: str
    sockets: str


# Where no port reaches every rank, TCP (rendezvous, NCCL's bootstrap) takes the LAN.
TOPOLOGIES = {
    "direct2": Topology(nodes=(2,), shape="all", sockets="rail"),
    "switch": Topology(nodes=(2, 3, 4), shape="all", sockets="rail"),
    "triangle3": Topology(nodes=(3,), shape="pairs", sockets="lan"),
    "ring4": Topology(nodes=(4,), shape="ring", sockets="lan"),
}


@dataclass(frozen=True)
class Rail:
    """One port of one rank with one address; `gids` are the indexes of its RoCE v2 GIDs of that address."""

    hca: str
    port: int
    netdev: str
    cable: str
    address: str
    network: str
    mtu: int
    active_mtu: int
    rate_gbps: float
    gids: Tuple[int, ...]
    order: Tuple[Any, ...]


@dataclass
class _Host:
    """One rank's side of the survey; `info` is None when the node gave no answer."""

    name: str
    wanted: Mapping[str, Any]
    info: Optional[Mapping[str, Any]]
    rails: List[Rail]
    defects: Dict[str, Finding]
    cables: Dict[str, str]

    @property
    def ports(self) -> Sequence[Mapping[str, Any]]:
        return self.info["ports"] if self.info else ()

    @property
    def interfaces(self) -> Sequence[Mapping[str, Any]]:
        return self.info["interfaces"] if self.info else ()

    @property
    def management(self) -> str:
        return str(self.info["management"]) if self.info else ""

    @property
    def address(self) -> str:
        """The address for sockets that the inventory states, or ""."""
        return str(self.wanted["address"])

    @property
    def pinned(self) -> List[str]:
        return [str(rail["netdev"]) for rail in self.wanted["rails"]]

    @property
    def held(self) -> str:
        """All IPv4 addresses and their network devices, for people."""
        held = "; ".join(f"{i['name']} {' '.join(i['addresses'])}" for i in self.interfaces if i["addresses"])
        return held or "no IPv4 address"

    def owner(self, address: str) -> str:
        """The network device that holds an address."""
        for interface in self.interfaces:
            if any(text.partition("/")[0] == address for text in interface["addresses"]):
                return str(interface["name"])
        return ""

    def free(self, network: str, managed: bool, taken: Set[Tuple[str, str]]) -> List[Rail]:
        """One rail a port that is in a network and not taken; the management port only if that is allowed or stated."""
        rails: Dict[str, Rail] = {}
        for rail in self.rails:
            stated = rail.netdev in self.pinned or rail.address == self.address
            allowed = managed or stated or rail.netdev != self.management
            if allowed and rail.network == network and (self.name, rail.netdev) not in taken:
                rails.setdefault(rail.netdev, rail)
        return list(rails.values())


def groups(topology: Topology, hosts: Sequence[T]) -> List[Tuple[T, ...]]:
    """The sets of hosts that each need a network of their own: all, each pair, or each two neighbours."""
    if topology.shape == "all":
        return [tuple(hosts)]
    if topology.shape == "pairs":
        return list(itertools.combinations(hosts, 2))
    return [(host, hosts[(number + 1) % len(hosts)]) for number, host in enumerate(hosts)]


def gid_table(ports: Iterable[Mapping[str, Any]]) -> str:
    """The GID tables of some ports, one entry a line."""
    rows = [
        f"{port['hca']}:{port['port']} {gid['index']:>3} {gid['gid']} {gid['ipv4'] or '-':15} {gid['type']} "
        f"{gid['netdev'] or '-'}"
        for port in ports
        for gid in port["gids"]
    ]
    return "\n".join(rows)


def parse_hcas(value: str) -> Tuple[bool, bool, List[Tuple[str, Optional[int]]]]:
    """(exclude, exact, [(name, port or None)]) of a value of NCCL_IB_HCA: `[^][=]name[:port[:rail[:plane]]],...`."""
    exclude, rest = value.startswith("^"), value.lstrip("^")
    exact, rest = rest.startswith("="), rest.lstrip("=")
    entries: List[Tuple[str, Optional[int]]] = []
    for entry in filter(None, (part.strip() for part in rest.split(","))):
        name, *numbers = entry.split(":")
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or not all(number.isdigit() for number in numbers):
            raise ValueError(f"{entry!r} is not name[:port]")
        entries.append((name, int(numbers[0]) if numbers else None))
    return exclude, exact, entries


def _cables(ports: Sequence[Mapping[str, Any]]) -> Dict[str, str]:
    """Network device -> the QSFP port it belongs to: PCIe functions that differ in their domain only share one."""
    functions = {str(p["netdev"]): pci_function(str(p["pci"]), str(p["netdev"])) for p in ports if p["netdev"]}
    slots = {found[1:3] for found in functions.values() if found}
    return {
        netdev: netdev if not found else f"f{found[3]}" if len(slots) == 1 else "{:02x}:{:02x}.{:x}".format(*found[1:])
        for netdev, found in functions.items()
    }


def _usable(text: str) -> bool:
    try:
        address = ipaddress.IPv4Interface(text)
    except ValueError:
        return False
    return not (address.is_link_local or address.is_loopback or address.network.prefixlen == 32)


def _examine(host: str, port: Mapping[str, Any], cable: str) -> Tuple[List[Rail], Optional[Finding]]:
    """The rails that a port could be, one an address, or what is wrong with it."""
    name = f"{port['hca']} ({port['netdev'] or 'no network device'})"
    addresses = [str(text) for text in port["addresses"] if _usable(str(text))]

    def defect(kind: str, found: str, needed: str, repair: str) -> Tuple[List[Rail], Finding]:
        return [], Finding(f"fabric.{kind}", host, found, needed, repair, evidence=gid_table([port]))

    if port["link_layer"] != "Ethernet":
        repair = "set the port to Ethernet with the vendor's tool (LINK_TYPE), then reboot"
        return defect("link_layer", f"{name} has link layer {port['link_layer']}", "Ethernet (RoCE)", repair)
    if port["state"] != "ACTIVE":
        holds = f" and holds {', '.join(addresses)}" if addresses else ""
        found = f"{name} is {port['state']}, {port['phys_state']}{holds}"
        return defect("port_state", found, "ACTIVE", "check the cable, and that the other end is up")
    if not addresses:
        held = ", ".join(port["addresses"]) or "no IPv4 address"
        return defect("address", f"{name} has {held}", "an IPv4 address of the fabric", CONFIGURE)
    rails = []
    function = pci_function(str(port["pci"]), str(port["netdev"])) or (1 << 16, 0, 0, 0)
    versions: Set[str] = set()
    for text in addresses:
        interface = ipaddress.IPv4Interface(text)
        mine = [
            gid for gid in port["gids"] if gid["ipv4"] == str(interface.ip) and gid["netdev"] in ("", port["netdev"])
        ]
        versions.update(str(gid["type"]) for gid in mine)
        gids = tuple(int(gid["index"]) for gid in mine if is_roce_v2(str(gid["type"])))
        if gids:
            rails.append(
                Rail(
                    hca=str(port["hca"]),
                    port=int(port["port"]),
                    netdev=str(port["netdev"]),
                    cable=cable,
                    address=str(interface.ip),
                    network=str(interface.network),
                    mtu=int(port["mtu"]),
                    active_mtu=int(port["active_mtu"]),
                    rate_gbps=float(port["rate_gbps"]),
                    gids=gids,
                    order=(function[0], function[1:], str(port["netdev"])),
                )
            )
    if not rails and versions:
        found = f"{name} has the GID of {', '.join(addresses)} as {', '.join(sorted(versions))} only"
        return defect(
            "gid_type", found, "RoCE v2", "cma_roce_mode or the driver's default_roce_mode must allow RoCE v2"
        )
    if not rails:
        found = f"{name} has no GID of {', '.join(addresses)}"
        repair = f"ip link set {port['netdev']} down && ip link set {port['netdev']} up; then {REPAIR}"
        return defect("gid", found, f"a RoCE v2 GID of the address on {port['netdev']}", repair)
    return rails, None


def _host(wanted: Mapping[str, Any], info: Optional[Mapping[str, Any]]) -> _Host:
    host = _Host(str(wanted["host"]), wanted, info, [], {}, {})
    host.cables = _cables(host.ports)
    for port in host.ports:
        netdev = str(port["netdev"])
        rails, defect = _examine(host.name, port, host.cables.get(netdev, ""))
        if host.pinned and netdev not in host.pinned:
            continue
        if defect:
            host.defects[netdev or str(port["hca"])] = defect
        stated = [str(rail.get("address", "")) for rail in wanted["rails"] if rail["netdev"] == netdev]
        asked = {text.partition("/")[0] for text in stated} - {""}
        host.rails += [rail for rail in rails if not asked or rail.address in asked]
    _hint_misplaced(host)
    rank = {name: number for number, name in enumerate(host.pinned)}
    host.rails.sort(key=lambda rail: (rail.address != host.address, rank.get(rail.netdev, 0), rail.order))
    return host


def _hint_misplaced(host: _Host) -> None:
    """Say where the address may be that a port lacks: on lo, or on a port that is down, the cable being in this one."""
    bare = [key for key, defect in host.defects.items() if defect.id == "fabric.address" and key != host.management]
    for port in host.ports if bare else ():
        netdev = str(port["netdev"])
        defect = host.defects.get(netdev)
        if defect and defect.id == "fabric.port_state" and any(_usable(str(text)) for text in port["addresses"]):
            repair = f"move the cable, or the address to {' or '.join(bare)}, which is ACTIVE and has none"
            host.defects[netdev] = replace(defect, repair=repair)
    texts = [str(text) for each in host.interfaces if each["name"] == "lo" for text in each["addresses"]]
    on_lo = [text for text in texts if not text.startswith("127.")]
    for key in bare if on_lo else ():
        repair = f"take {', '.join(on_lo)} off lo, where NCCL cannot bind it; {CONFIGURE}"
        host.defects[key] = replace(host.defects[key], repair=repair)


def _explicit(host: _Host, topology: Topology, rdma: bool) -> List[Finding]:
    """What is wrong with values that the inventory states."""
    found: List[Finding] = []
    for stated in host.wanted["rails"] if rdma else ():
        netdev, address = str(stated["netdev"]), str(stated.get("address", "")).partition("/")[0]
        if netdev in host.defects or any(rail.netdev == netdev for rail in host.rails):
            continue
        ports = ", ".join(str(port["netdev"] or port["hca"]) for port in host.ports) or "no RDMA port"
        if netdev in host.cables:
            seen, needed = f"{netdev} does not hold {address}", f"{address} of spark_fabric_rails"
        else:
            seen, needed = f"no RDMA port on {netdev}; found {ports}", "a port of spark_fabric_rails"
        found.append(Finding("fabric.address", host.name, seen, needed, CONFIGURE))
    address = host.address
    if not address or any(rail.address == address for rail in host.rails):
        return found
    owner = host.owner(address)
    if owner == "lo":
        needed = f"spark_fabric_address {address} on a port (NCCL cannot bind an address of lo)"
        found.append(Finding("fabric.address", host.name, f"{address} is on lo", needed, CONFIGURE, evidence=host.held))
    elif not owner:
        needed = f"spark_fabric_address {address}"
        found.append(Finding("fabric.address", host.name, host.held, needed, CONFIGURE))
    elif topology.sockets == "rail" and rdma:
        defect = host.defects.get(owner)
        seen = defect.found if defect else f"{address} is on {owner}, which has no usable RDMA port"
        kind = defect.id if defect else "fabric.address"
        needed = f"spark_fabric_address {address} on an ACTIVE RoCE port"
        repair = defect.repair if defect else "name an address of a fabric port, or leave spark_fabric_address out"
        evidence = gid_table(host.ports) or host.held
        found.append(Finding(kind, host.name, seen, needed, repair, evidence=evidence))
    return found


def _shared(group: Sequence[_Host], managed: bool, taken: Set[Tuple[str, str]]) -> List[List[Rail]]:
    """Rails of a group: for each network that all members are in, the k-th port of each; a port is used once.

    Networks are in the order of the first member's ports; those of stated addresses come first.
    """
    stated = {rail.network for host in group for rail in host.rails if rail.address == host.address}
    networks = dict.fromkeys(rail.network for rail in group[0].rails)
    found = []
    for network in sorted(networks, key=lambda network: network not in stated):
        for rails in zip(*(host.free(network, managed, taken) for host in group)):
            # Two hosts that hold the same address are not joined by it.
            if len({rail.address for rail in rails}) == len(rails):
                taken |= {(host.name, rail.netdev) for host, rail in zip(group, rails)}
                found.append(list(rails))
    return found


class _Link:
    """One rail between two ranks, with what is wrong with it."""

    def __init__(self, rail: int, group: Tuple[str, ...], ends: Sequence[Tuple[str, Rail]]) -> None:
        self.rail, self.group, self.ends = rail, group, tuple(ends)
        self.state = "unproven"
        self.findings: List[Finding] = []

    @property
    def broken(self) -> List[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    def end(self, host: str) -> Rail:
        return dict(self.ends)[host]

    def check_mtu(self, wanted: int) -> None:
        (low_host, low), (high_host, high) = sorted(self.ends, key=lambda end: end[1].mtu)
        if low.mtu != high.mtu:
            mtu = max(high.mtu, wanted)
            needed = f"{mtu} ({high_host} {high.netdev} at the other end has {high.mtu})"
            self._mtu("mtu", low_host, low, str(low.mtu), needed, mtu)
        for host, end in self.ends:
            if low.mtu == high.mtu < wanted:
                self._mtu("mtu", host, end, str(end.mtu), str(wanted), wanted, "warning")
            if 0 < end.active_mtu < roce_mtu(end.mtu):
                needed = f"{roce_mtu(end.mtu)}, which MTU {end.mtu} allows"
                self._mtu("active_mtu", host, end, f"{end.active_mtu} for RDMA", needed, wanted, "warning")

    def _mtu(self, kind: str, host: str, end: Rail, seen: str, needed: str, mtu: int, severity: str = "error") -> None:
        repair = f"ip link set {end.netdev} mtu {mtu} (lasting: spark_fabric_rails with fabric_configure: true)"
        self.findings.append(Finding(f"fabric.{kind}", host, f"{end.netdev} has MTU {seen}", needed, repair, severity))

    def to_dict(self, chosen: Mapping[Tuple[str, str], int]) -> Dict[str, Any]:
        keys = ("hca", "port", "netdev", "cable", "address", "mtu", "active_mtu", "rate_gbps")
        return {
            "rail": self.rail,
            "network": self.ends[0][1].network,
            "state": self.state,
            "reason": "; ".join(dict.fromkeys(finding.found for finding in self.broken)),
            "ends": [
                {"host": host, **{k: getattr(end, k) for k in keys}, "gid_index": chosen[host, end.netdev]}
                for host, end in self.ends
            ],
        }


def _recognise(hosts: Sequence[_Host]) -> str:
    """The topology that the networks show, and what to write for it."""
    joined = {frozenset((one.name, two.name)) for one, two in itertools.combinations(hosts, 2) if _joins((one, two))}
    for name, topology in TOPOLOGIES.items():
        if len(hosts) not in topology.nodes:
            continue
        if topology.shape == "all":
            if _joins(hosts):
                return f"spark_fabric_topology: {name}"
            continue
        names = [host.name for host in hosts]
        for order in itertools.permutations(names[1:]):
            ring = [names[0], *order]
            if all(frozenset(group) in joined for group in groups(topology, ring)):
                hint = "" if ring == names else f", ranks in the order {', '.join(ring)}"
                return f"spark_fabric_topology: {name}{hint}"
    return ""


def _joins(group: Sequence[_Host]) -> bool:
    return bool(_shared(group, False, set()))


def survey(
    fabric: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    infos: Mapping[str, Optional[Mapping[str, Any]]],
    probes: Optional[Mapping[str, Sequence[Mapping[str, Any]]]] = None,
) -> Dict[str, Any]:
    """Pair the ports of all ranks: `ranks` and `ports` by host, `links` (rails between two ranks), `findings`.

    `fabric` is that part of the plan: topology, rdma, mtu, min_rails, max_rails (0: no limit). Each of `ranks` has
    host, address ("": to be found), rails (stated in the inventory), gid_index (a pin, or None), argv and env. `infos`
    maps host to the answer of fabric_info (None: there is none), `probes` maps host to the results of fabric_probe.
    """
    topology, rdma = TOPOLOGIES[fabric["topology"]], bool(fabric["rdma"])
    hosts = [_host(rank, infos.get(str(rank["host"]))) for rank in ranks]
    found: List[Finding] = []
    for host in hosts:
        found += _node_findings(host, topology, rdma)
    links: List[_Link] = []
    taken: Set[Tuple[str, str]] = set()
    for group in groups(topology, hosts) if rdma else []:
        rails = _shared(group, False, taken) or _shared(group, True, taken)
        names = tuple(host.name for host in group)
        first = 1 + max((link.rail for link in links), default=-1)
        for number, ends in enumerate(rails[: fabric["max_rails"] or None], first):
            links += [_Link(number, names, pair) for pair in itertools.combinations(zip(names, ends), 2)]
        found += _group_findings(hosts, group, rails, fabric)
    for link in links:
        link.check_mtu(int(fabric["mtu"]))
    found += _probe_findings(links, probes or {})
    found += _drop(links, max(1, int(fabric["min_rails"])), {host.address for host in hosts})
    if rdma:
        found += _cabling_findings(hosts, topology)
        found += [
            finding
            for finding in _idle_findings(hosts, links, topology, int(fabric["max_rails"]))
            if replace(finding, severity="error") not in found
        ]
    facts, chosen, more = _facts(hosts, links, topology)
    found += more + [finding for link in links for finding in link.findings]
    return {
        "topology": fabric["topology"],
        "ranks": facts,
        "links": [link.to_dict(chosen) for link in links],
        "ports": {host.name: _port_roles(host, links) for host in hosts},
        "findings": [finding.to_dict() for finding in dict.fromkeys(found)],
    }


def _node_findings(host: _Host, topology: Topology, rdma: bool) -> List[Finding]:
    if host.info is None:
        return [Finding("node.unreachable", host.name, "no answer", "SSH access", "check power and network")]
    errors = host.info["errors"]
    found = [
        Finding("fabric.sysfs", host.name, error, "readable", "run as root (become); check that sysfs is mounted")
        for error in errors
    ]
    if rdma and not host.ports and not errors:
        repair = "load the driver (mlx5_ib); check `rdma link`"
        found.append(Finding("fabric.rdma", host.name, "no RDMA device", "an HCA", repair))
    return found + _explicit(host, topology, rdma)


def _where(host: _Host) -> str:
    rails = ", ".join(f"{rail.netdev} {rail.address} of {rail.network}" for rail in host.rails)
    return rails or f"no usable port; {host.held}"


def _group_findings(
    hosts: Sequence[_Host], group: Sequence[_Host], rails: Sequence[Sequence[Rail]], fabric: Mapping[str, Any]
) -> List[Finding]:
    """What keeps a group of hosts from having enough rails, and what is odd about those it has."""
    found: List[Finding] = []
    names = ", ".join(host.name for host in group)
    for number, host in enumerate(group):
        mine = [rail[number] for rail in rails]
        for rail in mine:
            if rail.netdev == host.management and rail.address != host.address:
                seen = f"{rail.netdev} is the management port and the only one that joins {names}"
                repair = "cable and address a fabric port, or state spark_fabric_address to use this one"
                needed = "a port of its own"
                found.append(Finding("fabric.management", host.name, seen, needed, repair, "warning", _where(host)))
                found += [replace(defect, severity="warning") for defect in host.defects.values()]
        for network in dict.fromkeys(rail.network for rail in mine):
            same = [rail.netdev for rail in mine if rail.network == network]
            if len(same) > 1:
                needed = "one subnet a rail (Linux answers for either address on either port)"
                seen = f"{' and '.join(same)} are both in {network}"
                found.append(Finding("fabric.same_subnet", host.name, seen, needed, CONFIGURE, "warning"))
    wanted = max(1, int(fabric["min_rails"]))
    if len(rails) >= wanted:
        return found
    silent = not all(host.ports for host in group)
    for host in group:
        # Where a node tells nothing, what is wrong with the others may be nothing but that.
        if not silent or not host.rails:
            found += host.defects.values()
    if silent:
        return found
    suits = _recognise(hosts)
    repair = f"set {suits}" if suits and suits != f"spark_fabric_topology: {fabric['topology']}" else CONFIGURE
    seen = f"{len(rails)} networks that join {names}"
    needed = f"{wanted}, for topology {fabric['topology']}"
    evidence = "\n".join(f"{host.name}: {_where(host)}" for host in group)
    return [*found, Finding("fabric.topology", group[-1].name, seen, needed, repair, evidence=evidence)]


def _cabling_findings(hosts: Sequence[_Host], topology: Topology) -> List[Finding]:
    """Ports whose addresses belong to two peers, where each two have a cable: one cannot join both."""
    found: List[Finding] = []
    if topology.shape == "all" or _joins(hosts):
        return found
    reached: Dict[Tuple[str, str], List[str]] = {}
    for group in groups(topology, hosts):
        for rails in _shared(group, False, set()):
            for host, peer, rail in zip(group, reversed(group), rails):
                peers = reached.setdefault((host.name, rail.cable), [])
                peers += [peer.name] if peer.name not in peers else []
    for (name, cable), peers in reached.items():
        if len(peers) > 1:
            seen = f"{name} reaches {' and '.join(peers)} through the same port {cable}"
            repair = "give each cable its own port and its own subnets, at both ends; then " + REPAIR
            found.append(Finding("fabric.cabling", name, seen, "one port per peer", repair))
    return found


def _probe_findings(links: Sequence[_Link], probes: Mapping[str, Sequence[Mapping[str, Any]]]) -> List[Finding]:
    """Put what the probes saw into the links; findings about the probes themselves are returned."""
    found: List[Finding] = []
    for host, results in probes.items():
        for result in results:
            if result["kind"] == "tool":
                repair = f"apt-get install {result['package']}"
                seen = f"no {result['tool']}, so RDMA is not proven"
                found.append(Finding("fabric.probe_tool", host, seen, str(result["tool"]), repair, "warning"))
                continue
            link = next(
                (x for x in links if x.rail == result["rail"] and {host, result["peer"]} == set(dict(x.ends))), None
            )
            if link is None:
                continue
            if result["ok"]:
                link.state = "ok"
            else:
                link.findings.append(_probe_finding(host, link, result))
    return found


def _probe_finding(host: str, link: _Link, result: Mapping[str, Any]) -> Finding:
    peer = str(result["peer"])
    near, far = link.end(host), link.end(peer)
    path = f"{near.netdev} {near.address} to {peer} {far.netdev} {far.address}"
    detail, evidence = str(result["detail"]), str(result.get("evidence", ""))
    if result["kind"] == "ping":
        repair = "check that this cable ends at that port; then address, prefix and MTU of both ends"
        return Finding("fabric.path", host, f"{path}: {detail}", "an answer", repair, evidence=evidence)
    if result["kind"] == "bandwidth":
        repair = "check MTU 9000, cable, and that nothing else uses the link"
        needed = f"{result['needed_gbps']:.1f} Gb/s or more, of a link of {near.rate_gbps:g} Gb/s"
        return Finding("fabric.bandwidth", host, f"{path}: {detail}", needed, repair, "warning", evidence)
    repair = f"look at both GID tables (ansible-playbook playbooks/doctor.yml -i INVENTORY), then {REPAIR}"
    return Finding(
        "fabric.rdma_path", host, f"{near.hca} {path}: {detail}", "an RDMA pingpong", repair, evidence=evidence
    )


def _drop(links: Sequence[_Link], min_rails: int, stated: Set[str]) -> List[Finding]:
    """Leave failing rails out where enough others are left, and say so; what broke them is a warning then.

    A rail of a `stated` address stays: sockets go over it.
    """
    found: List[Finding] = []
    for group in dict.fromkeys(link.group for link in links):
        rails: Dict[int, List[_Link]] = {}
        for link in links:
            if link.group == group:
                rails.setdefault(link.rail, []).append(link)
        bad = [number for number, members in rails.items() if any(link.broken for link in members)]
        enough = len(rails) - len(bad) >= min_rails
        for number in bad:
            spare = enough and not any(end.address in stated for link in rails[number] for _, end in link.ends)
            reasons = [finding.found for link in rails[number] for finding in link.broken]
            for link in rails[number]:
                link.state = "dropped" if spare else "failed" if link.broken else link.state
                if spare:
                    link.findings = [replace(finding, severity="warning") for finding in link.findings]
            if spare:
                seen = f"rail {number} ({rails[number][0].ends[0][1].network}) fails and is left out: {reasons[0]}"
                needed = f"{len(rails)} rails; {len(rails) - len(bad)} are used, min_rails is {min_rails}"
                repair = "repair the rail, then ansible-playbook playbooks/restart.yml -i INVENTORY"
                found.append(Finding("fabric.rail_dropped", group[0], seen, needed, repair, "warning"))
    return found


def _idle_findings(hosts: Sequence[_Host], links: Sequence[_Link], topology: Topology, max_rails: int) -> List[Finding]:
    """Ports that carry nothing although they could: half a cable, a lost end of a rail, an address of no one else."""
    found: List[Finding] = []
    networks = [(host.name, rail.network) for host in hosts for rail in host.rails]
    for host in hosts:
        used = {end.netdev: end for link in links for name, end in link.ends if name == host.name}
        cables = {end.cable: netdev for netdev, end in used.items()}
        most = max_rails * sum(host in group for group in groups(topology, hosts))
        for port in () if most and len(used) >= most else host.ports:
            netdev = str(port["netdev"])
            cable, defect = host.cables.get(netdev, ""), host.defects.get(netdev or str(port["hca"]))
            pinned = netdev in host.pinned
            if netdev in used or (host.pinned and not pinned) or netdev == host.management:
                continue
            held = [text for text in port["addresses"] if _usable(str(text))]
            mine = {str(ipaddress.IPv4Interface(text).network) for text in held}
            why = defect.found if defect else f"no other rank is in the network of {', '.join(held)}"
            if cable in cables:
                seen = f"only {cables[cable]} carries traffic of cable {cable}, {netdev} does not: {why}"
                needed = "both PCIe functions of the cable, each with a subnet of its own at both ends"
                repair = defect.repair if defect else CONFIGURE
                found.append(Finding("fabric.half", host.name, seen, needed, repair, "warning"))
            elif defect and (pinned or any(name != host.name and network in mine for name, network in networks)):
                found.append(replace(defect, severity="warning"))
            elif not defect:
                repair = "nothing, if its peer is no part of the inventory; else add the peer or correct the address"
                seen = f"{netdev} is up, and {why}"
                severity = "warning" if pinned else "info"
                found.append(Finding("fabric.stray", host.name, seen, "a peer in the inventory", repair, severity))
    return found


def _gid_index(host: _Host, rails: Sequence[Rail]) -> Tuple[Optional[int], List[Finding]]:
    """The one GID index of a rank, None where NCCL shall choose; a pin must be right on every HCA."""
    env = {name: str(value) for name, value in host.wanted["env"].items()}
    literal = env.get("NCCL_IB_GID_INDEX", "{")
    pins = [str(pin) for pin in (host.wanted["gid_index"], None if "{" in literal else literal) if pin is not None]
    needed = any("{gid_index}" in str(text) for text in [*host.wanted["argv"], *env.values()])
    if not rails or not (pins or needed):
        return None, []
    table = gid_table(host.ports)
    valid = "; ".join(f"{rail.hca} {', '.join(map(str, rail.gids))}" for rail in rails)
    found = []
    for pin in pins:
        wrong = ", ".join(f"{rail.address} on {rail.hca}" for rail in rails if pin not in map(str, rail.gids))
        if wrong:
            seen = f"GID index {pin} is pinned; it is no RoCE v2 GID of {wrong}"
            repair = "leave the pin out (spark_fabric_gid_index, NCCL_IB_GID_INDEX): NCCL chooses; or take a valid one"
            needs = f"an index of: {valid}"
            found.append(Finding("fabric.gid_index", host.name, seen, needs, repair, evidence=table))
    if pins:
        return int(pins[0]) if pins[0].isdecimal() else None, found
    common = set(rails[0].gids).intersection(*(rail.gids for rail in rails))
    if common:
        return min(common), []
    repair = (
        "give every rail the same number of addresses (no IPv6), so that indexes agree; or use one rail (max_rails: 1)"
    )
    seen = f"no common GID index: {valid}"
    needs = "one index for all HCAs of the rank"
    return None, [Finding("fabric.gid_index", host.name, seen, needs, repair, evidence=table)]


def _lan(hosts: Sequence[_Host]) -> Dict[str, str]:
    """Host -> its address in one network that all are in; {} where there is none.

    A stated address decides, then the order of the first host's devices, the management port first.
    """
    sides: List[Dict[str, str]] = []
    for host in hosts:
        side: Dict[str, str] = {}
        for interface in sorted(host.interfaces, key=lambda interface: interface["name"] != host.management):
            for text in filter(_usable, map(str, interface["addresses"])):
                address = text.partition("/")[0]
                if interface["name"] != "lo" and host.address in ("", address):
                    side.setdefault(str(ipaddress.IPv4Interface(text).network), address)
        sides.append(side)
    for network in sides[0]:
        addresses = [side[network] for side in sides if network in side]
        # A bridge of containers has the same address on every host, and joins none.
        if len(set(addresses)) == len(hosts):
            return {host.name: address for host, address in zip(hosts, addresses)}
    return {}


def _facts(
    hosts: Sequence[_Host], links: Sequence[_Link], topology: Topology
) -> Tuple[Dict[str, Dict[str, Any]], Dict[Tuple[str, str], int], List[Finding]]:
    """What each rank needs to know, and the GID index of each port."""
    found: List[Finding] = []
    facts: Dict[str, Dict[str, Any]] = {}
    chosen: Dict[Tuple[str, str], int] = {}
    lan = _lan(hosts)
    for host in hosts:
        mine = {
            end.netdev: (link.rail, end)
            for link in sorted(links, key=lambda link: link.rail)
            if link.state != "dropped"
            for name, end in link.ends
            if name == host.name
        }
        rails = sorted(mine.values(), key=lambda item: item[0] if topology.shape == "all" else item[1].order)
        index, more = _gid_index(host, [rail for _, rail in rails])
        found += more
        chosen.update({(n, e.netdev): e.gids[0] for link in links for n, e in link.ends if n == host.name})
        if index is not None:
            chosen.update({(host.name, netdev): index for netdev in mine})
        address = host.address
        if not address:
            address = rails[0][1].address if topology.sockets == "rail" and rails else lan.get(host.name, "")
        if not address and all(each.interfaces for each in hosts) and (topology.sockets == "lan" or not links):
            needed = "an address in one network of all ranks, for the sockets of NCCL and the rendezvous"
            repair = "join all ranks by a LAN, or state spark_fabric_address"
            found.append(Finding("fabric.socket", host.name, host.held, needed, repair))
        interface = host.owner(address)
        facts[host.name] = {
            "host": host.name,
            "address": address,
            "socket_interface": interface,
            # "=" asks NCCL for exact names: without it mlx5_1 would also match mlx5_11.
            "hcas": "=" + ",".join(f"{rail.hca}:{rail.port}" for _, rail in rails) if rails else "",
            "hca_names": ",".join(rail.hca for _, rail in rails),
            "gid_index": "" if index is None else str(index),
            "rails": [
                {
                    "rail": number,
                    **{k: getattr(rail, k) for k in ("hca", "port", "netdev", "cable", "address", "network", "mtu")},
                    "gid_index": chosen[host.name, rail.netdev],
                }
                for number, rail in rails
            ],
            "paths": {},
        }
        found += _env_findings(host, facts[host.name])
    for one, two in itertools.permutations(facts, 2):
        joined = [x for x in links if set(dict(x.ends)) == {one, two} and x.state not in ("dropped", "failed")]
        near, far = facts[one]["address"], facts[two]["address"]
        if joined:
            near, far = joined[0].end(one).address, joined[0].end(two).address
        facts[one]["paths"][two] = {"local": near, "remote": far}
    head = hosts[0].name
    for each in facts.values():
        each["head_address"] = facts[head]["address"]
        each["from_head"] = each["paths"].get(head, {"local": each["address"], "remote": each["address"]})
    return facts, chosen, found


def _env_findings(host: _Host, facts: Mapping[str, Any]) -> List[Finding]:
    """What is wrong with fabric variables that recipe or inventory state as they are."""
    found: List[Finding] = []

    def wrong(name: str, value: str, seen: str, needed: str) -> None:
        repair = f"leave {name} out of recipe overrides, or set it to what is needed"
        found.append(Finding("fabric.env", host.name, f"{name}={value} {seen}", needed, repair))

    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = str(host.wanted["env"].get(name, "{"))
        interface = facts["socket_interface"]
        if "{" not in value and interface:
            # Gloo knows nothing but exact names.
            exclude, exact = value.startswith("^"), "=" in value[:2] or name.startswith("GLOO")
            names = value.lstrip("^=").split(",")
            matched = any(interface == word if exact else interface.startswith(word) for word in names if word)
            if matched == exclude:
                wrong(name, value, f"does not choose {interface}", f"{interface}, which holds {facts['address']}")
    value = str(host.wanted["env"].get("NCCL_IB_HCA", "{"))
    if "{" not in value and facts["hcas"]:
        try:
            exclude, exact, entries = parse_hcas(value)
        except ValueError as error:
            wrong("NCCL_IB_HCA", value, f"cannot be read: {error}", facts["hcas"])
            return found

        def listed(port: Mapping[str, Any]) -> bool:
            return not entries or exclude != any(
                (port["hca"] == hca if exact else str(port["hca"]).startswith(hca)) and number in (None, port["port"])
                for hca, number in entries
            )

        # NCCL passes over ports that are not up.
        taken = [f"{port['hca']}:{port['port']}" for port in host.ports if port["state"] == "ACTIVE" and listed(port)]
        rails = {f"{rail['hca']}:{rail['port']}" for rail in facts["rails"]}
        if not taken or not set(taken) <= rails:
            needed = f"rails of this rank: {facts['hcas']}"
            wrong("NCCL_IB_HCA", value, f"chooses {', '.join(taken) or 'no port'}", needed)
    return found


def _port_roles(host: _Host, links: Sequence[_Link]) -> List[Dict[str, Any]]:
    """Every RDMA port of a host, for people: what it is used for, or why not."""
    used = {end.netdev for link in links if link.state != "dropped" for name, end in link.ends if name == host.name}
    roles = []
    for port in host.ports:
        netdev = str(port["netdev"])
        defect = host.defects.get(netdev or str(port["hca"]))
        role = "rail" if netdev in used else "management" if netdev == host.management else "unused"
        keys = ("hca", "netdev", "state", "addresses", "mtu")
        roles.append(
            {
                **{key: port[key] for key in keys},
                "cable": host.cables.get(netdev, ""),
                "role": role,
                "note": defect.found if defect else "",
            }
        )
    return roles


def survey_plan(
    plan: Mapping[str, Any],
    reads: Mapping[str, Mapping[str, Any]],
    probed: Optional[Mapping[str, Mapping[str, Any]]] = None,
) -> Dict[str, Any]:
    """`survey` for a plan, over the results that Ansible registered of fabric_info and fabric_probe, by host."""
    infos: Dict[str, Optional[Mapping[str, Any]]] = {}
    for host, result in reads.items():
        if "ports" in result:
            infos[host] = result
        elif not result.get("unreachable"):
            why = str(result.get("msg", "fabric_info gave no answer"))
            infos[host] = {"ports": [], "interfaces": [], "management": "", "errors": [why]}
    results = {host: result.get("results", []) for host, result in (probed or {}).items()}
    return survey(plan["fabric"], plan["ranks"], infos, results)


def probe_plan(surveyed: Mapping[str, Any], host: str, first_port: int) -> List[Dict[str, Any]]:
    """What fabric_probe does on a host: for each rail to each peer its end, the peer's, and the TCP port both use."""
    plan = []
    for number, link in enumerate(surveyed["links"]):
        ends = {end["host"]: end for end in link["ends"]}
        if host not in ends or link["state"] in ("failed", "dropped"):
            continue
        mine = ends.pop(host)
        ((peer, other),) = ends.items()
        plan.append(
            {
                **{key: mine[key] for key in ("netdev", "hca", "port", "gid_index", "mtu", "rate_gbps")},
                "path_mtu": min((end["active_mtu"] for end in link["ends"] if end["active_mtu"]), default=1024),
                "rail": link["rail"],
                "peer": peer,
                "local": mine["address"],
                "remote": other["address"],
                "serves": link["ends"][0]["host"] == host,
                "tcp_port": int(first_port) + number,
            }
        )
    return plan
