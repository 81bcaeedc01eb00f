# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding, gather, lines, unique

PORT = Finding("node.port", "spark2", "port 8000 is taken", "a free port", "stop it")
DISK = Finding("node.disk", "spark2", "1 GiB", "5 GiB", "free space")
HEAD = Finding("node.disk", "spark1", "2 GiB", "5 GiB", "free space")
NOTE = Finding("node.note", "spark1", "x", "y", "z", severity="info")


def test_a_line_names_host_value_found_value_needed_and_repair() -> None:
    assert PORT.line() == "spark2: [node.port] found port 8000 is taken; needed a free port; repair: stop it"


@pytest.mark.parametrize(("severity", "expected"), [("error", [HEAD, DISK, PORT]), ("info", [NOTE]), ("warning", [])])
def test_lines_of_one_severity_in_the_order_of_hosts(severity: str, expected: list[Finding]) -> None:
    found = [finding.to_dict() for finding in (PORT, NOTE, DISK, HEAD)]
    assert lines(found, severity) == [finding.line() for finding in expected]


def test_a_finding_without_severity_is_an_error() -> None:
    found = {key: value for key, value in PORT.to_dict().items() if key != "severity"}
    assert lines([found]) == [PORT.line()]


def test_an_unknown_severity_is_refused() -> None:
    with pytest.raises(ValueError, match="'fatal' is not one of error, warning, info"):
        Finding("a", "b", "c", "d", "e", severity="fatal")


def test_evidence_follows_its_finding() -> None:
    shown = Finding("a", "spark1", "b", "c", "d", evidence="row 1\nrow 2\n")
    assert lines([shown.to_dict(), DISK.to_dict()]) == [shown.line(), "    row 1", "    row 2", DISK.line()]


@pytest.mark.parametrize(
    ("result", "kind", "found"),
    [
        ({"findings": []}, None, None),
        ({"findings": [DISK.to_dict()]}, "node.disk", "1 GiB"),
        ({"findings": [DISK.to_dict()], "failed": True}, "node.disk", "1 GiB"),
        ({"unreachable": True, "msg": "ssh:\nno route to host\n"}, "node.unreachable", "no route to host"),
        ({"unreachable": True}, "node.unreachable", "no answer"),
        (None, "node.unreachable", "no answer"),
        ({"failed": True, "msg": "boom"}, "node.check", "boom"),
        ({"skipped": True}, "node.check", "no result"),
    ],
)
def test_what_ansible_registered(result: dict[str, Any] | None, kind: str | None, found: str | None) -> None:
    results = {} if result is None else {"spark2": result}
    gathered = gather(results, ["spark2"])
    assert [(each["id"], each["host"], each["found"]) for each in gathered] == (
        [(kind, "spark2", found)] if kind else []
    )
    assert all(each["repair"] and each["needed"] for each in gathered)


def test_all_hosts_are_gathered_in_their_order() -> None:
    results = {"spark3": {"findings": [NOTE.to_dict()]}, "spark1": {"findings": [HEAD.to_dict()]}}
    assert [each["id"] for each in gather(results, ["spark1", "spark2", "spark3"])] == [
        "node.disk",
        "node.unreachable",
        "node.note",
    ]


def test_an_unreachable_node_is_told_once() -> None:
    gone = [Finding("node.unreachable", "spark2", why, "SSH", "check") for why in ("no answer", "no route")]
    found = [finding.to_dict() for finding in (*gone, DISK, DISK, HEAD)]
    assert unique(found) == [finding.to_dict() for finding in (gone[0], DISK, HEAD)]
    assert lines(found) == [HEAD.line(), DISK.line(), gone[0].line()]
