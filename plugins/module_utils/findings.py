# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""One type for everything that is wrong with a host, wherever it was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterable, List, Mapping, Sequence

SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """What was found on a host, what is needed there, and what repairs it (a command or a tag of site.yml).

    `evidence` is what was seen in full, such as a table or lines of a log.
    """

    id: str
    host: str
    found: str
    needed: str
    repair: str
    severity: str = "error"
    evidence: str = ""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity {self.severity!r} is not one of {', '.join(SEVERITIES)}")

    def to_dict(self) -> Dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """The finding as one line for a terminal."""
        return f"{self.host}: [{self.id}] found {self.found}; needed {self.needed}; repair: {self.repair}"


def gather(results: Mapping[str, Mapping[str, Any]], hosts: Iterable[str]) -> List[Dict[str, Any]]:
    """The findings in the results that Ansible registered, by host; a host that gave none is a finding itself."""
    found: List[Dict[str, Any]] = []
    for host in hosts:
        result = results.get(host, {"unreachable": True})
        if "findings" in result:
            found += result["findings"]
        elif result.get("unreachable"):
            why = (str(result.get("msg") or "").strip() or "no answer").splitlines()[-1]
            found.append(Finding("node.unreachable", host, why, "SSH access", "check power and network").to_dict())
        else:
            why = str(result.get("msg", "no result"))
            found.append(Finding("node.check", host, why, "a check that runs", "see the error").to_dict())
    return found


def unique(findings: Iterable[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """Findings without repetition; an unreachable host is told once."""
    seen: Dict[Any, Dict[str, Any]] = {}
    for finding in findings:
        key = (finding["host"], finding["id"], "" if finding["id"] == "node.unreachable" else finding["found"])
        seen.setdefault(key, dict(finding))
    return list(seen.values())


def lines(findings: Iterable[Mapping[str, Any]], severity: str = "error") -> List[str]:
    """Lines of all findings of one severity, in host order; evidence follows its finding, indented."""
    chosen = [Finding(**finding) for finding in unique(findings) if finding.get("severity", "error") == severity]
    return [
        line
        for finding in sorted(chosen, key=lambda finding: (finding.host, finding.id))
        for line in (finding.line(), *(f"    {row}" for row in finding.evidence.splitlines()))
    ]


def failure(found: Sequence[Finding]) -> Dict[str, Any]:
    """What ``fail_json`` gets when these are the reason."""
    findings = [finding.to_dict() for finding in found]
    return {"msg": "\n".join(lines(findings)), "findings": findings}
