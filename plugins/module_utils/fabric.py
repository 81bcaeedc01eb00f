# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Fabric facts of one node: RDMA ports, GID tables and network devices, read from sysfs and the output of tools.

How ranks are joined over them is decided in `cabling`.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_MAPPED = "0000:0000:0000:0000:0000:ffff:"
# systemd's names tell the PCI function: enP2p1s0f0np0 is domain 2, bus 1, slot 0, function 0.
_NETDEV = re.compile(r"(?:en|roce)(?:P(?P<domain>\d+))?p(?P<bus>\d+)s(?P<slot>\d+)(?:f(?P<function>\d+))?(?:np\d+)?")
_PCI = re.compile(r"(?P<domain>[0-9a-f]{4,}):(?P<bus>[0-9a-f]{2}):(?P<slot>[0-9a-f]{2})\.(?P<function>[0-9a-f])")


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table; `ipv4` is set for an IPv4-mapped GID (::ffff:a.b.c.d)."""

    index: int
    gid: str
    type: str
    netdev: str
    ipv4: Optional[str]


@dataclass(frozen=True)
class Port:
    """One RDMA port and the network device below it.

    `state` and `phys_state` are sysfs words such as ACTIVE and LinkUp; `rate_gbps` is in Gb/s; `mtu` (of the network
    device) and `active_mtu` (of RDMA) in bytes. 0 and "" mean unknown. `addresses` are IPv4, as a.b.c.d/prefix.
    """

    hca: str
    port: int
    pci: str
    netdev: str
    state: str
    phys_state: str
    link_layer: str
    rate_gbps: float
    mtu: int
    active_mtu: int
    addresses: List[str]
    gids: List[Gid]


@dataclass(frozen=True)
class Interface:
    """One network device; `addresses` are IPv4, as a.b.c.d/prefix."""

    name: str
    mtu: int
    state: str
    pci: str
    addresses: List[str]


@dataclass(frozen=True)
class Node:
    """Fabric facts of a node; `management` is the device by which it is reached, `errors` what could not be read."""

    ports: List[Port]
    interfaces: List[Interface]
    management: str
    errors: List[str]

    def to_dict(self) -> Dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Outputs:
    """What `ip -j -4 address show`, `ip -j -4 route show default` and `ibv_devinfo` print; "" when there is none."""

    addresses: str
    routes: str
    devices: str = ""


def mapped_ipv4(gid: str) -> Optional[str]:
    """The IPv4 address of an IPv4-mapped GID in sysfs form, else None."""
    gid = gid.lower()
    digits = gid[len(_MAPPED) :].replace(":", "")
    if not gid.startswith(_MAPPED) or not re.fullmatch(r"[0-9a-f]{8}", digits):
        return None
    return ".".join(str(octet) for octet in bytes.fromhex(digits))


def is_roce_v2(gid_type: str) -> bool:
    """Whether a GID type is RoCE v2, in the words of sysfs (`RoCE v2`) or of show_gids (`v2`)."""
    return gid_type.strip().lower() in ("roce v2", "v2")


def pci_function(pci: str, name: str) -> Optional[Tuple[int, int, int, int]]:
    """(domain, bus, slot, function) from a PCI address, else from a predictable device name, else None."""
    found, base = _PCI.fullmatch(pci), 16
    if not found:
        found, base = _NETDEV.fullmatch(name), 10
    if not found:
        return None
    domain, bus, slot, function = (int(found[key] or "0", base) for key in ("domain", "bus", "slot", "function"))
    return domain, bus, slot, function


def active_mtus(devinfo: str) -> Dict[Tuple[str, int], int]:
    """(HCA, port) -> active MTU in bytes, from what `ibv_devinfo` prints."""
    mtus = {}
    hca, port = "", 0
    for line in devinfo.splitlines():
        key, _, value = line.strip().partition(":")
        value = value.strip()
        if key == "hca_id":
            hca = value
        elif key == "port" and value.isdigit():
            port = int(value)
        elif key == "active_mtu" and value.partition(" ")[0].isdigit():
            mtus[hca, port] = int(value.partition(" ")[0])
    return mtus


def roce_mtu(mtu: int) -> int:
    """The RDMA MTU in bytes that a RoCE port takes over a network device of some MTU (kernel: iboe_get_mtu)."""
    return max((size for size in (256, 512, 1024, 2048, 4096) if size <= mtu - 96), default=0)


class _Sysfs:
    """Reads below a root; entries may vanish, or refuse to be read, at any moment. Other trouble is collected."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.errors: List[str] = []

    def names(self, path: str) -> List[str]:
        try:
            return sorted(os.listdir(f"{self.root}/{path}"))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.errors.append(f"{self.root}/{path}: {error.strerror}")
            return []

    def read(self, path: str) -> str:
        """Text of an attribute, "" when it has none (an empty GID slot answers EINVAL)."""
        try:
            # An attribute is one page at most; open() would take twice as long, for thousands of them.
            file = os.open(f"{self.root}/{path}", os.O_RDONLY)
            try:
                return os.read(file, 4096).decode("ascii", "replace").strip()
            finally:
                os.close(file)
        except PermissionError as error:
            # One line a directory: a table has a thousand entries.
            line = f"{self.root}/{os.path.dirname(path)}: {error.strerror}"
            if line not in self.errors:
                self.errors.append(line)
            return ""
        except OSError:
            return ""

    def pci(self, path: str) -> str:
        """PCI address of the device behind a class entry, "" for a virtual one."""
        try:
            name = os.path.basename(os.readlink(f"{self.root}/{path}/device"))
        except OSError:
            return ""
        return name if _PCI.fullmatch(name) else ""


def _word(text: str) -> str:
    # sysfs writes "4: ACTIVE"
    return text.rpartition(":")[2].strip() or "unknown"


def _number(text: str) -> float:
    found = re.match(r"\d+(\.\d+)?", text)
    return float(found[0]) if found else 0.0


def _gids(sysfs: _Sysfs, directory: str) -> List[Gid]:
    """The filled entries of a port's GID table, by index; gaps and long tables are normal."""
    gids = []
    for index in sorted(int(name) for name in sysfs.names(f"{directory}/gids") if name.isdigit()):
        gid = sysfs.read(f"{directory}/gids/{index}")
        if gid and gid != _EMPTY_GID:
            kind = sysfs.read(f"{directory}/gid_attrs/types/{index}")
            netdev = sysfs.read(f"{directory}/gid_attrs/ndevs/{index}")
            gids.append(Gid(index, gid, kind, netdev, mapped_ipv4(gid)))
    return gids


def _netdev(sysfs: _Sysfs, hca: str, port: int, gids: List[Gid]) -> str:
    """The network device of an RDMA port: the driver's, else that of its GIDs, else what Soft-RoCE names."""
    names = sysfs.names(f"class/infiniband/{hca}/device/net")
    for name in names:
        # Several ports of one function are told apart by dev_port, counted from 0.
        if len(names) == 1 or sysfs.read(f"class/net/{name}/dev_port") == str(port - 1):
            return name
    owners = [gid.netdev for gid in gids if gid.netdev]
    return owners[0] if owners else sysfs.read(f"class/infiniband/{hca}/parent")


def _mappings(entries: Any) -> List[Dict[str, Any]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{json.dumps(entries)[:80]} is no list of mappings")
    return entries


def _addresses(text: str) -> Dict[str, List[str]]:
    owned: Dict[str, List[str]] = {}
    for entry in _mappings(json.loads(text.strip() or "[]")):
        infos = [info for info in _mappings(entry.get("addr_info", [])) if "local" in info]
        owned[str(entry.get("ifname", ""))] = [f"{info['local']}/{info.get('prefixlen', 32)}" for info in infos]
    return owned


def read(sysfs_root: str, outputs: Outputs, reached_at: str = "") -> Node:
    """The facts of a node. `reached_at` is the IPv4 address by which the controller reaches it, if known.

    Raises ValueError when an output is not what the command prints.
    """
    sysfs = _Sysfs(sysfs_root)
    owned, mtus = _addresses(outputs.addresses), active_mtus(outputs.devices)
    interfaces = {}
    for name in sysfs.names("class/net"):
        mtu = sysfs.read(f"class/net/{name}/mtu")
        if not mtu.isdigit():
            continue
        interfaces[name] = Interface(
            name=name,
            mtu=int(mtu),
            state=sysfs.read(f"class/net/{name}/operstate") or "unknown",
            pci=sysfs.pci(f"class/net/{name}"),
            addresses=owned.get(name, []),
        )
    ports = []
    for hca in sysfs.names("class/infiniband"):
        for number in filter(str.isdigit, sysfs.names(f"class/infiniband/{hca}/ports")):
            directory = f"class/infiniband/{hca}/ports/{number}"
            gids = _gids(sysfs, directory)
            netdev = _netdev(sysfs, hca, int(number), gids)
            interface = interfaces.get(netdev)
            ports.append(
                Port(
                    hca=hca,
                    port=int(number),
                    pci=sysfs.pci(f"class/infiniband/{hca}"),
                    netdev=netdev,
                    state=_word(sysfs.read(f"{directory}/state")),
                    phys_state=_word(sysfs.read(f"{directory}/phys_state")),
                    link_layer=sysfs.read(f"{directory}/link_layer") or "unknown",
                    rate_gbps=_number(sysfs.read(f"{directory}/rate")),
                    mtu=interface.mtu if interface else 0,
                    active_mtu=mtus.get((hca, int(number)), 0),
                    addresses=interface.addresses if interface else [],
                    gids=gids,
                )
            )
    return Node(ports, list(interfaces.values()), _management(owned, outputs.routes, reached_at), sysfs.errors)


def _management(owned: Mapping[str, List[str]], routes: str, reached_at: str) -> str:
    for name, addresses in owned.items():
        # A forwarded connection arrives at lo, which tells nothing.
        if name != "lo" and reached_at and any(address.partition("/")[0] == reached_at for address in addresses):
            return name
    return next((str(route["dev"]) for route in _mappings(json.loads(routes.strip() or "[]")) if "dev" in route), "")
