# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The whole plan of every inventory, compared with a file, so that a change of a plan is seen and meant.

SPARKWRIGHT_UPDATE_GOLDEN=1 writes the files anew; read the difference before committing it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path

import ansible_cli
import pytest
import yaml

PLANS = Path(__file__).parents[1] / "fixtures/plans"
# Each recipe with each number of nodes and cabling.
INVENTORIES = {
    "lab-2": ("inventory/lab", "lab", []),
    "exl3-vllm-2": ("inventory/two-sparks", "exl3-vllm", []),
    "exl3-b12x-2": ("inventory/two-sparks", "exl3-b12x", []),
    "exl3-tensorfold-2": ("inventory/two-sparks", "exl3-tensorfold", []),
    "exl3-tensorfold-2-abliterated": ("inventory/two-sparks", "exl3-tensorfold", ["abliterated"]),
    "native-sglang-3": ("inventory/three-sparks", "native-sglang", []),
    "native-sglang-4": ("inventory/four-sparks", "native-sglang", []),
    "native-sglang-4-ring": ("inventory/four-sparks-ring", "native-sglang", []),
}
DATA = ansible_cli.ROOT / "roles/recipe/files"
# What a cluster has to pin itself, with values that are nobody's.
PINS = {
    "spark_weights_revisions": {
        name: "0" * 40
        for name, entry in yaml.safe_load((DATA / "weights.yml").read_text()).items()
        if not entry["revision"]
    },
    "spark_images": {
        name: f"registry.example/{name}@sha256:{'0' * 64}"
        for name, entry in yaml.safe_load((ansible_cli.ROOT / "images/images.lock.yml").read_text())["images"].items()
        if "context" not in entry and not entry["digest"]
    },
}

# Resolves the plan as every playbook does, and writes it to a file on this machine.
PLAYBOOK = f"""
- ansible.builtin.import_playbook: {ansible_cli.ROOT}/playbooks/_prelude.yml

- hosts: sparks
  gather_facts: false
  tasks:
    - ansible.builtin.copy:
        content: "{{{{ recipe_plan | to_json }}}}"
        dest: "{{{{ plan_file }}}}"
        mode: "0600"
      delegate_to: localhost
      run_once: true
"""


def plan_of(name: str, directory: Path) -> str:
    """The plan as text, without what depends on the sources of the image and on where the project lies."""
    playbook, written = directory / "plan.yml", directory / "plan.json"
    playbook.write_text(PLAYBOOK)
    inventory, chosen, options = INVENTORIES[name]
    given = {"plan_file": str(written), "spark_recipe": chosen, "spark_recipe_options": options, **PINS}
    done = ansible_cli.run("playbook", playbook, "-i", inventory, "-e", json.dumps(given))
    assert done.returncode == 0, done.stdout
    text = json.dumps(json.loads(written.read_text()), indent=1, sort_keys=True)
    text = re.sub(r'("name": "sparkwright/[^:"]+:|"kernels": "|/files/)[0-9a-f]{12}', r"\1TAG", text)
    return re.sub(re.escape(str(ansible_cli.ROOT)), "PROJECT", text) + "\n"


@pytest.mark.parametrize("name", INVENTORIES)
def test_the_plan_is_the_golden_one(name: str, tmp_path: Path) -> None:
    golden = PLANS / f"{name}.json"
    found = plan_of(name, tmp_path)
    if os.environ.get("SPARKWRIGHT_UPDATE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(found)
    wanted = golden.read_text()
    names = (f"{golden.name} (golden)", f"the plan of {INVENTORIES[name][0]} now")
    difference = difflib.unified_diff(wanted.splitlines(), found.splitlines(), *names, lineterm="")
    assert found == wanted, "\n".join(["the plan has changed:", *difference])


def test_every_inventory_has_a_golden_plan() -> None:
    here = {str(path.parent.relative_to(ansible_cli.ROOT)) for path in ansible_cli.ROOT.glob("inventory/*/hosts.yml")}
    assert {inventory for inventory, _, _ in INVENTORIES.values()} == here


def test_every_recipe_and_number_of_nodes_has_a_golden_plan() -> None:
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in (DATA / "recipes").glob("*.yml")}
    wanted = {(name, count) for name, data in recipes.items() for count in data["nodes"]}
    plans = [json.loads((PLANS / f"{name}.json").read_text()) for name in INVENTORIES]
    assert {(plan["recipe"], plan["world_size"]) for plan in plans} == wanted
    assert {path.stem for path in PLANS.glob("*.json")} == set(INVENTORIES)
