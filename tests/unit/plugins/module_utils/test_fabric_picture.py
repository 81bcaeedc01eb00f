# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import itertools
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import cabling, fabric_picture
from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding

Survey = dict[str, Any]

# Cable and PCIe domain -> HCA and network device of a Spark.
FUNCTIONS = {
    ("f0", 0): ("rocep1s0f0", "enp1s0f0np0"),
    ("f0", 1): ("roceP2p1s0f0", "enP2p1s0f0np0"),
    ("f1", 0): ("rocep1s0f1", "enp1s0f1np1"),
    ("f1", 1): ("roceP2p1s0f1", "enP2p1s0f1np1"),
}
# What is cabled to what, each cable with two rails.
SHAPES = {
    "direct2": [(1, "f0", 2, "f0")],
    "triangle3": [(1, "f0", 2, "f1"), (1, "f1", 3, "f0"), (2, "f0", 3, "f1")],
    "ring4": [(1, "f0", 2, "f1"), (2, "f0", 3, "f1"), (3, "f0", 4, "f1"), (4, "f0", 1, "f1")],
}


def build(topology: str, nodes: int, state: str = "ok", sockets: str = "enP7s7") -> Survey:
    """The survey of a whole cluster: rails 0 and 1 of each cable, unused ports down, sockets over the LAN."""
    links: list[dict[str, Any]] = []
    cables = SHAPES.get(topology) or [(a, "f0", b, "f0") for a, b in itertools.combinations(range(1, nodes + 1), 2)]
    for number, (one, near, two, far) in enumerate(cables):
        for domain in (0, 1):
            rail = domain if topology == "switch" else 2 * number + domain
            ends = [
                {
                    "host": f"spark{node}",
                    "hca": FUNCTIONS[cable, domain][0],
                    "port": 1,
                    "netdev": FUNCTIONS[cable, domain][1],
                    "cable": cable,
                    "address": f"10.77.{rail}.{node}",
                    "mtu": 9000,
                    "active_mtu": 4096,
                    "rate_gbps": 200.0,
                    "gid_index": 3,
                }
                for node, cable in ((one, near), (two, far))
            ]
            links.append({"rail": rail, "network": f"10.77.{rail}.0/24", "state": state, "reason": "", "ends": ends})
    used = {(end["host"], end["netdev"]): f"{end['address']}/24" for link in links for end in link["ends"]}
    hosts = [f"spark{node}" for node in range(1, nodes + 1)]
    return {
        "topology": topology,
        "ranks": {
            host: {
                "host": host,
                "rank": rank,
                "address": f"192.168.1.{rank + 1}",
                "socket_interface": sockets,
                "mtu": 9000,
                "rails": [],
                "paths": {},
            }
            for rank, host in enumerate(hosts)
        },
        "links": links,
        "ports": {
            host: [
                {
                    "hca": hca,
                    "netdev": netdev,
                    "cable": cable,
                    "state": "ACTIVE" if (host, netdev) in used else "DOWN",
                    "addresses": [used[host, netdev]] if (host, netdev) in used else [],
                    "mtu": 9000 if (host, netdev) in used else 1500,
                    "role": "rail" if (host, netdev) in used else "unused",
                    "note": "" if (host, netdev) in used else f"{hca} ({netdev}) is DOWN, Disabled",
                }
                for (cable, _), (hca, netdev) in FUNCTIONS.items()
            ]
            for host in hosts
        },
        "findings": [],
    }


def broken(survey: Survey) -> Survey:
    """The survey with its second rail failed between the first two ranks, and some other troubles."""
    survey = copy.deepcopy(survey)
    link = survey["links"][1]
    end = link["ends"][1]
    link["state"], link["reason"] = "failed", f"{end['netdev']} has MTU 1500"
    for port in survey["ports"][end["host"]]:
        if port["netdev"] == end["netdev"]:
            port["mtu"] = 1500
    repair = f"ip link set {end['netdev']} mtu 9000 (lasting: spark_fabric_rails with fabric_configure: true)"
    survey["findings"] = [
        Finding("fabric.mtu", end["host"], f"{end['netdev']} has MTU 1500", "9000", repair).to_dict(),
        Finding("fabric.sysfs", "spark1", "a warning", "nothing", "nothing", severity="warning").to_dict(),
        Finding("fabric.stray", "spark1", "a note", "nothing", "nothing", severity="info").to_dict(),
    ]
    return survey


WHOLE = {
    "two": build("direct2", 2, "unproven", sockets="enp1s0f0np0"),
    "three": build("triangle3", 3),
    "ring": build("ring4", 4),
    "switch2": build("switch", 2),
    "switch3": build("switch", 3),
    "switch4": build("switch", 4),
}
# Two cables, crossed: lines and their labels meet.
SHAPES["crossed2"] = [(1, "f0", 2, "f1"), (1, "f1", 2, "f0")]
WHOLE["crossed"] = build("crossed2", 2)
ALL = {**WHOLE, **{f"{name}-broken": broken(survey) for name, survey in WHOLE.items()}}


def drawn(survey: Survey) -> tuple[str, ET.Element]:
    document = fabric_picture.svg(survey)
    return document, ET.fromstring(document)


def words(root: ET.Element) -> str:
    return "\n".join(root.itertext())


@pytest.mark.parametrize("name", ALL)
def test_everything_is_in_both_pictures(name: str) -> None:
    survey = ALL[name]
    lines = fabric_picture.text(survey)
    assert all(len(line) <= 100 and line == line.rstrip() and line.isascii() for line in lines)
    for shown in ("\n".join(lines), words(drawn(survey)[1])):
        assert survey["topology"] in shown
        for host, rank in survey["ranks"].items():
            assert f"{host} (rank {rank['rank']})" in shown
            assert rank["address"] in shown
            assert rank["socket_interface"] in shown
        for port in itertools.chain.from_iterable(survey["ports"].values()):
            assert port["netdev"] in shown and port["hca"] in shown
            assert all(address in shown for address in port["addresses"])
        for link in survey["links"]:
            assert f"rail {link['rail']}" in shown or f"rail {link['rail'] - 1},{link['rail']}" in shown
            assert link["network"] in shown
        for finding in survey["findings"]:
            joined = " ".join(shown.split())
            assert f"{finding['host']}: [{finding['id']}] {finding['found']}; needed {finding['needed']}" in joined
            assert finding["repair"] in joined


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_cluster_has_no_marks(name: str) -> None:
    assert "!!" not in "\n".join(fabric_picture.text(WHOLE[name]))
    document, root = drawn(WHOLE[name])
    assert "!!" not in document
    assert not [path for path in root.iter() if path.get("stroke-dasharray") and path.tag.endswith("rect")]


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_wrong_is_marked(name: str) -> None:
    survey = broken(WHOLE[name])
    end = survey["links"][1]["ends"][1]
    lines = fabric_picture.text(survey)
    (port,) = [line for line in lines if line.startswith("  !! ") and end["hca"] in line and "MTU 1500" in line]
    assert end["netdev"] in port
    (rail,) = [line for line in lines if line.startswith("  !! ") and line.endswith("failed")]
    assert "spark1" in rail and "spark2" in rail
    # In the drawing itself, too.
    assert any("!!" in line for line in lines[: next(n for n, line in enumerate(lines) if "(rank 0)" in line)])
    root = drawn(survey)[1]
    dashed = [element for element in root.iter() if element.get("stroke-dasharray") == "7 6"]
    # One of them is the legend.
    ends = 2 if survey["topology"] == "switch" and len(survey["ranks"]) == 2 else 1
    assert len([element for element in dashed if "failed" in "".join(element.itertext())]) >= 1 + ends
    assert all(element.get("stroke") == "#c62828" for element in dashed)
    assert f"!! {end['netdev']}" in words(root)
    assert [rect for rect in root.iter() if rect.get("stroke-dasharray") == "5 3"]


def test_other_ports_and_hosts_are_not_marked() -> None:
    lines = fabric_picture.text(ALL["two-broken"])
    assert len([line for line in lines if line.startswith("  !! ") and "MTU" in line and "roce" in line]) == 1
    # enp1s0f0np0 is no part of a finding that names enp1s0f0np01 or x-enp1s0f0np0.
    survey = copy.deepcopy(WHOLE["two"])
    for name in ("enp1s0f0np01", "x-enp1s0f0np0", "enp1s0f0np"):
        survey["findings"] = [Finding("fabric.mtu", "spark1", f"{name} is odd", "9000", "x").to_dict()]
        assert not [line for line in fabric_picture.text(survey) if line.startswith("  !!") and "ACTIVE" in line]


def test_a_note_marks_no_port() -> None:
    survey = copy.deepcopy(WHOLE["two"])
    survey["findings"] = [
        Finding("fabric.stray", "spark1", "enp1s0f1np1 is up", "a peer", "nothing", severity="info").to_dict()
    ]
    assert "!!" not in "\n".join(fabric_picture.text(survey))


def test_a_port_in_a_wrong_role_is_marked_with_its_note() -> None:
    survey = copy.deepcopy(WHOLE["two"])
    survey["ports"]["spark1"][3].update(role="wrong", note="cabled to the wrong port")
    lines = fabric_picture.text(survey)
    number = next(number for number, line in enumerate(lines) if "roceP2p1s0f1" in line)
    assert lines[number].startswith("  !!")
    assert lines[number + 1].strip() == "cabled to the wrong port"


def test_unused_ports_are_grey_and_management_is_apart() -> None:
    survey = copy.deepcopy(WHOLE["two"])
    survey["ports"]["spark2"][3].update(role="management", addresses=["192.168.9.9/24"], state="ACTIVE")
    lines = fabric_picture.text(survey)
    assert [line for line in lines if line.startswith("  .. rocep1s0f1")]
    start = lines.index("   management")
    assert "192.168.9.9/24" in lines[start + 1]
    root = drawn(survey)[1]
    assert len([text for text in root.iter() if "unused" in text.get("class", "") and text.text == "enp1s0f1np1"]) == 2
    titles = [text.text for text in root.iter() if text.get("class") == "group"]
    assert titles == ["cable f0", "cable f1", "cable f0", "cable f1", "management"]


def test_at_a_switch_only_the_port_to_blame_is_red() -> None:
    survey = copy.deepcopy(WHOLE["switch4"])
    for link in survey["links"]:
        if link["rail"] == 1 and "spark3" in [end["host"] for end in link["ends"]]:
            link["state"] = "failed"
    root = drawn(survey)[1]
    titles = ["".join(path.itertext()) for path in root.iter() if path.get("stroke-dasharray") == "7 6"]
    assert titles == ["rail 1: spark3 enP2p1s0f0np0, failed", "failed or left out"]
    drawing = fabric_picture.text(survey)[2:14]
    assert len([line for line in drawing if "!!" in line]) == 1


def partial() -> dict[str, Survey]:
    two = WHOLE["two"]
    unreachable = broken(two)
    unreachable["ports"]["spark2"] = []
    unreachable["links"] = []
    unreachable["findings"] = [Finding("node.unreachable", "spark2", "no answer", "SSH access", "power").to_dict()]
    bare = copy.deepcopy(two)
    for port in bare["ports"]["spark1"]:
        port.update(addresses=[], mtu=0, hca="", cable="")
    missing = copy.deepcopy(two)
    missing["ports"]["spark1"][0] = {}
    missing["links"][0] = {"rail": None, "ends": [{"host": "spark1"}, {}]}
    missing["ranks"]["spark2"] = None
    missing["findings"] = [{"host": "spark1"}, {}, None]
    no_ports = {key: value for key, value in two.items() if key != "ports"}
    odd = copy.deepcopy(two)
    odd["links"].append({"rail": 9, "ends": [{"host": "spark1", "netdev": "x"}, {"host": "stranger", "netdev": "y"}]})
    odd["links"].append({"rail": 8, "ends": [{"host": "spark1"}, {"host": "spark1"}]})
    odd["links"].append({"rail": 7, "ends": [{"host": "spark1"}]})
    none: Survey = dict.fromkeys(two)
    return {
        "unreachable": unreachable,
        "bare": bare,
        "missing": missing,
        "no ports": no_ports,
        "odd": odd,
        "none": none,
        "empty": {},
        "one node": build("direct2", 1) | {"links": []},
        "ring of six": build("ring6", 6) | {"topology": "ring6"},
        "empty switch": {"topology": "switch"},
        "switch without links": build("switch", 4) | {"links": []},
    }


@pytest.mark.parametrize("name", partial())
def test_partial_data_is_drawn(name: str) -> None:
    survey = partial()[name]
    before = copy.deepcopy(survey)
    assert all(len(line) <= 100 for line in fabric_picture.text(survey))
    drawn(survey)
    assert survey == before


def test_a_rail_that_was_left_out_is_marked() -> None:
    survey = copy.deepcopy(WHOLE["two"])
    survey["links"][1]["state"] = "dropped"
    assert [line for line in fabric_picture.text(survey) if line.startswith("  !! 1") and line.endswith("dropped")]
    titles = ["".join(path.itertext()) for path in drawn(survey)[1].iter() if path.get("stroke-dasharray") == "7 6"]
    assert len(titles) == 2 and titles[0].startswith("rail 1 10.77.1.0/24: spark1 enP2p1s0f0np0 - spark2")


def test_the_worst_findings_come_first() -> None:
    survey = copy.deepcopy(ALL["two-broken"])
    survey["findings"].reverse()
    for lines in (fabric_picture.text(survey), words(drawn(survey)[1]).splitlines()):
        kinds = [found[1] for line in lines if (found := re.search(r"\[(fabric\.\w+)\]", line))]
        assert kinds == ["fabric.mtu", "fabric.sysfs", "fabric.stray"]


def test_a_node_without_facts_says_so() -> None:
    survey = partial()["unreachable"]
    lines = fabric_picture.text(survey)
    assert any(line.startswith("!! spark2 (rank 1)") for line in lines)
    assert "     (no facts of this node)" in lines
    assert "   management" not in lines
    root = drawn(survey)[1]
    assert "no facts of this node" in words(root)
    assert [rect for rect in root.iter() if rect.get("stroke-dasharray") == "6 4" and rect.get("stroke") == "#c62828"]


HOSTILE = [
    "<script>alert(1)</script>",
    "a&b\"c'd]]>",
    "\x00\x1b[31m\u202e\ud800\ufffe\n\tname",
    "n" * 5000,
    "&#x1F4A9;",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names(name: str) -> None:
    survey = copy.deepcopy(ALL["ring-broken"])
    survey["topology"] = name
    survey["ranks"][name] = survey["ranks"].pop("spark2") | {"address": name, "socket_interface": name}
    survey["ports"][name] = survey["ports"].pop("spark2")
    for port in survey["ports"][name]:
        port.update(dict.fromkeys(("hca", "netdev", "cable", "state", "role", "note"), name), addresses=[name])
    for link in survey["links"]:
        link.update(network=name, reason=name)
        for end in link["ends"]:
            end.update(host=name if end["host"] == "spark2" else end["host"], netdev=name)
    survey["findings"].append(Finding("fabric.x", name, name, name, name).to_dict())
    lines = fabric_picture.text(survey)
    assert all(len(line) <= 100 and line.isprintable() for line in lines)
    document, root = drawn(survey)
    assert {element.tag.partition("}")[2] for element in root.iter()} <= {
        "svg",
        "style",
        "rect",
        "path",
        "text",
        "title",
    }
    document.encode()
    assert len(document) < 500_000


def test_the_document_stands_alone() -> None:
    for survey in ALL.values():
        document, root = drawn(survey)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.search(r"href|<script|url\(|@import|on\w+=|<!", document)
        _, _, width, height = (float(number) for number in root.get("viewBox", "").split())
        background = next(element for element in root.iter() if element.tag.endswith("rect"))
        assert (background.get("width"), background.get("height")) == (f"{width:g}", f"{height:g}")
        for element in root.iter():
            for key, limit in (("x", width), ("y", height)):
                assert 0 <= float(element.get(key, "0")) <= limit


def boxes(root: ET.Element, radius: str) -> list[tuple[float, float, float, float]]:
    keys = ("x", "y", "width", "height")
    found = [element for element in root.iter() if element.get("rx") == radius and element.get("fill") == "#ffffff"]
    values = [[float(element.get(key, "0")) for key in keys] for element in found]
    return [(x, y, x + width, y + height) for x, y, width, height in values]


@pytest.mark.parametrize("name", ALL)
def test_nothing_covers_anything(name: str) -> None:
    root = drawn(ALL[name])[1]
    everything = boxes(root, "10")
    assert len(everything) >= len(ALL[name]["ranks"])
    for (ax, ay, bx, by), (cx, cy, dx, dy) in itertools.combinations(everything, 2):
        assert bx <= cx or dx <= ax or by <= cy or dy <= ay


def test_a_surveyed_cluster_is_drawn() -> None:
    def info(node: int) -> dict[str, Any]:
        ports = []
        for domain in (0, 1):
            hca, netdev = FUNCTIONS["f0", domain]
            address = f"10.77.{domain}.{node}"
            gid = {"index": 3, "gid": "x", "type": "RoCE v2", "netdev": netdev, "ipv4": address}
            ports.append(
                {
                    "hca": hca, "port": 1, "pci": f"000{2 * domain}:01:00.0", "netdev": netdev, "state": "ACTIVE",
                    "phys_state": "LinkUp", "link_layer": "Ethernet", "rate_gbps": 200.0, "mtu": 9000 if node else 1500,
                    "active_mtu": 4096, "addresses": [f"{address}/24"], "gids": [gid],
                }
            )  # fmt: skip
        interfaces = [
            {"name": p["netdev"], "mtu": 9000, "state": "up", "pci": "", "addresses": p["addresses"]} for p in ports
        ]
        return {"ports": ports, "interfaces": interfaces, "management": "enP7s7", "errors": []}

    fabric = {"topology": "direct2", "rdma": True, "mtu": 9000, "min_rails": 1, "max_rails": 0}
    ranks = [
        {"host": f"spark{n}", "rank": n - 1, "address": "", "rails": [], "gid_index": None, "argv": [], "env": {}}
        for n in (1, 2)
    ]
    survey = cabling.survey(fabric, ranks, {"spark1": info(1), "spark2": info(2)})
    assert len(survey["links"]) == 2
    lines = fabric_picture.text(survey)
    assert [line for line in lines if "rail 1 10.77.1.0/24" in line and line.count("f0") == 2]
    assert "!!" not in "\n".join(lines)
    assert "rail 0 \u00b7 10.77.0.0/24" in words(drawn(survey)[1])
