"""The report lies on the controller; the nodes are as they were."""

import json
from pathlib import Path
from xml.etree import ElementTree

REPORT = Path(__file__).parents[3] / "artifacts/lab"


def test_findings_of_every_node_are_in_the_report(host):
    findings = json.loads((REPORT / "findings.json").read_text())
    assert [finding for finding in findings if finding["severity"] == "error"] == []
    assert (REPORT / "findings.json").stat().st_mode & 0o777 == 0o600


def test_the_picture_shows_every_node_and_port(host):
    for text in ((REPORT / "fabric.txt").read_text(), (REPORT / "fabric.svg").read_text()):
        assert all(name in text for name in ("spark1", "spark2", "enp1s0f0np0", "10.77.0.1", "10.77.0.2"))
    assert ElementTree.parse(REPORT / "fabric.svg").getroot().tag.endswith("svg")
