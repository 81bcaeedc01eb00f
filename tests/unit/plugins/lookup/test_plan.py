# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The lookup as a user meets it: `ansible-playbook playbooks/plan.yml` with an inventory of his own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ansible_cli
import pytest
import yaml
from ansible_collections.sparkwright.dsv41.plugins.lookup import plan

PLAN = ansible_cli.ROOT / "playbooks/plan.yml"
RECIPES = ansible_cli.ROOT / "roles/recipe/files"
CLUSTER = {"spark_cluster": "two", "spark_recipe": "lab"}
GONE = object()


def inventory(directory: Path, count: int = 2, everywhere: dict[str, Any] | None = None, **hosts: Any) -> Path:
    """`everywhere` is group_vars/all; each further argument is the variables of one host."""
    names = [f"spark{n}" for n in range(1, count + 1)]
    variables = {name: {"spark_fabric_address": f"10.77.0.{n}"} for n, name in enumerate(names, 1)}
    for name, values in hosts.items():
        variables[name] = {key: value for key, value in {**variables[name], **values}.items() if value is not GONE}
    head = {"hosts": {names[0]: variables[names[0]]}}
    workers = {"hosts": {name: variables[name] for name in names[1:]}}
    groups = {"all": {"children": {"sparks": {"children": {"spark_head": head, "spark_workers": workers}}}}}
    values = {key: value for key, value in {**CLUSTER, **(everywhere or {})}.items() if value is not GONE}
    (directory / "group_vars/all").mkdir(parents=True)
    (directory / "hosts.yml").write_text(yaml.safe_dump(groups))
    (directory / "group_vars/all/cluster.yml").write_text(yaml.safe_dump(values))
    return directory


def refused(*arguments: Any) -> str:
    done = ansible_cli.run("playbook", PLAN, *arguments)
    text = ansible_cli.text(done)
    assert done.returncode != 0, text
    assert "no host was contacted" in text
    return text


def accepted(*arguments: Any) -> str:
    done = ansible_cli.run("playbook", PLAN, *arguments)
    text = ansible_cli.text(done)
    assert done.returncode == 0, text
    assert "[WARNING]" not in text and "[DEPRECATION WARNING]" not in text
    return text


def test_every_problem_at_once(tmp_path: Path) -> None:
    everywhere = {
        "spark_api_prot": 8000,
        "spark_gid_index": 3,
        "spark_rendezvous_port": 8000,
        "spark_recipe_overrides": {"arg": {}, "memory": {"kv_gb": 1}, "env": {"VLLM_API_KEY": "MARKER"}},
    }
    hosts = {"spark1": {"spark_data_dir": "/a"}, "spark2": {"spark_data_dir": "/b", "spark_fabric_address": "spark2"}}
    text = refused("-i", inventory(tmp_path, 4, everywhere, **hosts))
    for problem in (
        "spark_api_prot is not a known variable; did you mean spark_api_port?",
        "spark_gid_index was removed; use nothing: NCCL chooses the GID",
        "spark_fabric_topology is missing for 4 nodes; needed one of: switch, ring4",
        "spark_api_port and spark_rendezvous_port are both 8000",
        "spark2: spark_fabric_address is 'spark2'; needed an IPv4 address",
        "spark_data_dir differs between hosts",
        "recipe lab: the inventory has 4 nodes; allowed: 2",
        "spark_recipe_overrides: unknown key 'arg'; did you mean 'args'?",
        "spark_recipe_overrides: memory: unknown key 'kv_gb'; did you mean 'kv_gib'?",
        "spark_recipe_overrides: env VLLM_API_KEY may hold a secret; a plan holds none",
    ):
        assert problem in text, problem
    assert "MARKER" not in text


@pytest.mark.parametrize(
    ("everywhere", "arguments", "problem"),
    [
        (
            {"spark_recipe": "labb"},
            (),
            "unknown recipe 'labb'; known: exl3-b12x, exl3-tensorfold, exl3-vllm, lab, native-sglang",
        ),
        ({"spark_recipe": GONE}, (), "spark_recipe is missing; needed name in inventory group_vars/all"),
        (
            {},
            ("--extra-vars", "spark_head_ip=10.0.0.1"),
            "spark_head_ip was removed; use spark_fabric_address of the head",
        ),
    ],
)
def test_refused(everywhere: dict[str, Any], arguments: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    text = refused("-i", inventory(tmp_path, everywhere=everywhere), *arguments)
    assert problem in text


def recipes(directory: Path, data: dict[str, Any]) -> str:
    """A directory of recipes with one recipe, `lab`, and the project's engines."""
    (directory / "recipes").mkdir(parents=True)
    (directory / "recipes/lab.yml").write_text(yaml.safe_dump(data, sort_keys=False))
    for name in ("engines", "mounted", "fabric.yml", "weights.yml"):
        (directory / name).symlink_to(RECIPES / name)
    return f"recipe_directory={directory}"


def test_every_problem_of_a_recipe_at_once(tmp_path: Path) -> None:
    data = yaml.safe_load((RECIPES / "recipes/lab.yml").read_text())
    data.update(engine="vlm", image="none", argz={}, nodes={3: {}})
    text = refused("-i", inventory(tmp_path / "inventory"), "-e", recipes(tmp_path / "recipe", data))
    for problem in (
        "unknown engine 'vlm'; known: sglang, tensorfold, vllm",
        "unknown image 'none'; known: exl3-b12x, exl3-tensorfold, exl3-vllm, exl3-vllm-cpu, native-sglang",
        "recipe lab: unknown key 'argz'; did you mean 'args'?",
        "recipe lab: the inventory has 2 nodes; allowed: 3",
    ):
        assert problem in text, problem


def test_precedence_and_sources(tmp_path: Path) -> None:
    """C1: -e over inventory over node overlay over base, in one plan, each value shown with where it came from."""
    data = yaml.safe_load((RECIPES / "recipes/lab.yml").read_text())
    data["args"] = {"--a": 11, "--b": 11, "--c": 11, "--d": 11, "--gone": True}
    data["nodes"] = {2: {"args": {"--b": 12, "--c": 12, "--d": 12}}}
    overrides = {"args": {"--c": 13, "--d": 13, "--gone": None}, "env": {"X": 1}}
    text = accepted(
        "-i",
        inventory(tmp_path / "inventory", everywhere={"spark_recipe_overrides": overrides, "spark_api_port": 8001}),
        "-e",
        json.dumps({"spark_recipe_set": {"args": {"--d": 14}}, "spark_api_port": 9000}),
        "-e",
        recipes(tmp_path / "recipe", data),
    )
    for line in (
        "--a 11 [recipe lab]",
        "--b 12 [recipe lab nodes.2]",
        "--c 13 [inventory spark_recipe_overrides]",
        "--d 14 [extra vars spark_recipe_set]",
        "--port 9000 [engine vllm]",
        "env X=1 [inventory spark_recipe_overrides]",
        "left out on purpose: --gone [inventory spark_recipe_overrides]",
        "left out on purpose: NCCL_IB_GID_INDEX [fabric rdma]",
        "http://127.0.0.1:9000/v1 [default of spark_bind_address; extra vars spark_api_port]",
    ):
        assert line in text, line
    # C2: on both ranks.
    assert text.count("--d 14") == 2


def test_values_that_are_templates(tmp_path: Path) -> None:
    """Written once for all hosts: one that is each host's own, one that reads the variables of the head."""
    everywhere = {
        "spark_fabric_address": "{{ rail }}",
        "spark_bind_address": "{{ hostvars[groups['spark_head'][0]].ansible_host }}",
        "spark_data_dir": "/srv/{{ spark_cluster }}",
    }
    hosts: dict[str, Any] = {
        f"spark{n}": {"ansible_host": f"10.76.0.{n}", "rail": f"10.77.0.{n}", "spark_fabric_address": GONE}
        for n in (1, 2)
    }
    text = accepted("-i", inventory(tmp_path, everywhere=everywhere, **hosts))
    assert "rank 0 on spark1 (10.77.0.1)" in text and "rank 1 on spark2 (10.77.0.2)" in text
    assert "http://10.76.0.1:8000/v1" in text
    assert "/srv/two/secrets" in text


def test_limit_does_not_change_the_plan(tmp_path: Path) -> None:
    text = accepted("-i", inventory(tmp_path), "--limit", "spark2")
    assert "recipe lab on 2 nodes" in text and "rank 0 on spark1" in text


@pytest.fixture
def project(tmp_path: Path) -> tuple[Path, Path]:
    """Directories of images and kernels, with what an editor and a build leave behind."""
    files = {
        "images/images.lock.yml": "images: {x: {context: e, base: b, requirements: r.txt}}\n",
        "images/e/Dockerfile": "FROM b\n",
        "images/e/r.txt": "a==1\n",
        "kernels/pyproject.toml": "[project]\n",
        "kernels/setup.py": "setup()\n",
        "kernels/src/k/__init__.py": "",
        "kernels/src/k/kernel.cu": "__global__\n",
        "kernels/src/k/__pycache__/x.pyc": "1",
        "kernels/src/k/.ruff_cache/x": "1",
        "kernels/src/k.egg-info/PKG-INFO": "1",
        "kernels/src/k/libk.so": "1",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path / "images", tmp_path / "kernels"


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("images/images.lock.yml", True),
        ("images/e/Dockerfile", True),
        ("images/e/r.txt", True),
        ("kernels/pyproject.toml", True),
        ("kernels/setup.py", True),
        ("kernels/src/k/__init__.py", True),
        ("kernels/src/k/kernel.cu", True),
        ("kernels/src/k/new.yml", True),
        ("kernels/src/k/__pycache__/x.pyc", False),
        ("kernels/src/k/.ruff_cache/x", False),
        ("kernels/src/k.egg-info/PKG-INFO", False),
        ("kernels/src/k/libk.so", False),
        ("kernels/tests/test_x.py", False),
    ],
)
def test_the_image_name_follows_its_inputs(path: str, changes: bool, project: tuple[Path, Path]) -> None:
    directory, kernels = project
    before, problems = plan._image("x", directory, plan._kernels(kernels), {})
    assert problems == [] and before["name"].startswith("sparkwright/x:")
    target = project[0].parent / path
    target.parent.mkdir(parents=True, exist_ok=True)
    old = target.read_text() if target.exists() else ""
    target.write_text(old.replace("base: b", "base: c") if "lock" in path else f"{old}# more\n")
    after, _ = plan._image("x", directory, plan._kernels(kernels), {})
    assert (before["name"] != after["name"]) is changes


def test_an_unknown_image(project: tuple[Path, Path]) -> None:
    assert plan._image("y", project[0], {}, {}) == ({}, ["unknown image 'y'; known: x"])


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "unknown recipe 'a'; known: b"), ("a: [", "a.yml: while parsing"), ("- 1", "a.yml: needed a mapping")],
)
def test_a_file_that_cannot_be_read(content: str | None, problem: str, tmp_path: Path) -> None:
    (tmp_path / "b.yml").write_text("{}")
    if content is not None:
        (tmp_path / "a.yml").write_text(content)
    data, (found,) = plan._read(tmp_path, "recipe", "a")
    assert data == {} and problem in found


@pytest.mark.parametrize(
    ("entry", "stated", "reference", "problem"),
    [
        ({"published": "r.example/x", "digest": f"sha256:{'a' * 64}"}, "", f"r.example/x@sha256:{'a' * 64}", ""),
        (
            {"published": "r.example/x", "digest": f"sha256:{'a' * 64}"},
            f"mine.example:5000/y@sha256:{'b' * 64}",
            f"mine.example:5000/y@sha256:{'b' * 64}",
            "",
        ),
        ({"published": "r.example/x", "digest": ""}, "", "", "is pinned by nobody; needed r.example/x@sha256:DIGEST"),
        ({"published": "", "digest": "", "unpinned": "is home-made"}, "", "", "is home-made; needed NAME@sha256:"),
        ({"published": "r.example/x", "digest": ""}, "r.example/x:tag", "", "is 'r.example/x:tag'; needed"),
    ],
)
def test_images_of_others_are_pulled_by_digest(
    entry: dict[str, str], stated: str, reference: str, problem: str, project: tuple[Path, Path]
) -> None:
    lock = project[0] / "images.lock.yml"
    lock.write_text(yaml.safe_dump({"images": {"x": entry}}))
    found, problems = plan._image("x", project[0], {}, {"spark_images": {"x": stated} if stated else {}})
    assert found["name"] == reference
    assert len(problems) == bool(problem) and problem in "".join(problems)
