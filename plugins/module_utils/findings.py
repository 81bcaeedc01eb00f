# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""One type for everything that is wrong with a host, wherever it was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterable, List, Mapping

SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """What was found on a host, what is needed there, and what repairs it (a command or a tag of site.yml)."""

    id: str
    host: str
    found: str
    needed: str
    repair: str
    severity: str = "error"

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity {self.severity!r} is not one of {', '.join(SEVERITIES)}")

    def to_dict(self) -> Dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """The finding as one line for a terminal."""
        return f"{self.host}: [{self.id}] found {self.found}; needed {self.needed}; repair: {self.repair}"


def lines(findings: Iterable[Mapping[str, Any]], severity: str = "error") -> List[str]:
    """Lines of all findings of one severity, in host order."""
    chosen = [Finding(**finding) for finding in findings if finding.get("severity", "error") == severity]
    return [finding.line() for finding in sorted(chosen, key=lambda finding: (finding.host, finding.id))]
