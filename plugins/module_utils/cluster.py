# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The inventory variables of a cluster: names, types, defaults, and the checks that need no host."""

from __future__ import annotations

import difflib
import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from ansible_collections.sparkwright.dsv41.plugins.module_utils import zfs
from ansible_collections.sparkwright.dsv41.plugins.module_utils.cabling import TOPOLOGIES

REQUIRED = object()
# How workers come to have the weights; files of the role weight_sync have these names.
WEIGHT_SYNC = ("auto", "rsync", "nfs", "zfs", "local")


@dataclass(frozen=True)
class Variable:
    """One `spark_*` variable; `check` says what is wrong with a value, or returns None."""

    kind: str
    default: Any
    check: Callable[[Any], Optional[str]]
    per_host: bool = False


def _text(value: Any) -> Optional[str]:
    return None if isinstance(value, str) else "needed a string"


def _name(value: Any) -> Optional[str]:
    if isinstance(value, str) and re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", value):
        return None
    return "needed lower-case letters, digits and inner hyphens"


def _port(value: Any) -> Optional[str]:
    if not re.fullmatch(r"[0-9]{4,5}", str(value)) or not 1024 <= int(value) <= 65535:
        return "needed a port from 1024 to 65535"
    return None


def _address(value: Any) -> Optional[str]:
    try:
        address = ipaddress.IPv4Address(str(value))
    except ValueError:
        return "needed an IPv4 address"
    if address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
        return "needed a unicast IPv4 address"
    return None


def _fabric_address(value: Any) -> Optional[str]:
    problem = _address(value)
    if problem is None and (ipaddress.IPv4Address(str(value)).is_loopback or str(value) == "0.0.0.0"):
        return "needed the address of a fabric port, not loopback or any"
    return problem


def directory(value: Any) -> Optional[str]:
    """What is wrong with a directory of a node; such names are safe in every file that we write."""
    if isinstance(value, str) and re.fullmatch(r"(/[A-Za-z0-9._-]+)+", value) and "/.." not in value:
        return None
    return "needed an absolute path of letters, digits, dots, hyphens and underscores"


def _dataset(value: Any) -> Optional[str]:
    if value == "" or (isinstance(value, str) and zfs.valid_dataset(value)):
        return None
    return "needed a ZFS dataset as pool/name, of letters, digits, dots, hyphens, underscores and colons"


def _directory_or_none(value: Any) -> Optional[str]:
    return None if value == "" else directory(value)


def _mapping(value: Any) -> Optional[str]:
    return None if isinstance(value, Mapping) else "needed a mapping"


def _names(value: Any) -> Optional[str]:
    if isinstance(value, list) and all(isinstance(name, str) for name in value) and len(set(value)) == len(value):
        return None
    return "needed a list of different names"


def _topology(value: Any) -> Optional[str]:
    return None if value == "" or value in TOPOLOGIES else f"needed one of {', '.join(TOPOLOGIES)}"


def _weight_sync(value: Any) -> Optional[str]:
    return None if value in WEIGHT_SYNC else f"needed one of {', '.join(WEIGHT_SYNC)}"


def _gid_index(value: Any) -> Optional[str]:
    return None if re.fullmatch(r"[0-9]{1,4}", str(value)) else "needed the index of a GID, a whole number"


def port_address(value: Any) -> Optional[str]:
    """What is wrong with the address of a fabric port, as a.b.c.d/prefix."""
    try:
        interface = ipaddress.IPv4Interface(str(value))
    except ValueError:
        return "needed an IPv4 address with its prefix, a.b.c.d/24"
    network = interface.network
    if "/" not in str(value) or network.prefixlen > 31:
        return "needed an IPv4 address with its prefix, a.b.c.d/24"
    if network.prefixlen < 31 and interface.ip in (network.network_address, network.broadcast_address):
        return f"needed the address of a host in {network}"
    return _fabric_address(interface.ip)


def _rails(value: Any) -> Optional[str]:
    if not isinstance(value, list):
        return "needed a list of {netdev: NAME, address: a.b.c.d/24}"
    for rail in value:
        if not isinstance(rail, Mapping) or not set(rail) <= {"netdev", "address"}:
            return f"{rail!r} has other keys than netdev and address"
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,15}", str(rail.get("netdev", ""))):
            return f"netdev {rail.get('netdev', '')!r} is no name of a network device"
        wrong = port_address(rail["address"]) if "address" in rail else None
        if wrong:
            return f"{rail['netdev']}: {wrong}"
    names = [str(rail["netdev"]) for rail in value]
    return None if len(set(names)) == len(names) else "a network device is named twice"


VARIABLES: Dict[str, Variable] = {
    "spark_cluster": Variable("name", REQUIRED, _name),
    "spark_recipe": Variable("name", REQUIRED, _name),
    "spark_fabric_topology": Variable("topology", "", _topology),
    "spark_fabric_address": Variable("IPv4 address", "", _fabric_address, per_host=True),
    "spark_fabric_rails": Variable("list of ports and addresses", [], _rails, per_host=True),
    "spark_fabric_gid_index": Variable("index", None, _gid_index, per_host=True),
    "spark_bind_address": Variable("IPv4 address", "127.0.0.1", _address),
    "spark_api_port": Variable("port", None, _port),
    "spark_rendezvous_port": Variable("port", None, _port),
    "spark_data_dir": Variable("directory", "/var/lib/sparkwright", directory),
    "spark_hub_endpoint": Variable("URL", "", _text),
    "spark_images": Variable("mapping of images to references", {}, _mapping),
    "spark_image_base_archive": Variable("path on the controller", "", _text),
    "spark_image_wheelhouse": Variable("directory on the controller", "", _text),
    "spark_weight_sync": Variable("auto, rsync, nfs, zfs or local", "auto", _weight_sync),
    "spark_weights_wheelhouse": Variable("directory on the controller", "", _text),
    "spark_weights_revisions": Variable("mapping of weights to commits", {}, _mapping),
    "spark_weights_paths": Variable("mapping of weights to directories", {}, _mapping),
    "spark_zfs_dataset": Variable("ZFS dataset", "", _dataset),
    "spark_weights_source_dir": Variable("directory on the head", "", _directory_or_none),
    "spark_recipe_options": Variable("list of options of the recipe", [], _names),
    "spark_recipe_overrides": Variable("mapping", {}, _mapping),
    "spark_recipe_set": Variable("mapping (for -e)", {}, _mapping),
}

# Names that users bring from older releases and other tools, and what to write instead.
REMOVED: Dict[str, str] = {
    "spark_gid_index": "nothing: NCCL chooses the GID; to pin one set spark_fabric_gid_index of the host",
    "spark_head_ip": "spark_fabric_address of the head",
    "spark_worker_ip": "spark_fabric_address of the worker",
}


def check(hosts: Mapping[str, Mapping[str, Any]]) -> Tuple[Dict[str, Any], Dict[str, Dict[str, Any]], List[str]]:
    """Split per-host `spark_*` variables into cluster values and host values; collect every problem.

    `hosts` maps each inventory host, in rank order, to its `spark_*` variables.
    """
    problems: List[str] = []
    cluster: Dict[str, Any] = {}
    stated = {name: variable.default for name, variable in VARIABLES.items() if variable.per_host}
    per_host: Dict[str, Dict[str, Any]] = {host: dict(stated) for host in hosts}
    for name in sorted({key for values in hosts.values() for key in values} - set(VARIABLES)):
        if name in REMOVED:
            problems.append(f"{name} was removed; use {REMOVED[name]}")
            continue
        near = difflib.get_close_matches(name, VARIABLES, n=1)
        problems.append(f"{name} is not a known variable" + (f"; did you mean {near[0]}?" if near else ""))
    for name, variable in VARIABLES.items():
        found = {host: values[name] for host, values in hosts.items() if name in values}
        if not found and variable.default is REQUIRED:
            problems.append(f"{name} is missing; needed {variable.kind} in inventory group_vars/all")
        for host, value in found.items():
            wrong = variable.check(value)
            if wrong and (variable.per_host or host == next(iter(found))):
                where = f"{host}: " if variable.per_host else ""
                problems.append(f"{where}{name} is {value!r}; {wrong}")
            if variable.per_host:
                per_host[host][name] = value
        if not variable.per_host:
            if len({repr(value) for value in found.values()}) > 1:
                problems.append(f"{name} differs between hosts; it belongs to the cluster (group_vars/all)")
            elif found and len(found) < len(hosts):
                only = ", ".join(found)
                problems.append(f"{name} is set for {only} only; it belongs to the cluster (group_vars/all)")
            cluster[name] = next(iter(found.values())) if found else variable.default
    held = [str(values["spark_fabric_address"]) for values in per_host.values() if values["spark_fabric_address"]]
    for address in sorted({address for address in held if held.count(address) > 1}):
        problems.append(f"spark_fabric_address {address} is used by more than one host")
    return cluster, per_host, problems
