# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What must agree across files: defaults and specifications of roles, options and documentation of plugins, tags of
playbooks, scenarios of Molecule.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ansible_cli
import pytest
import yaml
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.action import ActionBase
from ansible.template import Templar
from ansible_collections.sparkwright.dsv41.plugins.filter.adapters import FilterModule

ROOT = ansible_cli.ROOT
NAMESPACE = "ansible_collections.sparkwright.dsv41.plugins"
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
MODULES = sorted(path.stem for path in (ROOT / "plugins/modules").glob("*.py"))
FILTERS = sorted(FilterModule().filters())
PLAYBOOKS = sorted([ROOT / "site.yml", *(ROOT / "playbooks").glob("*.yml")])
# Words after which a role, a playbook or a scenario names variables of its own.
SETS = ("vars", "ansible.builtin.set_fact", "set_fact")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text()) if path.exists() else None


def walk(data: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in a document."""
    if isinstance(data, dict):
        yield data
        for value in data.values():
            yield from walk(value)
    elif isinstance(data, list):
        for value in data:
            yield from walk(value)


def mappings(*patterns: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            for mapping in walk(load(path)):
                yield path, mapping


def role_files(role: str) -> list[Path]:
    """Without what Python compiled of files that tests import."""
    return [path for path in sorted((ROOT / "roles" / role).rglob("*")) if path.is_file() and path.suffix != ".pyc"]


def specs(role: str) -> dict[str, Any]:
    return load(ROOT / "roles" / role / "meta/argument_specs.yml")["argument_specs"]  # type: ignore[no-any-return]


def defaults(role: str) -> dict[str, Any]:
    return load(ROOT / "roles" / role / "defaults/main.yml") or {}


# Roles


@pytest.mark.parametrize("role", ROLES)
def test_defaults_are_the_specified_options(role: str) -> None:
    options = {name for entry in specs(role).values() for name in entry.get("options", {})}
    assert set(defaults(role)) == options


@pytest.mark.parametrize("role", ROLES)
def test_every_entry_point_exists_and_every_option_is_described(role: str) -> None:
    for entry, content in specs(role).items():
        assert (ROOT / "roles" / role / f"tasks/{entry}.yml").exists(), entry
        assert content["short_description"]
        for name, option in content.get("options", {}).items():
            assert option["type"] and option["description"], name
            # Ansible does not apply it for roles: the value is in defaults, and told in the description.
            assert "default" not in option, name


@pytest.mark.parametrize("role", ROLES)
def test_variables_begin_with_the_name_of_the_role(role: str) -> None:
    names = {name for kind in ("defaults", "vars") for name in load(ROOT / f"roles/{role}/{kind}/main.yml") or {}}
    for _, mapping in mappings(f"roles/{role}/tasks/*.yml"):
        names.update(name for word in SETS for name in mapping.get(word) or {})
        names.update([mapping["register"]] if "register" in mapping else [])
        names.update([mapping["loop_var"]] if "loop_var" in mapping else [])
    wrong = [name for name in names if not re.match(rf"({role}|__{role})_|ansible_", name)]
    assert wrong == []


@pytest.mark.parametrize("role", ROLES)
def test_every_default_is_used(role: str) -> None:
    skipped = {ROOT / f"roles/{role}/{name}" for name in ("defaults/main.yml", "meta/argument_specs.yml")}
    text = "\n".join(path.read_text() for path in role_files(role) if path not in skipped)
    text += "\n".join(str(value) for value in defaults(role).values())
    assert [name for name in defaults(role) if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("entry", [(role, entry) for role in ROLES for entry in specs(role)], ids="-".join)
def test_defaults_alone_satisfy_the_specification(entry: tuple[str, str]) -> None:
    """With an inventory and the plan that follows from it, no role needs anything else."""
    role, name = entry
    plan = json.loads((ROOT / "tests/fixtures/plans/lab-2.json").read_text())
    loader = DataLoader()
    path = ROOT / "roles" / role
    known = loader.load_from_file(str(path / "defaults/main.yml"), trusted_as_template=True) or {}
    facts = {
        "recipe_plan": plan,
        "recipe_rank": plan["ranks"][0],
        "fabric_facts": {"from_head": {"local": "10.77.0.1", "remote": "10.77.0.1"}},
        "fabric_survey": {
            "ranks": {rank["host"]: {"hcas": "", "from_head": {"local": rank["address"]}} for rank in plan["ranks"]}
        },
        "inventory_hostname": plan["ranks"][0]["host"],
        "role_path": str(path),
    }
    templar = Templar(loader, variables={**known, **facts})
    options = specs(role)[name].get("options", {})
    values = {option: templar.template(known[option]) for option in options}
    result = ArgumentSpecValidator(options).validate(values)
    assert result.error_messages == []


def test_what_is_included_has_a_specification_and_no_extension() -> None:
    """A name with its extension, or without an entry point, is run without any check of its arguments."""
    seen = set()
    for path, mapping in mappings(
        "roles/*/tasks/*.yml", "playbooks/*.yml", "molecule/**/*.yml", ".config/**/*.yml", "tests/lab/*.yml"
    ):
        for word in ("include_role", "import_role", "ansible.builtin.include_role", "ansible.builtin.import_role"):
            if word not in mapping or "{{" in mapping[word]["name"]:
                continue
            role, entry = mapping[word]["name"], mapping[word].get("tasks_from", "main")
            assert entry in specs(role), f"{path}: {role} {entry}"
            seen.add((role, entry))
    assert {("engine", "stop"), ("fabric", "facts"), ("recipe", "main")} <= seen
    assert {role for role, _ in seen} == set(ROLES), "every role is used"


# Plugins


def documentation(kind: str, name: str) -> tuple[dict[str, Any], Any, dict[str, Any], Any]:
    module = importlib.import_module(f"{NAMESPACE}.{kind}.{name}")
    document = yaml.safe_load(module.DOCUMENTATION)
    return document, yaml.safe_load(module.EXAMPLES), yaml.safe_load(module.RETURN), module


class Asked(Exception):
    """Carries the argument specification that a module or an action asked for."""


def ask(spec: Any) -> None:
    raise Asked(spec)


def argument_spec(name: str) -> dict[str, Any]:
    """The specification that really is used: of the module, or of the action plugin in its place."""
    if not hasattr(importlib.import_module(f"{NAMESPACE}.modules.{name}"), "main"):
        action = importlib.import_module(f"{NAMESPACE}.action.{name}").ActionModule
        with (
            mock.patch.object(ActionBase, "run", lambda *_: {}),
            mock.patch.object(action, "validate_argument_spec", lambda self, argument_spec: ask(argument_spec)),
            pytest.raises(Asked) as asked,
        ):
            action.run(object.__new__(action))
        return asked.value.args[0]  # type: ignore[no-any-return]
    main = importlib.import_module(f"{NAMESPACE}.modules.{name}").main
    with (
        mock.patch.object(AnsibleModule, "__init__", lambda self, argument_spec, **_: ask(argument_spec)),
        pytest.raises(Asked) as asked,
    ):
        main()
    return asked.value.args[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODULES)
def test_options_of_a_module_are_the_documented_ones(name: str) -> None:
    documented = documentation("modules", name)[0]["options"]
    used = argument_spec(name)
    keys = ("type", "default", "choices", "required", "elements", "aliases")

    def facts(option: dict[str, Any]) -> dict[str, Any]:
        return {key: option[key] for key in keys if option.get(key) not in (None, False) or key == "default"} | {
            "type": option.get("type", "str")
        }

    assert {key: facts({"default": None, **value}) for key, value in used.items()} == {
        key: facts({"default": None, **value}) for key, value in documented.items()
    }


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_documented(name: str) -> None:
    document, examples, returned, _ = documentation("modules", name)
    assert document["module"] == name
    assert {"check_mode", "diff_mode", "idempotent"} <= set(document["attributes"])
    for attribute in document["attributes"].values():
        assert attribute["support"] in ("full", "partial", "none") and attribute["description"]
    assert all(option["description"] for option in document["options"].values())
    assert returned
    options = argument_spec(name)
    for task in examples:
        arguments = task[f"sparkwright.dsv41.{name}"]
        assert set(arguments) <= set(options)
        assert {key for key, option in options.items() if option.get("required")} <= set(arguments)


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_is_documented(name: str) -> None:
    data = load(ROOT / f"plugins/filter/{name}.yml")
    document = data["DOCUMENTATION"]
    assert document["name"] == name and document["short_description"] and document["description"]
    first, *others = inspect.signature(FilterModule().filters()[name]).parameters.values()
    assert set(document["options"]) == {"_input", *(parameter.name for parameter in others)}, first
    assert [word.strip() for word in document.get("positional", "").split(",") if word] == [
        each.name for each in others
    ]
    for parameter in others:
        option = document["options"][parameter.name]
        assert option.get("required", False) is (parameter.default is parameter.empty)
        assert option.get("default") == (None if parameter.default is parameter.empty else parameter.default)
    assert f"sparkwright.dsv41.{name}" in str(yaml.safe_load(data["EXAMPLES"]))
    assert data["RETURN"]["_value"]["type"]


def test_no_documentation_of_filters_that_are_gone() -> None:
    assert sorted(path.stem for path in (ROOT / "plugins/filter").glob("*.yml")) == FILTERS


@pytest.mark.parametrize(
    ("kind", "names"),
    [("module", MODULES), ("filter", FILTERS), ("lookup", ["plan"]), ("callback", ["progress"])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ansible_doc_shows_every_plugin(kind: str, names: list[str]) -> None:
    full = [f"sparkwright.dsv41.{name}" for name in names]
    done = ansible_cli.run("doc", "-t", kind, "--json", *full)
    assert done.returncode == 0, done.stdout
    shown = json.loads(done.stdout)
    assert set(shown) == set(full)
    assert all(plugin["doc"]["short_description"] for plugin in shown.values())


# Playbooks


def included(play: dict[str, Any]) -> list[dict[str, Any]]:
    return [task for task in play.get("tasks", []) if "ansible.builtin.include_role" in task]


DEPLOYED = [task for play in load(ROOT / "playbooks/deploy.yml") for task in included(play)]


def test_tags_are_the_roles_and_always() -> None:
    done = ansible_cli.run("playbook", "site.yml", "-i", "inventory/lab", "--list-tags")
    assert done.returncode == 0, done.stdout
    tags = {tag for words in re.findall(r"TASK TAGS: \[(.*)\]", done.stdout) for tag in words.split(", ") if tag}
    assert tags == {"always", *(task["ansible.builtin.include_role"]["name"] for task in DEPLOYED)}


def test_a_tag_reaches_all_of_its_role_and_nothing_else() -> None:
    """`roles:` and `import_role` would check the arguments of every other role too."""
    for task in DEPLOYED:
        role = task["ansible.builtin.include_role"]
        assert task["tags"] == role["apply"]["tags"] == [role["name"]]
    for path in PLAYBOOKS:
        for play in load(path):
            assert "roles" not in play, path
            assert play.get("hosts", "sparks") in ("sparks", "localhost"), "group names are literal"


@pytest.mark.parametrize("role", sorted({task["ansible.builtin.include_role"]["name"] for task in DEPLOYED}))
def test_every_deployed_role_has_a_scenario(role: str) -> None:
    directory = ROOT / "molecule" / role
    assert (directory / "molecule.yml").exists()
    shared = load(ROOT / ".config/molecule/config.yml") or {}
    converge = shared.get("ansible", {}).get("playbooks", {}).get("converge", "")
    converge = converge.replace("${MOLECULE_PROJECT_DIRECTORY}", str(ROOT))
    assert (directory / "converge.yml").exists() or Path(converge).is_file()
    tests = "\n".join(path.read_text() for path in directory.glob("tests/test_*.py"))
    assert re.search(r"^def test_", tests, re.MULTILINE)


@pytest.mark.parametrize(
    "path", [path for path in PLAYBOOKS if path.name != "deploy.yml" and path.name[0] != "_"], ids=str
)
def test_every_verb_begins_with_its_usage(path: Path) -> None:
    comment = re.match(r"---\n((?:#.*\n)+)", path.read_text())
    assert comment and f"ansible-playbook {path.relative_to(ROOT)} -i inventory/" in comment[1]


def test_every_playbook_passes_the_syntax_check() -> None:
    done = ansible_cli.run("playbook", "--syntax-check", "-i", "inventory/lab", *PLAYBOOKS)
    assert done.returncode == 0, done.stdout
    assert all(f"playbook: {path}" in done.stdout for path in PLAYBOOKS)
    assert "[WARNING]" not in done.stdout and "[DEPRECATION" not in done.stdout


# Text


def sources() -> Iterator[tuple[Path, str]]:
    for top in ("plugins", "roles", "playbooks", "molecule", "inventory", "images"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                yield path, path.read_text()


@pytest.mark.parametrize(
    ("pattern", "tops"),
    [
        # A recipe is data: nothing asks which one it is.
        (
            r"(spark_recipe|recipe_plan(\.|\[.)recipe(.\])?|\brecipe(\.id|\[.id.\])?)\s*(==|!=|\bin\b *[\[(])",
            "plugins roles",
        ),
        # Sizes are powers of two.
        (r"\bGB\b", "plugins roles playbooks"),
        # A key with an empty value is not an unset one.
        (r"NCCL_IB_GID_INDEX:\s*(''|\"\")?\s*$", "roles inventory"),
        # Facts are read by their dictionary; host keys are checked.
        (r"ansible_(default_ipv4|hostname|processor|memtotal)", "plugins roles playbooks"),
        (
            r"StrictHostKeyChecking[= ]no|host_key_checking *[=:] *[Ff]alse",
            "plugins roles playbooks inventory molecule",
        ),
    ],
)
def test_never_in_the_project(pattern: str, tops: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in sources()
        if path.relative_to(ROOT).parts[0] in tops.split()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == []


def test_what_makes_a_secret_is_not_logged() -> None:
    seen = 0
    for path, mapping in mappings("roles/*/tasks/*.yml"):
        action = {key: value for key, value in mapping.items() if "." in key}
        if "lookup('ansible.builtin.password'" in json.dumps(action, default=str):
            seen += 1
            assert mapping.get("no_log") is True and mapping.get("diff") is False, f"{path}: {mapping.get('name')}"
    assert seen
