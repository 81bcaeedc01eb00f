# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The project's filters: names for functions of module_utils. Each is documented in the YAML file of its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.sparkwright.dsv41.plugins.module_utils import (
    cabling,
    engine,
    fabric_logs,
    fabric_picture,
    findings,
    images,
    recipe,
    weights,
)


def _log_findings(lines: list[str], host: str, rdma: bool = True) -> list[dict[str, Any]]:
    return [finding.to_dict() for finding in fabric_logs.match(lines, host, rdma)]


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "bind_fabric": recipe.bind_fabric,
            "describe": recipe.describe,
            "engine_changes": engine.changes,
            "fabric_log_findings": _log_findings,
            "fabric_probe_plan": cabling.probe_plan,
            "fabric_survey": cabling.survey_plan,
            "fabric_svg": fabric_picture.svg,
            "fabric_text": fabric_picture.text,
            "finding_lines": findings.lines,
            "gather_findings": findings.gather,
            "image_identity": images.identity,
            "status_findings": engine.status_findings,
            "weights_room": weights.room,
        }
