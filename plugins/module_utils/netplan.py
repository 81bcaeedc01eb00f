# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Addresses and MTU of fabric ports by netplan: our file, what speaks against it, and how everything is put back."""

from __future__ import annotations

import fnmatch
import ipaddress
import json
import re
import shlex
from dataclasses import dataclass
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

NAME = "90-sparkwright-fabric.yaml"
# In this order: a file hides one of the same name in the directories after it.
DIRECTORIES = ("etc/netplan", "run/netplan", "lib/netplan")
# Polls in a row that must agree before an address counts as back.
STEADY = 5
_HEADER = "# Managed by Sparkwright (fabric_configure): changes are overwritten. JSON is YAML too.\n"
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,15}")
_FOREVER = 0xFFFFFFFF


@dataclass(frozen=True)
class Port:
    """A network device and what it is to have: `address` is IPv4, as a.b.c.d/prefix."""

    netdev: str
    address: str
    mtu: int = 9000


@dataclass(frozen=True)
class Address:
    """An address of a device, as a.b.c.d/prefix, and the other words `ip address replace` needs to give it again."""

    text: str
    words: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Device:
    """A network device as the kernel has it; `mtu_range` is what its driver accepts."""

    name: str
    mac: str
    up: bool
    mtu: int
    mtu_range: Tuple[int, int]
    master: str
    addresses: Tuple[Address, ...]

    @property
    def ipv4(self) -> List[str]:
        return [address.text for address in self.addresses if ":" not in address.text]


@dataclass(frozen=True)
class Problem:
    """What is wrong with a wish, and what it must be."""

    found: str
    needed: str


def render(ports: Sequence[Port]) -> str:
    """Our file: fixed addresses only, which stay while the cable or the peer is away."""
    ethernets = {
        port.netdev: {
            "renderer": "networkd",
            "dhcp4": False,
            "dhcp6": False,
            "accept-ra": False,
            # Every further address takes an index of the GID table.
            "link-local": [],
            "optional": True,
            # A direct cable has no carrier until the other end is up too, and loses it when the peer restarts.
            "ignore-carrier": True,
            "mtu": port.mtu,
            "addresses": [port.address],
        }
        for port in ports
    }
    return f"{_HEADER}{json.dumps({'network': {'version': 2, 'ethernets': ethernets}}, indent=2)}\n"


def parse(text: str) -> List[Port]:
    """The ports in a file of `render`; none where somebody else changed it beyond recognition."""
    try:
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        ethernets = json.loads("\n".join(lines))["network"]["ethernets"]
        return [
            Port(netdev, str(address), int(entry["mtu"]))
            for netdev, entry in ethernets.items()
            for address in entry["addresses"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def devices(text: str) -> Dict[str, Device]:
    """Network devices by name, from `ip -j -d address show`."""
    found = {}
    for entry in json.loads(text):
        if "ifname" not in entry:
            continue
        addresses = []
        for each in entry.get("addr_info", []):
            # What a router announced comes again by itself.
            if "local" not in each or (each.get("family") == "inet6" and each.get("dynamic")):
                continue
            words = [word for key in ("broadcast", "scope") if key in each for word in (key, str(each[key]))]
            if int(each.get("valid_life_time", _FOREVER)) < _FOREVER:
                for key, word in (("valid_life_time", "valid_lft"), ("preferred_life_time", "preferred_lft")):
                    words += [word, str(each.get(key, 0))]
            addresses.append(Address(f"{each['local']}/{each['prefixlen']}", tuple(words)))
        found[entry["ifname"]] = Device(
            name=entry["ifname"],
            mac=entry.get("permaddr") or entry.get("address", ""),
            up="UP" in entry.get("flags", []),
            mtu=int(entry.get("mtu", 0)),
            mtu_range=(int(entry.get("min_mtu") or 68), int(entry.get("max_mtu") or 65535)),
            master=entry.get("master", ""),
            addresses=tuple(addresses),
        )
    return found


def gen_mode(text: str) -> str:
    """How IPv6 link-local addresses are made, from `ip -j -d link show dev NAME`; "" where there is no IPv6."""
    return "".join(entry.get("inet6_addr_gen_mode", "") for entry in json.loads(text))


def routes(text: str) -> List[List[str]]:
    """Routes that `ip -4 route show dev NAME` prints, as words for `ip route replace`, without those of the kernel."""
    lines = [[word for word in line.split() if word not in ("linkdown", "dead")] for line in text.splitlines()]
    return [words for words in lines if words and "proto kernel" not in " ".join(words)]


def located(address: str, known: Mapping[str, Device]) -> Tuple[str, str]:
    """The device that has an IPv4 address, and the address with its prefix; "" and "" when none has it."""
    for device in known.values():
        for text in device.ipv4:
            if text.split("/")[0] == address:
                return device.name, text
    return "", ""


def problems(
    ports: Sequence[Port], known: Optional[Mapping[str, Device]], management: str, ours: Iterable[str] = ()
) -> List[Problem]:
    """Everything that is wrong with what is wanted.

    `known` are the devices of the node, None where that is another machine; `ours` are the devices that our file had
    until now, whose addresses go away.
    """
    found: List[Problem] = []
    networks: List[Tuple[str, ipaddress.IPv4Interface]] = []
    leaving = {*ours, *(port.netdev for port in ports)}
    keeper = located(management, known)[0] if known is not None else ""
    if known is not None and not keeper:
        found.append(Problem(f"no device has the management address {management}", "one that this node has"))
    seen: List[str] = []
    for port in ports:
        device = known.get(port.netdev) if known is not None else None
        if not _NAME.fullmatch(port.netdev):
            found.append(Problem(f"netdev {port.netdev!r}", "the name of a network device"))
        elif known is not None and device is None:
            names = ", ".join(sorted(set(known) - {"lo"})) or "none"
            found.append(Problem(f"no network device {port.netdev}", f"one of {names}"))
        if port.netdev in seen:
            found.append(Problem(f"{port.netdev} is listed twice", "one entry for each port"))
        seen.append(port.netdev)
        if port.netdev == "lo":
            found.append(Problem("lo is the loopback device", "a fabric port"))
        if keeper and port.netdev == keeper:
            found.append(Problem(f"{port.netdev} has the management address {management}", "a port of the fabric only"))
        if device and device.master:
            found.append(Problem(f"{port.netdev} is a part of {device.master}", "a port of its own"))
        low, high = device.mtu_range if device else (68, 65535)
        if not low <= port.mtu <= high:
            found.append(Problem(f"mtu {port.mtu} for {port.netdev}", f"{low} to {high}"))
        interface = _interface(port.address)
        if interface is None:
            found.append(Problem(f"address {port.address!r} for {port.netdev}", "IPv4 with its prefix, a.b.c.d/24"))
            continue
        why = _unusable(interface)
        if why:
            found.append(Problem(f"{port.address} for {port.netdev} {why}", "an address of a host in its network"))
            continue
        for other, theirs in networks:
            if interface.network.overlaps(theirs.network):
                both = f"{other} {theirs} and {port.netdev} {interface} are in one network"
                found.append(Problem(both, "a network for each port, as the kernel would send all by one of them"))
        networks.append((port.netdev, interface))
        for theirs_device in (known or {}).values():
            if theirs_device.name in leaving:
                continue
            for text in theirs_device.ipv4:
                theirs = ipaddress.IPv4Interface(text)
                # A host address on another device, such as an alias on lo, takes nothing but itself.
                alone = theirs.network.prefixlen == 32
                if theirs.ip == interface.ip if alone else theirs.network.overlaps(interface.network):
                    overlap = f"{port.address} for {port.netdev} is in the network of {text} of {theirs_device.name}"
                    found.append(Problem(overlap, "a network that this node does not use yet"))
    return found


def _interface(text: str) -> Optional[ipaddress.IPv4Interface]:
    # Without a prefix, and with a netmask in its place, the library would accept it.
    if not re.fullmatch(r"[0-9.]+/[0-9]{1,2}", text):
        return None
    try:
        return ipaddress.IPv4Interface(text)
    except ValueError:
        return None


def _unusable(interface: ipaddress.IPv4Interface) -> str:
    address, network = interface.ip, interface.network
    if network.prefixlen == 32:
        return "has no room for a peer"
    if (
        address.is_loopback
        or address.is_multicast
        or address.is_reserved
        or address in ipaddress.ip_network("0.0.0.0/8")
    ):
        return "is not an address for a port"
    if network.prefixlen < 31 and address == network.network_address:
        return "is the network itself"
    if network.prefixlen < 31 and address == network.broadcast_address:
        return "is the broadcast address"
    return ""


def lacking(ports: Sequence[Port], known: Mapping[str, Device]) -> List[str]:
    """What the kernel does not have yet of what is wanted."""
    missing = []
    for port in ports:
        device = known.get(port.netdev)
        if device is None:
            missing.append(f"{port.netdev} is gone")
            continue
        if not device.up:
            missing.append(f"{port.netdev} is down")
        if device.mtu != port.mtu:
            missing.append(f"{port.netdev} has MTU {device.mtu} instead of {port.mtu}")
        if port.address not in device.ipv4:
            missing.append(f"{port.netdev} has {', '.join(device.ipv4) or 'no address'} instead of {port.address}")
    return missing


def settled(samples: Sequence[Sequence[str]], expected: str, patience: int) -> str:
    """What the addresses of the management device, poll by poll, say of the address that is expected there.

    "ok": it is there, and stays; "gone" or "different": it was away for `patience` polls, and at last the device had no
    address or another one; "wait": too early to tell.
    """
    streak = 0
    exact = bool(samples) and expected in samples[-1]
    for sample in reversed(samples):
        if (expected in sample) is not exact:
            break
        streak += 1
    if exact:
        return "ok" if streak >= STEADY else "wait"
    if streak < max(patience, 1):
        return "wait"
    return "different" if samples[-1] else "gone"


def blame(message: str, scratch: str, files: Iterable[str]) -> Tuple[str, str]:
    """The file that netplan's message names, relative to `scratch`, and what it says; "" when it names none."""
    for line in message.splitlines():
        for name in files:
            before, path, after = line.partition(f"{scratch}/{name}:")
            if path:
                return name, f"{before}{after}".strip()
    # Warnings come before the error, and what it says of reloads after it.
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return "", (errors + lines + ["no reason told"])[0]


def claimed(generated: Mapping[str, str], netdev: str, mac: str = "", driver: str = "") -> bool:
    """Whether a configuration that netplan generated, text by file name, is for a device."""
    return any(
        (name.endswith((".network", ".link")) and _networkd_claims(text, netdev, mac, driver))
        or (name.endswith(".nmconnection") and _manager_claims(text, netdev, mac))
        for name, text in generated.items()
    )


def _keys(text: str) -> Dict[str, str]:
    """Values by "section.key" of a keyfile."""
    found, section = {}, ""
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line.strip("[]")
        elif "=" in line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            found[f"{section}.{key.strip()}"] = value.strip()
    return found


def _networkd_claims(text: str, netdev: str, mac: str, driver: str) -> bool:
    values = {"Name": netdev, "OriginalName": netdev, "Driver": driver, "MACAddress": mac, "PermanentMACAddress": mac}
    wanted = [
        (values[key[len("Match.") :]], patterns.split())
        for key, patterns in _keys(text).items()
        if key[len("Match.") :] in values and key.startswith("Match.")
    ]
    # networkd ignores a file without any condition.
    return bool(wanted) and all(_matches(value, patterns) for value, patterns in wanted)


def _manager_claims(text: str, netdev: str, mac: str) -> bool:
    keys = _keys(text)
    if keys.get("connection.type") not in ("ethernet", "802-3-ethernet"):
        return False
    wanted = [
        (netdev, [keys.get("connection.interface-name", "*")]),
        (netdev, [word for word in keys.get("match.interface-name", "*").split(";") if word]),
        (mac, [keys.get("ethernet.mac-address", "*")]),
    ]
    return all(_matches(value, patterns) for value, patterns in wanted)


def _matches(value: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(value.lower(), pattern.lower()) for pattern in patterns)


@dataclass(frozen=True)
class Record:
    """What is needed to put everything back: devices as they were, with what is known of them by name, and the
    addresses that we add.
    """

    devices: Sequence[Device]
    gen_modes: Mapping[str, str]
    routes: Mapping[str, Sequence[Sequence[str]]]
    added: Sequence[Port]


def restore_script(record: Record, state: str, target: str, existed: bool, netplan: str, ip: str, limit_s: int) -> str:
    """A script that puts everything back, and may run again after it was cut off.

    `state` is the directory with the record as `pending`, which is `restored` afterwards; `target` is our file,
    `existed` whether there was one; `limit_s` is for netplan.
    """
    saved = "pending/before.yaml"
    new = shlex.quote(f"{target}.new")
    file = shlex.quote(target)
    put_back = f"cp -p {saved} {new} && mv {new} {file}" if existed else f"rm -f {file} {new}"
    lines = [
        "#!/bin/sh",
        "# Puts the network back as it was before Sparkwright changed it. With `locked` the caller holds the lock.",
        f"cd {shlex.quote(state)} || exit 1",
        # Whoever holds the lock for long hangs, and with it the node.
        'if [ "${1:-}" != locked ]; then exec 9>lock; flock -w 10 9; fi',
        "[ -d pending ] || exit 0",
        "wrong=0",
        f"{{ {put_back}; }} || wrong=1",
        f"timeout {limit_s} {shlex.quote(netplan)} apply || wrong=1",
        # networkd goes on after netplan has ended.
        "sleep 1",
    ]
    ip = shlex.quote(ip)
    for device in record.devices:
        name = shlex.quote(device.name)
        before = {address.text for address in device.addresses}
        steps = [
            # An address that is gone already is well.
            f"  {ip} address del {shlex.quote(port.address)} dev {name} 2>/dev/null"
            for port in record.added
            if port.netdev == device.name and port.address not in before
        ]
        steps.append(f"  {ip} link set dev {name} mtu {device.mtu} || wrong=1")
        steps.append(f"  {ip} link set dev {name} {'up' if device.up else 'down'} || wrong=1")
        if record.gen_modes.get(device.name):
            # networkd sets it to none, and leaves it so.
            steps.append(f"  {ip} link set dev {name} addrgenmode {record.gen_modes[device.name]} || true")
        for address in device.addresses:
            words = " ".join(shlex.quote(word) for word in (address.text, "dev", device.name, *address.words))
            # An IPv6 address cannot be given to a device on which the kernel has switched IPv6 off.
            alright = "true" if ":" in address.text else "wrong=1"
            steps.append(f"  {ip} address replace {words} || {alright}")
        for route in record.routes.get(device.name, []):
            words = " ".join(shlex.quote(word) for word in (*route, "dev", device.name))
            # Its gateway may be behind a route of somebody else.
            steps.append(f"  {ip} route replace {words} || true")
        lines += [f"if {ip} link show dev {name} >/dev/null 2>&1; then", *steps, "fi"]
    folder = shlex.quote(target.rpartition("/")[0])
    lines += ['[ "$wrong" = 0 ] || exit 1', f"sync {folder}", "rm -rf restored", "mv pending restored", "sync ."]
    return "\n".join(lines) + "\n"
