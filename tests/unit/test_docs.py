"""The documentation says what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_variables_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate_variables.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (ROOT / "docs/variables.md").read_text()
    assert page == generate.page(), "run python docs/generate_variables.py"


def test_the_readme_names_every_verb_and_every_variable_of_a_cluster() -> None:
    readme = (ROOT / "README.md").read_text()
    for playbook in (ROOT / "playbooks").glob("[a-z]*.yml"):
        assert playbook.stem == "deploy" or playbook.name in readme, playbook.name
    for line in (ROOT / "docs/variables.md").read_text().split("## Role")[0].splitlines():
        if line.startswith("| `spark_"):
            assert line.split("`")[1] in readme, line
