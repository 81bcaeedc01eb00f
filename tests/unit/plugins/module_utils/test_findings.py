# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding, lines

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
