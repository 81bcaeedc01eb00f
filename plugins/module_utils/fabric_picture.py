# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""A picture of the cabling that a survey found: `text` for a terminal, `svg` for a browser.

Nothing in a survey is taken for granted: what is missing is left out, so that a broken cluster can be drawn as well.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Set, Tuple
from xml.sax.saxutils import escape

WIDTH = 100
BROKEN = ("failed", "dropped")


@dataclass
class _Port:
    """One PCIe function of a node as it is drawn; `bad`: a finding names it."""

    hca: str
    netdev: str
    cable: str
    state: str
    addresses: str
    mtu: str
    role: str
    note: str
    bad: bool = False
    rails: List[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.netdev or self.hca or "?"

    @property
    def use(self) -> str:
        return ", ".join(f"rail {rail}" for rail in self.rails) or self.role


@dataclass
class _Node:
    """One host: its ports by cable, those for management apart."""

    host: str
    rank: str
    address: str
    sockets: str
    known: bool
    bad: bool
    ports: List[_Port]

    @property
    def groups(self) -> List[Tuple[str, List[_Port]]]:
        """(title, ports) of each cable, then of management."""
        fabric = [port for port in self.ports if port.role != "management"]
        cables = sorted({port.cable for port in fabric}, key=lambda cable: (not cable, cable))
        groups = [
            (f"cable {cable}" if cable else "no cable known", [port for port in fabric if port.cable == cable])
            for cable in cables
        ]
        managing = [port for port in self.ports if port.role == "management"]
        if self.known and self.sockets and not any(self.sockets == port.netdev for port in self.ports):
            managing.append(_Port("", self.sockets, "", "", self.address, "", "management", ""))
        return [*groups, ("management", managing)] if managing else groups

    @property
    def title(self) -> str:
        return f"{self.host} (rank {self.rank})" if self.rank else self.host


@dataclass
class _Link:
    """One rail between two ports: (host, netdev) each, with what to call it."""

    rail: str
    network: str
    state: str
    reason: str
    ends: List[Tuple[str, str]]
    cables: List[str]

    @property
    def broken(self) -> bool:
        return self.state in BROKEN


@dataclass
class _Picture:
    topology: str
    nodes: List[_Node]
    links: List[_Link]
    findings: List[Dict[str, str]]

    def pair(self, one: _Node, two: _Node) -> List[_Link]:
        wanted = {one.host, two.host}
        return [link for link in self.links if {host for host, _ in link.ends} == wanted]

    def weak_ends(self) -> Set[Tuple[str, str, str]]:
        """(host, port, rail) to blame for broken links: where all links of a port are broken, its peers are not."""
        links: Dict[Tuple[str, str, str], List[_Link]] = {}
        for link in self.links:
            for host, netdev in link.ends:
                links.setdefault((host, netdev, link.rail), []).append(link)
        dead = {end for end, mine in links.items() if all(link.broken for link in mine)}
        weak = set(dead)
        for end, mine in links.items():
            for link in mine:
                others = {(host, netdev, link.rail) for host, netdev in link.ends} - {end}
                if link.broken and not others & dead:
                    weak.add(end)
        return weak


def _say(value: Any) -> str:
    """A value as one line of text that neither a terminal nor XML trips over."""
    text = "" if value is None else str(value)
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()


def _maps(value: Any) -> List[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, (list, tuple)) else []


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _port(port: Mapping[str, Any], role: str) -> _Port:
    addresses = port.get("addresses") or port.get("address") or ""
    if isinstance(addresses, (list, tuple)):
        addresses = " ".join(map(str, addresses))
    keys = ("hca", "netdev", "cable", "state")
    hca, netdev, cable, state = (_say(port.get(key)) for key in keys)
    mtu = _say(port.get("mtu") or "")
    return _Port(
        hca, netdev, cable, state, _say(addresses), mtu, _say(port.get("role")) or role, _say(port.get("note"))
    )


def _picture(survey: Mapping[str, Any]) -> _Picture:
    ranks, ports = _map(survey.get("ranks")), _map(survey.get("ports"))
    raw = [(link, _maps(link.get("ends"))) for link in _maps(survey.get("links"))]
    findings = [{key: _say(value) for key, value in finding.items()} for finding in _maps(survey.get("findings"))]
    ended = [str(end.get("host")) for _, ends in raw for end in ends]
    nodes = [
        _node(host, _map(ranks.get(host)), ports.get(host), raw, findings)
        for host in dict.fromkeys([*map(str, ranks), *map(str, ports), *ended])
    ]
    links = [
        _Link(
            rail=_say(link.get("rail")),
            network=_say(link.get("network")),
            state=_say(link.get("state")) or "unproven",
            reason=_say(link.get("reason")),
            ends=[(_say(end.get("host")), _say(end.get("netdev") or end.get("hca"))) for end in ends],
            cables=[_say(end.get("cable")) for end in ends],
        )
        for link, ends in raw
        if len(ends) == 2
    ]
    nodes.sort(key=lambda node: int(node.rank) if node.rank.isdigit() else len(nodes))
    return _Picture(_say(survey.get("topology")), nodes, links, findings)


def _node(
    host: str,
    rank: Mapping[str, Any],
    ports: Any,
    links: Sequence[Tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]],
    findings: Sequence[Mapping[str, str]],
) -> _Node:
    mine = [_port(port, "unused") for port in _maps(ports)]
    known = bool(mine)
    used: Dict[str, List[str]] = {}
    for link, ends in links:
        for end in ends:
            if str(end.get("host")) != host:
                continue
            port = _port(end, "rail")
            used.setdefault(port.name, []).append(_say(link.get("rail")))
            if all(other.name != port.name for other in mine):
                mine.append(port)
    said = [finding for finding in findings if finding.get("host") == _say(host)]
    serious = [finding for finding in said if finding.get("severity", "error") != "info"]
    words = {word for finding in serious for word in re.split(r"[^\w-]+", finding.get("found", ""))}
    for port in mine:
        port.rails = list(dict.fromkeys(used.get(port.name, [])))
        port.bad = port.role == "wrong" or bool({port.netdev, port.hca} & words - {""})
    # What is odd about a node as a whole is shown at its name.
    bad = any(finding.get("severity", "error") == "error" for finding in said) and not any(port.bad for port in mine)
    return _Node(
        host=_say(host),
        rank=_say(rank.get("rank")),
        address=_say(rank.get("address")),
        sockets=_say(rank.get("socket_interface")),
        known=known,
        bad=bad,
        ports=mine,
    )


def _columns(nodes: Sequence[_Node]) -> Tuple[List[_Node], List[_Node]]:
    """Left and right column, so that ranks that follow each other are neighbours, around the picture."""
    if len(nodes) == 3:
        return [nodes[0]], [nodes[1], nodes[2]]
    half = len(nodes) // 2
    around = list(nodes)
    return [around[0], *reversed(around[half + 1 :])] if around else [], around[1 : half + 1]


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 2)] + ".."


# --- Text


class _Canvas:
    """Characters on a grid of WIDTH columns."""

    def __init__(self) -> None:
        self.rows: List[List[str]] = []

    def put(self, x: int, y: int, text: str) -> None:
        while len(self.rows) <= y:
            self.rows.append([" "] * WIDTH)
        for number, letter in enumerate(text):
            if 0 <= x + number < WIDTH:
                self.rows[y][x + number] = letter

    def down(self, x: int, top: int, bottom: int, letter: str = "|") -> None:
        for y in range(top, bottom + 1):
            self.put(x, y, letter)

    def box(self, x: int, y: int, width: int, height: int, lines: Sequence[str]) -> None:
        edge = "+" + "-" * (width - 2) + "+"
        self.put(x, y, edge)
        self.put(x, y + height - 1, edge)
        for number in range(1, height - 1):
            line = lines[number - 1] if number <= len(lines) else ""
            self.put(x, y + number, "|" + _clip(line, width - 4).center(width - 2) + "|")

    def lines(self) -> List[str]:
        return ["".join(row).rstrip() for row in self.rows]


_BOX = 24


def _box_lines(node: _Node) -> List[str]:
    return [("!! " if node.bad else "") + node.host, f"rank {node.rank}" if node.rank else "", node.address]


def _label(links: Sequence[_Link]) -> str:
    if not links:
        return ""
    rails = ",".join(dict.fromkeys(link.rail for link in links))
    bad = ",".join(dict.fromkeys(link.rail for link in links if link.broken))
    return f"rail {rails}" + (f" !! {bad}" if bad else "")


def _row(canvas: _Canvas, y: int, links: Sequence[_Link], one: _Node, two: _Node) -> int:
    """Two boxes side by side and a line for each link between them; returns the height."""
    height = max(5, len(links) + 2)
    canvas.box(2, y, _BOX, height, _box_lines(one))
    canvas.box(WIDTH - 2 - _BOX, y, _BOX, height, _box_lines(two))
    room = WIDTH - 4 - 2 * _BOX
    for number, link in enumerate(links):
        near, far = link.cables if link.ends[0][0] == one.host else reversed(link.cables)
        line = f" {'!! ' if link.broken else ''}rail {link.rail} {link.network} {link.state} "
        near, far = near and f" {near} ", far and f" {far} "
        stroke = "- " if link.broken else "="
        middle = _clip(line, room - len(near) - len(far) - 4)
        filled = middle.center(room - len(near) - len(far), "\0")
        drawn = "".join(stroke[n % len(stroke)] if letter == "\0" else letter for n, letter in enumerate(filled))
        canvas.put(2 + _BOX, y + 1 + number, near + drawn + far)
    return height


def _drawing(picture: _Picture) -> List[str]:
    canvas = _Canvas()
    left, right = _columns(picture.nodes)
    rows = max(len(left), len(right))
    if picture.topology == "switch":
        _switch_drawing(canvas, picture, left, right)
        return canvas.lines()
    y = 0
    if len(picture.nodes) == 3:
        top, one, two = picture.nodes
        canvas.box(38, 0, _BOX, 5, _box_lines(top))
        for step in range(4):
            canvas.put(36 - 5 * step, 5 + step, "/")
            canvas.put(63 + 5 * step, 5 + step, "\\")
        label = _label(picture.pair(top, one))
        canvas.put(30 - 2 - len(label), 6, label)
        canvas.put(72, 6, _label(picture.pair(top, two)))
        y, left, right, rows = 9, [one], [two], 1
    for number in range(rows):
        one_two = [column[number] if number < len(column) else None for column in (left, right)]
        if one_two[0] and one_two[1]:
            height = _row(canvas, y, picture.pair(one_two[0], one_two[1]), one_two[0], one_two[1])
        else:
            height = 5
            for x, node in zip((2, WIDTH - 2 - _BOX), one_two):
                if node:
                    canvas.box(x, y, _BOX, height, _box_lines(node))
        y += height
        if number + 1 < rows:
            for x, column in ((2 + _BOX // 2, left), (WIDTH - 2 - _BOX // 2, right)):
                between = picture.pair(column[number], column[number + 1]) if number + 1 < len(column) else []
                if between:
                    canvas.down(x, y, y + 2, "!" if any(link.broken for link in between) else "|")
                    canvas.put(x + 2 if x < WIDTH // 2 else x - 2 - len(_label(between)), y + 1, _label(between))
            y += 3
    return canvas.lines()


def _switch_drawing(canvas: _Canvas, picture: _Picture, left: Sequence[_Node], right: Sequence[_Node]) -> None:
    weak = {host for host, _, _ in picture.weak_ends()}
    height = max(5, 6 * max(len(left), len(right)) - 1)
    networks = list(dict.fromkeys(f"rail {link.rail} {link.network}" for link in picture.links))
    middle = max(0, (height - len(networks) - 4) // 2)
    canvas.box(37, middle, 26, max(5, len(networks) + 4), ["", "switch", *networks])
    half = middle + max(5, len(networks) + 4) // 2
    for column, x, line, elbow in ((left, 2, 2 + _BOX, 31), (right, WIDTH - 2 - _BOX, 69, 68)):
        canvas.put(min(elbow, 63), half, "=" * 6 if column else "")
        for number, node in enumerate(column):
            y = 6 * number + 2
            canvas.box(x, y - 2, _BOX, 5, _box_lines(node))
            canvas.put(line, y, "- !!-" if node.host in weak else "=====")
            canvas.down(elbow, min(y, half), max(y, half))


def text(survey: Mapping[str, Any]) -> List[str]:
    """Lines for a terminal, of at most WIDTH columns; `!!` marks what is wrong."""
    picture = _picture(survey)
    lines = [
        f"Fabric {picture.topology or '(no topology)'}: {len(picture.nodes)} nodes, {len(picture.links)} links",
        "",
    ]
    lines += _drawing(picture)
    for node in picture.nodes:
        about = "".join(
            f"  {name} {value}" for name, value in (("address", node.address), ("sockets", node.sockets)) if value
        )
        lines += ["", f"{'!! ' if node.bad else ''}{node.title}{about}"]
        if not node.known:
            lines.append("     (no facts of this node)")
        for title, ports in node.groups:
            lines.append(f"   {title}")
            for port in ports:
                mark = "!!" if port.bad else ".." if port.role == "unused" else "  "
                mtu = f"MTU {port.mtu}" if port.mtu else ""
                first = f"  {mark} {port.hca or '-':<13} {port.netdev or '-':<14} {port.state or '-':<7}"
                lines.append(f"{first} {port.addresses or '-':<18} {mtu:<9} {port.use}")
                if port.role == "wrong" and port.note:
                    lines += textwrap.wrap(port.note, WIDTH - 8, initial_indent=" " * 8, subsequent_indent=" " * 8)
    if picture.links:
        lines += ["", "Rails"]
    for link in picture.links:
        mark = "!!" if link.broken else "  "
        (one, near), (two, far) = link.ends
        lines.append(f"  {mark} {link.rail:<3} {link.network:<18} {one} {near} - {two} {far}  {link.state}")
        if link.reason:
            lines += textwrap.wrap(link.reason, WIDTH - 9, initial_indent=" " * 9, subsequent_indent=" " * 9)
    if picture.findings:
        lines += ["", "Findings"]
    for severity, line in _finding_lines(picture.findings):
        mark = "!!" if severity == "error" else " !" if severity == "warning" else "  "
        lines += textwrap.wrap(line, WIDTH, initial_indent=f"  {mark} ", subsequent_indent=" " * 5)
    return [_clip(line.rstrip(), WIDTH) for line in lines]


def _finding_lines(findings: Iterable[Mapping[str, str]]) -> List[Tuple[str, str]]:
    """(severity, line) of all findings, the worst first."""
    order = {"error": 0, "warning": 1}
    lines = []
    for finding in findings:
        said = {key: finding.get(key, "") for key in ("host", "id", "found", "needed", "repair")}
        line = "{host}: [{id}] {found}; needed {needed}; repair: {repair}".format(**said)
        lines.append((finding.get("severity", "error"), line))
    return sorted(lines, key=lambda entry: order.get(entry[0], 2))


# --- SVG

_CARD, _GAP, _MARGIN = 348, 400, 100
_HEAD, _GROUP, _PORT = 52, 26, 42
_COLORS = {"ok": "#1a7f4b", "unproven": "#4a6a8a", "failed": "#c62828", "dropped": "#c62828"}
_STYLE = """
text { font-family: 'DejaVu Sans', Verdana, 'Helvetica Neue', Arial, sans-serif; font-size: 12px; fill: #1c2733; }
.small { font-size: 10.5px; fill: #4a5968; } .title { font-size: 18px; font-weight: bold; }
.head { font-weight: bold; font-size: 14px; fill: #ffffff; } .sub { font-size: 10.5px; fill: #d5dfe9; }
.group { font-size: 10.5px; font-weight: bold; fill: #4a5968; }
.unused { fill: #8a949e; } .bad { fill: #c62828; } .warning { fill: #9a5b00; }
"""


@dataclass
class _Card:
    """Where a node is drawn, and the height at which each of its ports is."""

    node: _Node
    x: int
    y: int
    left: bool
    ports: Dict[str, int]
    height: int

    def end(self, netdev: str, outer: bool) -> Tuple[int, int]:
        return (
            self.x + (_CARD if self.left != outer else 0),
            self.ports.get(netdev, self.y + _HEAD // 2),
        )


def _tag(name: str, content: str = "", **attributes: Any) -> str:
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value), {chr(34): "&quot;"})}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def _words(x: float, y: float, words: str, class_: str = "", width: int = 0, **more: Any) -> str:
    """Text, cut to a number of letters; the whole is shown by browsers on hovering."""
    cut = _clip(words, width) if width else words
    whole = _tag("title", escape(words)) if cut != words else ""
    return _tag("text", escape(cut) + whole, x=f"{x:g}", y=f"{y:g}", class_=class_, **more)


def _card(node: _Node, x: int, y: int, left: bool) -> _Card:
    at, ports = y + _HEAD, {}
    for _, members in node.groups:
        at += _GROUP
        for port in members:
            ports[port.name] = at + _PORT // 2
            at += _PORT
    return _Card(node, x, y, left, ports, max(at - y + 10, _HEAD + 40))


def _draw_card(card: _Card) -> List[str]:
    node, x, y = card.node, card.x, card.y
    wrong = node.bad or not node.known
    border = {"stroke": "#c62828", "stroke_dasharray": "6 4"} if wrong else {"stroke": "#aab6c2"}
    width = _CARD
    drawn = [
        _tag("rect", x=x, y=y, width=width, height=card.height, rx=10, fill="#ffffff", stroke_width=1.5, **border),
        _tag(
            "path", d=f"M{x} {y + _HEAD}v-{_HEAD - 10}q0-10 10-10h{width - 20}q10 0 10 10v{_HEAD - 10}z", fill="#24405c"
        ),
        _words(x + 14, y + 22, node.title, "head", 36),
        _words(x + 14, y + 40, f"address {node.address}" if node.address else "no address", "sub", 50),
    ]
    if not node.known:
        drawn.append(_words(x + width - 14, y + 40, "no facts of this node", "sub", text_anchor="end"))
    at = y + _HEAD
    for title, ports in node.groups:
        drawn.append(_words(x + 14, at + 18, title, "group", 46))
        at += _GROUP
        for port in ports:
            drawn += _draw_port(port, x + 10, at)
            at += _PORT
    return drawn


def _draw_port(port: _Port, x: int, y: int) -> List[str]:
    unused = port.role == "unused" and not port.bad
    fill, stroke = ("#fdecec", "#c62828") if port.bad else ("#f4f5f7", "#d5dae0") if unused else ("#eef5fb", "#b8cfe4")
    if port.role == "management" and not port.bad:
        fill, stroke = "#f7f4ec", "#d9cfb4"
    dash = {"stroke_dasharray": "5 3"} if port.bad else {}
    color = "unused" if unused else "bad" if port.bad else ""
    second = " \u00b7 ".join(
        filter(None, [port.hca, port.addresses or "no address", f"MTU {port.mtu}" if port.mtu else ""])
    )
    return [
        _tag("rect", x=x, y=y, width=_CARD - 20, height=_PORT - 4, rx=5, fill=fill, stroke=stroke, **dash),
        _words(x + 8, y + 16, ("!! " if port.bad else "") + port.name, color, 26),
        _words(
            x + _CARD - 30,
            y + 16,
            " \u00b7 ".join(filter(None, [port.state, port.use])),
            f"small {color}".strip(),
            30,
            text_anchor="end",
        ),
        _words(x + 8, y + 31, second, "small unused" if unused else "small", 56),
    ]


class _Labels:
    """Labels on lines, each moved along its line until it covers no other."""

    def __init__(self) -> None:
        self.taken: List[Tuple[float, float, float]] = []
        self.drawn: List[str] = []

    def add(self, curve: Sequence[Tuple[float, float]], words: str, color: str) -> None:
        width = 7.0 * len(words) + 14
        places = [_bezier(curve, at) for at in (0.5, 0.4, 0.6, 0.3, 0.7, 0.22, 0.78)]
        x, y = next((place for place in places if self._free(*place, width)), places[0])
        self.taken.append((x, y, width))
        self.drawn += [
            _tag("rect", x=f"{x - width / 2:.1f}", y=f"{y - 10:.1f}", width=f"{width:.1f}", height=20, rx=10,
                 fill="#ffffff", stroke=color),
            _words(round(x, 1), round(y + 4, 1), words, text_anchor="middle", style=f"font-size:11px;fill:{color}"),
        ]  # fmt: skip

    def _free(self, x: float, y: float, width: float) -> bool:
        return all(abs(x - other) > (width + wide) / 2 or abs(y - high) > 22 for other, high, wide in self.taken)


def _bezier(curve: Sequence[Tuple[float, float]], at: float) -> Tuple[float, float]:
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = curve
    a, b, c, d = (1 - at) ** 3, 3 * (1 - at) ** 2 * at, 3 * (1 - at) * at**2, at**3
    return a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy


def _line(curve: Sequence[Tuple[float, float]], broken: bool, color: str, about: str) -> str:
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = curve
    dash = {"stroke_dasharray": "7 6"} if broken else {}
    path = f"M{ax:g} {ay:g}C{bx:g} {by:g} {cx:g} {cy:g} {dx:g} {dy:g}"
    return _tag("path", _tag("title", escape(about)), d=path, fill="none", stroke=color, stroke_width=3, **dash)


def _draw_links(picture: _Picture, cards: Mapping[str, _Card], labels: _Labels) -> List[str]:
    drawn = []
    for number, link in enumerate(picture.links):
        (one, near), (two, far) = link.ends
        if one not in cards or two not in cards:
            continue
        start, stop = cards[one], cards[two]
        if start.x > stop.x:
            start, stop, near, far = stop, start, far, near
        # Two nodes of one column are joined around the outside.
        outer = start.x == stop.x
        (ax, ay), (dx, dy) = start.end(near, outer), stop.end(far, outer)
        reach = (56 + 32 * (number % 2)) * (-1 if start.left else 1) if outer else (dx - ax) / 2
        curve = [(ax, ay), (ax + reach, ay), (dx + reach if outer else dx - reach, dy), (dx, dy)]
        color = _COLORS.get(link.state, _COLORS["unproven"])
        about = f"rail {link.rail} {link.network}: {one} {near} - {two} {far}, {link.state}"
        drawn.append(_line(curve, link.broken, color, f"{about} {link.reason}".strip()))
        state = f" {link.state}" if link.broken else ""
        words = f"rail {link.rail}{state}" if outer else f"rail {link.rail} \u00b7 {link.network}{state}"
        labels.add(curve, _clip(words, 40), color)
    return drawn


def _draw_switch(picture: _Picture, cards: Mapping[str, _Card], middle: float) -> List[str]:
    """A box with a row for each rail, and a line from each port to its rail."""
    rails = list(dict.fromkeys((link.rail, link.network) for link in picture.links))
    width, height = 190, 50 + 34 * max(1, len(rails))
    x, top = _MARGIN + _CARD + (_GAP - width) / 2, middle - height / 2
    place = {rail: top + 62 + 34 * number for number, (rail, _) in enumerate(rails)}
    states: Dict[Tuple[str, str, str], Set[str]] = {}
    for link in picture.links:
        for host, netdev in link.ends:
            states.setdefault((host, netdev, link.rail), set()).add(link.state)
    weak = picture.weak_ends()
    drawn = []
    for end, seen in states.items():
        host, netdev, rail = end
        if host not in cards:
            continue
        card = cards[host]
        (ax, ay), dx, dy = card.end(netdev, False), x + (0 if card.left else width), place[rail]
        half = (dx - ax) / 2
        worst = "failed" if end in weak else "unproven" if "unproven" in seen else "ok"
        curve = [(ax, ay), (ax + half, ay), (dx - half, dy), (dx, dy)]
        drawn.append(
            _line(curve, end in weak, _COLORS[worst], f"rail {rail}: {host} {netdev}, {', '.join(sorted(seen))}")
        )
    drawn += [
        _tag("rect", x=x, y=top, width=width, height=height, rx=10, fill="#24405c"),
        _words(x + width / 2, top + 26, "switch", "head", text_anchor="middle"),
    ]
    for rail, network in rails:
        drawn.append(_tag("rect", x=x + 10, y=place[rail] - 14, width=width - 20, height=28, rx=5, fill="#e6eef6"))
        drawn.append(
            _words(x + width / 2, place[rail] + 4, f"rail {rail} \u00b7 {network}", "", 28, text_anchor="middle")
        )
    return drawn


def _draw_list(picture: _Picture, top: float) -> Tuple[List[str], float]:
    """Broken rails and findings below the picture."""
    rows = [
        ("error", f"rail {link.rail} {link.network} {link.state}: {link.ends[0][0]} {link.ends[0][1]} - "
         f"{link.ends[1][0]} {link.ends[1][1]}" + (f": {link.reason}" if link.reason else ""))
        for link in picture.links
        if link.broken
    ]  # fmt: skip
    rows += _finding_lines(picture.findings)
    drawn: List[str] = []
    for severity, row in rows:
        color = "bad" if severity == "error" else "warning" if severity == "warning" else "small"
        fill = {"bad": "#c62828", "warning": "#e0a030"}.get(color, "#9aa6b2")
        drawn.append(_tag("rect", x=40, y=top - 9, width=10, height=10, rx=2, fill=fill))
        for part in textwrap.wrap(row, 165) or [""]:
            drawn.append(_words(58, top, part, color))
            top += 18
        top += 4
    return drawn, top


def _legend(y: float) -> List[str]:
    drawn, x = [], 40
    for name, words in (("ok", "proven"), ("unproven", "not proven"), ("failed", "failed or left out")):
        drawn.append(_line([(x, y), (x + 10, y), (x + 20, y), (x + 34, y)], name == "failed", _COLORS[name], words))
        drawn.append(_words(x + 42, y + 4, words, "small"))
        x += 56 + 7 * len(words)
    return drawn


def svg(survey: Mapping[str, Any]) -> str:
    """A standalone SVG document; red and dashed is what is wrong."""
    picture = _picture(survey)
    left, right = _columns(picture.nodes)
    heights = [[_card(node, 0, 0, True).height for node in column] for column in (left, right)]
    tall = max([sum(column) + 50 * (len(column) - 1) for column in heights if column], default=100)
    cards: Dict[str, _Card] = {}
    for number, column in enumerate((left, right)):
        room = tall - sum(heights[number])
        spare = room / (len(column) + 1) if len(column) == 1 else 0
        between = room / (len(column) - 1) if len(column) > 1 else 0
        y = 92 + spare
        for node in column:
            card = _card(node, _MARGIN + number * (_CARD + _GAP), round(y), number == 0)
            cards[node.host] = card
            y += card.height + between
    width = 2 * (_MARGIN + _CARD) + _GAP
    labels = _Labels()
    if picture.topology == "switch":
        lines = _draw_switch(picture, cards, 92 + tall / 2)
    else:
        lines = _draw_links(picture, cards, labels)
    findings, bottom = _draw_list(picture, 92 + tall + 50)
    legend = _legend(bottom + 6)
    height = round(bottom + 34)
    counts = f"{len(picture.nodes)} nodes, {len(picture.links)} links"
    body = [
        _tag("style", escape(_STYLE)),
        _tag("rect", x=0, y=0, width=width, height=height, rx=14, fill="#f3f6f9"),
        _words(40, 46, f"Fabric {picture.topology}".strip(), "title", 60),
        _words(40, 66, counts, "small"),
        *lines,
        *(line for card in cards.values() for line in _draw_card(card)),
        *labels.drawn,
        *findings,
        *legend,
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return "\n".join([head, *body, "</svg>", ""])
