# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The pure part, over what netplan and the kernel really print (see tests/fixtures/netplan/README.md)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.sparkwright.dsv41.plugins.module_utils import netplan
from ansible_collections.sparkwright.dsv41.plugins.module_utils.netplan import Address, Device, Port

FIXTURES = Path(__file__).parents[3] / "fixtures/netplan"
A, B = "enp1s0f0np0", "enP2p1s0f0np0"
MANAGEMENT = "192.168.1.5"


def device(name: str, *addresses: str, mtu: int = 1500, **more: Any) -> Device:
    base: dict[str, Any] = {"mac": "", "up": True, "mtu_range": (68, 9978), "master": ""}
    return Device(name=name, mtu=mtu, addresses=tuple(Address(each) for each in addresses), **{**base, **more})


def known(*more: Device) -> dict[str, Device]:
    devices = [device("lo", "127.0.0.1/8"), device("enP7s7", f"{MANAGEMENT}/24"), device(A), device(B), *more]
    return {each.name: each for each in devices}


# Our file


def test_our_file_is_what_netplan_was_recorded_with() -> None:
    ports = [Port(A, "10.77.0.1/24"), Port(B, "10.77.1.1/24", 1500)]
    text = netplan.render(ports)
    assert text == (FIXTURES / "ours/etc/netplan" / netplan.NAME).read_text()
    assert netplan.parse(text) == ports


def test_our_file_is_yaml_with_fixed_addresses_only() -> None:
    text = netplan.render([Port(A, "10.77.0.1/24")])
    assert text.startswith("# Managed by Sparkwright")
    (entry,) = yaml.safe_load(text)["network"]["ethernets"].values()
    assert entry == {
        "renderer": "networkd",
        "dhcp4": False,
        "dhcp6": False,
        "accept-ra": False,
        "link-local": [],
        "optional": True,
        "ignore-carrier": True,
        "mtu": 9000,
        "addresses": ["10.77.0.1/24"],
    }


def test_what_networkd_gets_keeps_the_gid_index_low_and_the_address_without_carrier() -> None:
    text = (FIXTURES / f"ours/run/systemd/network/10-netplan-{A}.network").read_text()
    for line in ("LinkLocalAddressing=no", "IPv6AcceptRA=no", "ConfigureWithoutCarrier=yes", "MTUBytes=9000"):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    "text",
    ["", "network: {version: 2}\n", "[]", '{"network": {}}', '{"network": {"ethernets": {"a": {"addresses": ["b"]}}}}'],
)
def test_a_file_that_somebody_changed_has_no_ports(text: str) -> None:
    assert netplan.parse(text) == []


# Devices


DYNAMIC = {"valid_life_time": 3000, "preferred_life_time": 2000, "dynamic": True}
IP = [
    {},
    {
        "ifname": "enP7s7",
        "flags": ["BROADCAST", "UP", "LOWER_UP"],
        "mtu": 1500,
        "min_mtu": 68,
        "max_mtu": 9194,
        "address": "52:54:00:aa:00:01",
        "addr_info": [
            {},
            {
                "family": "inet",
                "local": "192.168.1.5",
                "prefixlen": 24,
                "broadcast": "192.168.1.255",
                "scope": "global",
                **DYNAMIC,
            },
            {"family": "inet6", "local": "2001:db8::5", "prefixlen": 64, "scope": "global", **DYNAMIC},
            {
                "family": "inet6",
                "local": "fe80::1",
                "prefixlen": 64,
                "scope": "link",
                "valid_life_time": 4294967295,
                "preferred_life_time": 4294967295,
            },
        ],
    },
    {"ifname": A, "flags": ["BROADCAST"], "mtu": 9000, "min_mtu": 0, "max_mtu": 0, "master": "bond0"},
    {"ifname": B, "address": "52:54:00:00:00:01", "permaddr": "52:54:00:00:00:02"},
]


def test_devices() -> None:
    found = netplan.devices(json.dumps(IP))
    assert list(found) == ["enP7s7", A, B]
    management = found["enP7s7"]
    assert (management.mac, management.up, management.mtu) == ("52:54:00:aa:00:01", True, 1500)
    assert (management.mtu_range, management.master) == ((68, 9194), "")
    lifetimes = ("valid_lft", "3000", "preferred_lft", "2000")
    assert management.addresses == (
        Address("192.168.1.5/24", ("broadcast", "192.168.1.255", "scope", "global", *lifetimes)),
        Address("fe80::1/64", ("scope", "link")),
    )
    assert management.ipv4 == ["192.168.1.5/24"]
    assert (found[A].up, found[A].mtu_range, found[A].master, found[A].addresses) == (False, (68, 65535), "bond0", ())
    # What netplan matches is the address that the hardware has.
    assert found[B].mac == "52:54:00:00:00:02"


@pytest.mark.parametrize(
    ("text", "mode"), [('[{"ifname": "a", "inet6_addr_gen_mode": "eui64"}]', "eui64"), ('[{"ifname": "a"}]', "")]
)
def test_gen_mode(text: str, mode: str) -> None:
    assert netplan.gen_mode(text) == mode


def test_routes_of_others_are_words_for_ip_route_replace() -> None:
    text = (
        "10.77.0.0/24 proto kernel scope link src 10.77.0.1 linkdown \n"
        "10.0.0.2 via 10.77.0.2 proto static metric 100 linkdown \n\n"
        "10.9.0.0/16 via 10.77.0.3 dead\n"
    )
    assert netplan.routes(text) == [
        ["10.0.0.2", "via", "10.77.0.2", "proto", "static", "metric", "100"],
        ["10.9.0.0/16", "via", "10.77.0.3"],
    ]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (MANAGEMENT, ("enP7s7", f"{MANAGEMENT}/24")),
        ("192.168.1.50", ("", "")),
        ("192.168.1", ("", "")),
        ("127.0.0.1", ("lo", "127.0.0.1/8")),
    ],
)
def test_located(address: str, expected: tuple[str, str]) -> None:
    assert netplan.located(address, known()) == expected


# Wishes


@pytest.mark.parametrize(
    "ports",
    [
        [],
        [Port(A, "10.77.0.1/24"), Port(B, "10.77.1.1/24", 1500)],
        # R16: no blessed subnet.
        [Port(A, "10.0.0.1/24")],
        [Port(A, "203.0.113.7/24")],
        # A point-to-point network has neither a network nor a broadcast address.
        [Port(A, "10.77.0.0/31"), Port(B, "10.77.0.3/31")],
        [Port(A, "10.77.0.1/24", 68), Port(B, "10.77.1.1/24", 9978)],
    ],
)
def test_good_wishes(ports: list[Port]) -> None:
    assert netplan.problems(ports, known(), MANAGEMENT) == []
    assert netplan.problems(ports, None, MANAGEMENT) == []


@pytest.mark.parametrize(
    ("ports", "found", "anywhere"),
    [
        (
            [Port("enp9s9", "10.77.0.1/24")],
            "no network device enp9s9",
            False,
        ),
        ([Port("a/b", "10.77.0.1/24")], "netdev 'a/b'", True),
        ([Port("..", "10.77.0.1/24")], "netdev '..'", True),
        ([Port("", "10.77.0.1/24")], "netdev ''", True),
        ([Port("abcdefghijklmnop", "10.77.0.1/24")], "netdev 'abcdefghijklmnop'", True),
        ([Port("lo", "10.77.0.1/24")], "lo is the loopback device", True),
        ([Port(A, "10.77.0.1/24"), Port(A, "10.77.1.1/24")], f"{A} is listed twice", True),
        ([Port(A, "10.77.0.1")], "address '10.77.0.1'", True),
        ([Port(A, "10.77.0.1/255.255.255.0")], "address '10.77.0.1/255.255.255.0'", True),
        ([Port(A, "10.77.0.1/33")], "address '10.77.0.1/33'", True),
        ([Port(A, "10.77.0.256/24")], "address '10.77.0.256/24'", True),
        ([Port(A, "fd00::1/64")], "address 'fd00::1/64'", True),
        ([Port(A, "auto")], "address 'auto'", True),
        ([Port(A, "10.77.0.0/24")], "10.77.0.0/24 for enp1s0f0np0 is the network itself", True),
        ([Port(A, "10.77.0.255/24")], "10.77.0.255/24 for enp1s0f0np0 is the broadcast address", True),
        ([Port(A, "10.77.0.1/32")], "10.77.0.1/32 for enp1s0f0np0 has no room for a peer", True),
        ([Port(A, "127.0.0.2/8")], "127.0.0.2/8 for enp1s0f0np0 is not an address for a port", True),
        ([Port(A, "224.0.0.5/24")], "224.0.0.5/24 for enp1s0f0np0 is not", True),
        ([Port(A, "240.0.0.5/24")], "240.0.0.5/24 for enp1s0f0np0 is not", True),
        ([Port(A, "0.0.0.5/24")], "0.0.0.5/24 for enp1s0f0np0 is not", True),
        (
            [Port(A, "10.77.0.1/24"), Port(B, "10.77.0.2/24")],
            f"{A} 10.77.0.1/24 and {B} 10.77.0.2/24 are in one network",
            True,
        ),
        ([Port(A, "10.77.0.1/24"), Port(B, "10.77.1.2/16")], f"{A} 10.77.0.1/24 and {B} 10.77.1.2/16 are in one", True),
        ([Port(A, "10.77.0.1/24", 67)], f"mtu 67 for {A}", True),
        ([Port(A, "10.77.0.1/24", 65536)], f"mtu 65536 for {A}", True),
        ([Port(A, "10.77.0.1/24", 9979)], f"mtu 9979 for {A}", False),
        ([Port("enP7s7", "10.77.0.1/24")], f"enP7s7 has the management address {MANAGEMENT}", False),
        ([Port("part", "10.77.0.1/24")], "part is a part of bond0", False),
        # The fabric in the network of management would take its traffic.
        (
            [Port(A, "192.168.1.77/24")],
            f"192.168.1.77/24 for {A} is in the network of {MANAGEMENT}/24 of enP7s7",
            False,
        ),
        ([Port(A, "192.168.0.1/16")], f"192.168.0.1/16 for {A} is in the network of {MANAGEMENT}/24 of enP7s7", False),
        ([Port(A, "10.0.0.1/24")], f"10.0.0.1/24 for {A} is in the network of 10.0.0.1/32 of alias", False),
    ],
)
def test_one_problem(ports: list[Port], found: str, anywhere: bool) -> None:
    """With `anywhere` it is one too where nothing is known of the devices."""
    devices = known(device("part", master="bond0"), device("alias", "10.0.0.1/32"))
    (problem,) = netplan.problems(ports, devices, MANAGEMENT)
    assert problem.found.startswith(found) and problem.needed
    assert bool(netplan.problems(ports, None, MANAGEMENT)) is anywhere


def test_the_needed_devices_are_told() -> None:
    (problem,) = netplan.problems([Port("enp9s9", "10.77.0.1/24")], known(), MANAGEMENT)
    assert problem.needed == f"one of {B}, enP7s7, {A}"


def test_a_management_address_that_no_device_has() -> None:
    (problem,) = netplan.problems([Port(A, "10.77.0.1/24")], known(), "192.168.1.6")
    assert problem.found == "no device has the management address 192.168.1.6"


def test_a_host_address_elsewhere_in_the_network_is_no_conflict() -> None:
    """Such as an alias on lo that is routed over the fabric."""
    devices = known(device("alias", "10.0.0.2/32"))
    assert netplan.problems([Port(A, "10.0.0.1/24")], devices, MANAGEMENT) == []


def test_addresses_that_go_away_are_no_conflict() -> None:
    devices = known(device("old", "10.77.0.1/24"))
    ports = [Port(A, "10.77.0.1/24")]
    assert len(netplan.problems(ports, devices, MANAGEMENT)) == 1
    assert netplan.problems(ports, devices, MANAGEMENT, ["old"]) == []
    assert netplan.problems([Port("old", "10.77.0.2/24")], devices, MANAGEMENT) == []


def test_all_problems_at_once() -> None:
    ports = [Port("enp9s9", "x"), Port(A, "10.77.0.0/24", 1), Port(A, "10.77.1.1/24"), Port(B, "10.77.1.2/24")]
    wrong = [problem.found for problem in netplan.problems(ports, known(), "192.168.1.6")]
    assert len(wrong) == 7 and all(problem for problem in wrong)


@pytest.mark.parametrize(
    ("devices", "missing"),
    [
        ([device(A, "10.77.0.1/24", mtu=9000)], []),
        # Further addresses may be somebody's.
        ([device(A, "10.9.9.9/24", "10.77.0.1/24", mtu=9000)], []),
        ([device(A, "10.77.0.1/24", mtu=9000, up=False)], [f"{A} is down"]),
        ([device(A, "10.77.0.1/24")], [f"{A} has MTU 1500 instead of 9000"]),
        ([device(A, "10.77.0.1/16", mtu=9000)], [f"{A} has 10.77.0.1/16 instead of 10.77.0.1/24"]),
        ([device(A, mtu=9000)], [f"{A} has no address instead of 10.77.0.1/24"]),
        ([], [f"{A} is gone"]),
    ],
)
def test_lacking(devices: list[Device], missing: list[str]) -> None:
    assert netplan.lacking([Port(A, "10.77.0.1/24")], {each.name: each for each in devices}) == missing


# The management address


OK, AWAY, OTHER = [f"{MANAGEMENT}/24"], list[str](), ["192.168.1.99/24"]


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        # R12: it blinks, and comes back; it never does; another comes instead.
        ([AWAY] * 10 + [OK] * 5, "ok"),
        ([AWAY] * 50, "gone"),
        ([OTHER] * 50, "different"),
        ([OK] * 5, "ok"),
        # netplan ends before the address goes away.
        ([OK] * 4, "wait"),
        ([OK] * 4 + [AWAY], "wait"),
        ([OK] * 30 + [AWAY] * 49, "wait"),
        ([OK] * 30 + [AWAY] * 50, "gone"),
        ([AWAY] * 49 + [OK], "wait"),
        ([AWAY] * 49 + [OK, AWAY], "wait"),
        ([AWAY] * 40 + [OTHER] * 10, "different"),
        ([OTHER] * 40 + [AWAY] * 10, "gone"),
        ([OTHER] * 20 + [OK] * 5, "ok"),
        # Further addresses come and go.
        ([OK + OTHER, OTHER + OK, OK, OK, OK + OTHER], "ok"),
        # The same address with another prefix is another one.
        ([[f"{MANAGEMENT}/32"]] * 50, "different"),
        ([], "wait"),
    ],
)
def test_settled(samples: list[list[str]], verdict: str) -> None:
    assert netplan.settled(samples, f"{MANAGEMENT}/24", 50) == verdict


def test_no_patience() -> None:
    assert netplan.settled([AWAY], f"{MANAGEMENT}/24", 0) == "gone"
    assert netplan.settled([], f"{MANAGEMENT}/24", 0) == "wait"


# What netplan says


def broken() -> list[str]:
    return sorted(path.parent.name for path in FIXTURES.glob("*/stderr.txt"))


EXPECTED = {
    "dangling": ("20-gone.yaml", "Cannot stat  No such file or directory"),
    "name-with-space": ("10 a b.yaml", "1:20: Error in network definition: Only version 2 is supported"),
    "network-manager": (
        "90-NM-14f59568-5076-387a-aef6-10adfcca2e26.yaml",
        "9:7: Error in network definition: address '169.254.1.2' is missing /prefixlength",
    ),
    "no-file-named": ("", "ERROR: drv: NetworkManager definitions do not support matching by driver"),
    "no-mapping": ("10-a.yaml", "1:1: Error in network definition: expected mapping (check indentation)"),
    "not-utf8": ("10-a.yaml", "1:1: Invalid YAML: invalid leading UTF-8 octet:"),
    "syntax": ("90-NM-1b2c.yaml", "6:6: Invalid YAML: inconsistent indentation:"),
    "tab": ("50-cloud-init.yaml", "4:1: Invalid YAML: tabs are not allowed for indent:"),
    "two-types": ("20-b.yaml", "4:5: Error in network definition: Updated definition 'br0' changes device type"),
    "unknown-key": ("50-cloud-init.yaml", "5:7: Error in network definition: unknown key 'dhcp44'"),
    "version": ("10-old.yaml", "2:12: Error in network definition: Only version 2 is supported"),
    "wifi": ("90-wifi.yaml", "Error in network definition: wlP9s9: No access points defined"),
}


@pytest.mark.parametrize("case", broken())
def test_the_broken_file_is_named(case: str) -> None:
    files = [f"etc/netplan/{path.name}" for path in (FIXTURES / case / "etc/netplan").glob("*")]
    files += ["etc/netplan/20-gone.yaml", "run/netplan/10-a.yaml"]
    name, why = EXPECTED[case]
    message = (FIXTURES / case / "stderr.txt").read_text()
    assert netplan.blame(message, "/scratch", files) == (f"etc/netplan/{name}" if name else "", why)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("\n \n", "no reason told"),
        ("killed\n", "killed"),
        # As it comes before an error; the file is named, but nothing is wrong there.
        (
            "\n** (generate:1): WARNING **: Permissions for /scratch/etc/netplan/a.yaml are too open. Netplan\n"
            "ERROR: drv: NetworkManager definitions do not support matching by driver\n",
            "ERROR: drv: NetworkManager definitions do not support matching by driver",
        ),
    ],
)
def test_no_file_is_named(message: str, why: str) -> None:
    assert netplan.blame(message, "/scratch", ["etc/netplan/a.yaml"]) == ("", why)


def test_a_line_of_a_file_is_not_repeated() -> None:
    """It may have a password."""
    text = '/scratch/etc/netplan/a.yaml:9:7: Error in network definition: bad\n          password: "secret"\n   ^\n'
    assert "secret" not in str(netplan.blame(text, "/scratch", ["etc/netplan/a.yaml"]))


def generated(case: str) -> dict[str, str]:
    run = FIXTURES / case / "run"
    return {str(path.relative_to(run.parent)): path.read_text() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("case", "device", "claimed"),
    [
        ("accepted-networkd", ("enp1s0f0np0", "", ""), True),
        ("accepted-networkd", ("enP2p1s0f0np0", "", ""), False),
        ("accepted-networkd", ("exact0", "", ""), True),
        ("accepted-networkd", ("exact01", "", ""), False),
        ("accepted-networkd", ("other", "52:54:00:12:34:56", ""), True),
        ("accepted-networkd", ("other", "52:54:00:12:34:57", ""), False),
        # A device that this file would rename.
        ("accepted-networkd", ("other", "52:54:00:12:34:58", ""), True),
        ("accepted-networkd", ("fab0", "52:54:00:12:34:58", ""), True),
        ("accepted-networkd", ("fab0", "52:54:00:12:34:59", ""), False),
        ("accepted-networkd", ("other", "", "mlx5_core"), True),
        ("accepted-networkd", ("other", "", "e1000e"), False),
        ("accepted-manager", ("enp1s0f0np0", "", ""), True),
        ("accepted-manager", ("enP2p1s0f0np0", "", ""), False),
        ("accepted-manager", ("exact0", "", ""), True),
        ("accepted-manager", ("exact01", "", ""), False),
        ("accepted-manager", ("vlan5", "", ""), False),
        ("accepted-manager", ("other", "52:54:00:12:34:56", ""), True),
        ("accepted-manager", ("other", "52:54:00:12:34:AA", ""), False),
        ("accepted-manager", ("enP2p1s0f1np1", "", ""), True),
        ("accepted-manager-any", ("anything", "", ""), True),
        ("ours", (A, "", ""), True),
    ],
)
def test_claimed(case: str, device: tuple[str, str, str], claimed: bool) -> None:
    assert netplan.claimed(generated(case), *device) is claimed


def test_nothing_generated_claims_nothing() -> None:
    assert netplan.claimed({}, A) is False
    assert netplan.claimed({"run/systemd/network/notes.txt": f"[Match]\nName={A}\n"}, A) is False


# Restore


def test_the_script_is_shell_and_quotes_what_it_is_told() -> None:
    record = netplan.Record(
        [device(A, "10.9.9.9/24"), device(B, "10.77.1.1/24", "fe80::1/64", up=False)],
        {A: "eui64", B: ""},
        {A: [["10.0.0.2", "via", "10.9.9.1"]]},
        [Port(A, "10.77.0.1/24"), Port(B, "10.77.1.1/24")],
    )
    script = netplan.restore_script(
        record, "/a b/state", "/a b/etc/ours.yaml", True, "/usr/sbin/netplan", "/sbin/ip", 60
    )
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    lines = [line.strip() for line in script.splitlines()]
    expected = [
        "cd '/a b/state' || exit 1",
        "{ cp -p pending/before.yaml '/a b/etc/ours.yaml.new' && mv '/a b/etc/ours.yaml.new' '/a b/etc/ours.yaml'; }"
        " || wrong=1",
        "timeout 60 /usr/sbin/netplan apply || wrong=1",
        f"/sbin/ip address del 10.77.0.1/24 dev {A} 2>/dev/null",
        f"/sbin/ip link set dev {A} mtu 1500 || wrong=1",
        f"/sbin/ip link set dev {A} up || wrong=1",
        f"/sbin/ip link set dev {A} addrgenmode eui64 || true",
        f"/sbin/ip address replace 10.9.9.9/24 dev {A} || wrong=1",
        f"/sbin/ip route replace 10.0.0.2 via 10.9.9.1 dev {A} || true",
        f"/sbin/ip link set dev {B} down || wrong=1",
        f"/sbin/ip address replace 10.77.1.1/24 dev {B} || wrong=1",
        f"/sbin/ip address replace fe80::1/64 dev {B} || true",
        "mv pending restored",
    ]
    assert [line for line in lines if line in expected] == expected
    # An address that was there before is not ours to remove.
    assert not any("del 10.77.1.1/24" in line or f"{B} addrgenmode" in line for line in lines)


def test_a_file_that_was_not_there_is_removed() -> None:
    script = netplan.restore_script(
        netplan.Record([], {}, {}, []), "/state", "/etc/ours.yaml", False, "netplan", "ip", 60
    )
    assert "{ rm -f /etc/ours.yaml /etc/ours.yaml.new; } || wrong=1" in script.splitlines()
    assert "before.yaml" not in script
