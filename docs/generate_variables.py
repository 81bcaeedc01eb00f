#!/usr/bin/env python3
"""Write docs/variables.md from the roles' argument_specs and the table of cluster variables."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.sparkwright.dsv41.plugins.module_utils.cluster import REQUIRED, VARIABLES  # noqa: E402

HEAD = """# All variables

Made by `docs/generate_variables.py`; do not edit. A cluster is described by the `spark_*` variables; the variables of
roles follow from them and are for repair and experiments.
"""


def text(description: Any) -> str:
    """An Ansible description as one Markdown line."""
    joined = " ".join(description) if isinstance(description, list) else str(description)
    return re.sub(r"[COVP]\(([^)]*)\)", r"`\1`", " ".join(joined.split()))


def page() -> str:
    lines = [HEAD, "## Cluster", "", "| variable | type | default |", "|---|---|---|"]
    for name, variable in VARIABLES.items():
        default = "required" if variable.default is REQUIRED else f"`{variable.default!r}`"
        place = ", per host" if variable.per_host else ""
        lines.append(f"| `{name}` | {variable.kind}{place} | {default} |")
    for specs in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        options: dict[str, Any] = {}
        for entry in yaml.safe_load(specs.read_text())["argument_specs"].values():
            options |= entry.get("options", {})
        lines += ["", f"## Role {specs.parts[-3]}", "", "| variable | type | meaning |", "|---|---|---|"]
        for name, option in options.items():
            lines.append(f"| `{name}` | {option['type']} | {text(option['description'])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs/variables.md").write_text(page())
