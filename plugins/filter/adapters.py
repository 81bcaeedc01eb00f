# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The project's filters: names for functions of module_utils. Each is documented in the YAML file of its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.sparkwright.dsv41.plugins.module_utils import engine, findings, images, recipe


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "bind_fabric": recipe.bind_fabric,
            "describe": recipe.describe,
            "engine_changes": engine.changes,
            "finding_lines": findings.lines,
            "image_identity": images.identity,
            "status_findings": engine.status_findings,
        }
