# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Fabric facts: RDMA ports and GID tables as sysfs shows them, and the choice of rail for one fabric address."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding

_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
REPAIR = "ansible-playbook site.yml -i INVENTORY --tags fabric"


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
    """One RDMA port; `state` and `phys_state` are sysfs words such as ACTIVE and LinkUp."""

    hca: str
    port: int
    state: str
    phys_state: str
    link_layer: str
    rate: str
    gids: List[Gid]


def mapped_ipv4(gid: str) -> Optional[str]:
    """The IPv4 address of an IPv4-mapped GID in sysfs form, else None."""
    try:
        mapped = ipaddress.IPv6Address(gid).ipv4_mapped
    except ValueError:
        return None
    return str(mapped) if mapped else None


def is_roce_v2(gid_type: str) -> bool:
    """Whether a GID type is RoCE v2, in the words of sysfs (`RoCE v2`) or of show_gids (`v2`)."""
    return gid_type.strip().lower() in ("roce v2", "v2")


def _read(path: str) -> Optional[str]:
    # An entry may vanish, or refuse to be read (an empty GID slot gives EINVAL), at any moment.
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return None


def _names(path: str) -> List[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _word(text: Optional[str]) -> str:
    # sysfs writes "4: ACTIVE"
    return (text or "unknown").rpartition(":")[2].strip()


def read_gids(port_dir: str) -> List[Gid]:
    """The filled entries of a port's GID table, by index; gaps and long tables are normal."""
    gids = []
    for name in sorted((name for name in _names(f"{port_dir}/gids") if name.isdigit()), key=int):
        gid = _read(f"{port_dir}/gids/{name}")
        if not gid or gid == _EMPTY_GID:
            continue
        gid_type = _read(f"{port_dir}/gid_attrs/types/{name}") or ""
        netdev = _read(f"{port_dir}/gid_attrs/ndevs/{name}") or ""
        gids.append(Gid(int(name), gid, gid_type, netdev, mapped_ipv4(gid)))
    return gids


def read_ports(sysfs_root: str) -> List[Port]:
    """Every RDMA port below a sysfs root."""
    ports = []
    base = f"{sysfs_root}/class/infiniband"
    for hca in _names(base):
        for number in _names(f"{base}/{hca}/ports"):
            directory = f"{base}/{hca}/ports/{number}"
            ports.append(
                Port(
                    hca=hca,
                    port=int(number),
                    state=_word(_read(f"{directory}/state")),
                    phys_state=_word(_read(f"{directory}/phys_state")),
                    link_layer=_read(f"{directory}/link_layer") or "unknown",
                    rate=_read(f"{directory}/rate") or "unknown",
                    gids=read_gids(directory),
                )
            )
    return ports


def read_interfaces(sysfs_root: str, addresses: List[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """Network devices with MTU, state and IPv4 addresses; `addresses` is the answer of `ip -j -4 address show`."""
    owned: Dict[str, List[str]] = {}
    for entry in addresses:
        name = str(entry.get("ifname", ""))
        owned[name] = [str(info["local"]) for info in entry.get("addr_info", []) if "local" in info]
    interfaces = []
    for name in _names(f"{sysfs_root}/class/net"):
        mtu = _read(f"{sysfs_root}/class/net/{name}/mtu")
        if mtu is None:
            continue
        interfaces.append(
            {
                "name": name,
                "mtu": int(mtu),
                "state": _read(f"{sysfs_root}/class/net/{name}/operstate") or "unknown",
                "addresses": owned.get(name, []),
            }
        )
    return interfaces


def ports_to_dicts(ports: List[Port]) -> List[Dict[str, Any]]:
    return [asdict(port) for port in ports]


def select(info: Mapping[str, Any], address: str, host: str, rdma: bool = True) -> Tuple[Dict[str, Any], List[Finding]]:
    """The rail that carries a fabric address: socket interface, MTU, HCAs in NCCL's exact form, GID index per HCA.

    With `rdma` a node without any RDMA port is a finding: NCCL would fall back to TCP without a word.
    Only an ACTIVE port with a RoCE v2 GID equal to the address, on the device that owns the address, is taken.
    """
    findings: List[Finding] = []
    owners = [entry for entry in info["interfaces"] if address in entry["addresses"]]
    if not owners:
        have = ", ".join(f"{e['name']} {'/'.join(e['addresses'])}" for e in info["interfaces"] if e["addresses"])
        findings.append(
            Finding("fabric.address", host, have or "no IPv4 address", f"{address} on a fabric port", REPAIR)
        )
        return {"address": address, "socket_interface": "", "mtu": 0, "hcas": "", "gids": {}}, findings
    owner = owners[0]
    rails: Dict[str, int] = {}
    for port in info["ports"]:
        for gid in port["gids"]:
            if gid["ipv4"] != address or not is_roce_v2(gid["type"]) or gid["netdev"] not in ("", owner["name"]):
                continue
            if port["state"] != "ACTIVE":
                found = f"{port['hca']} port {port['port']} is {port['state']}"
                findings.append(Finding("fabric.port_state", host, found, "ACTIVE", "check cable and peer"))
                continue
            rails.setdefault(f"{port['hca']}:{port['port']}", gid["index"])
    if rdma and not info["ports"]:
        needed = f"an RDMA port that carries {address}"
        findings.append(Finding("fabric.rdma", host, "no RDMA device", needed, "load the driver; check `rdma link`"))
    if info["ports"] and not rails and not findings:
        table = "; ".join(
            f"{port['hca']} {gid['index']} {gid['gid']} {gid['type']} {gid['netdev']}"
            for port in info["ports"]
            for gid in port["gids"]
        )
        needed = f"a RoCE v2 GID of {address} on {owner['name']}"
        findings.append(Finding("fabric.gid", host, table or "an empty GID table", needed, REPAIR))
    facts = {
        "address": address,
        "socket_interface": owner["name"],
        "mtu": owner["mtu"],
        # "=" asks NCCL for exact names: without it mlx5_1 would also match mlx5_11.
        "hcas": "=" + ",".join(rails) if rails else "",
        "gids": rails,
    }
    return facts, findings
