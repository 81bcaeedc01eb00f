# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
name: plan
author: Sparkwright contributors (@sparkwright)
version_added: 0.1.0
short_description: The plan of the cluster, from recipe and inventory
description:
  - Reads the recipe named by C(spark_recipe), its engine and the image lock, and resolves them with the C(spark_*)
    variables of the given hosts. Touches no host.
options:
  hosts:
    description: Inventory hosts in rank order.
    type: list
    elements: str
    required: true
  recipe_directory:
    description: Directory that holds C(recipes/), C(engines/), C(mounted/), C(fabric.yml) and C(weights.yml).
    type: path
    required: true
  images_directory:
    description: Directory that holds C(images.lock.yml) and the build contexts.
    type: path
    required: true
  kernels_directory:
    description: Directory of the kernels package, which every built image contains.
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Resolve the plan
  ansible.builtin.set_fact:
    recipe_resolved: "{{ lookup('sparkwright.dsv41.plan', hosts=groups['sparks'], recipe_directory='roles/recipe/files',
      images_directory='images', kernels_directory='kernels') }}"
"""

RETURN = r"""
_value:
  description:
    - One dictionary. C(problems) lists everything that is wrong with recipe and inventory; C(plan) is the plan, or
      null when there are problems.
  type: list
  elements: dict
"""

import hashlib
from pathlib import Path
from typing import Any

import yaml
from ansible.plugins.lookup import LookupBase
from ansible.utils.vars import load_extra_vars
from ansible_collections.sparkwright.dsv41.plugins.module_utils import cluster, images, recipe


def _read(directory: Path, kind: str, name: str) -> tuple[dict[str, Any], list[str]]:
    path = directory / f"{name}.yml"
    if not path.is_file():
        known = ", ".join(sorted(entry.stem for entry in directory.glob("*.yml")))
        return {}, [f"unknown {kind} {name!r}; known: {known}"]
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        return {}, [f"{path}: {error}"]
    return (data, []) if isinstance(data, dict) else ({}, [f"{path}: needed a mapping"])


def _files(engine: dict[str, Any], directory: Path) -> tuple[list[dict[str, str]], list[str]]:
    """What an engine has mounted into its containers: where it lies here, its digest, and where it goes there."""
    wanted = {directory / name: target for name, target in engine.get("files", {}).items()}
    found = [
        {"source": str(path), "digest": hashlib.sha256(path.read_bytes()).hexdigest(), "target": target}
        for path, target in wanted.items()
        if path.is_file()
    ]
    return found, [f"engine {engine['id']}: no file {path}" for path in wanted if not path.is_file()]


def _derived(name: str) -> bool:
    return name.startswith((".", "__pycache__")) or name.endswith((".egg-info", ".so"))


def _kernels(directory: Path) -> dict[str, bytes]:
    """What goes into the kernels package: relative path to content."""
    paths = [directory / name for name in ("pyproject.toml", "setup.py")]
    paths += [
        path
        for path in sorted((directory / "src").rglob("*"))
        if path.is_file() and not any(_derived(part) for part in path.relative_to(directory).parts)
    ]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def _image(
    key: str, images_directory: Path, kernels: dict[str, bytes], values: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    lock = yaml.safe_load((images_directory / "images.lock.yml").read_text())["images"]
    if key not in lock:
        return {}, [f"unknown image {key!r}; known: {', '.join(sorted(lock))}"]
    entry = lock[key]
    if "context" not in entry:
        reference, problems = images.published(key, entry, str(values.get("spark_images", {}).get(key, "")))
        return {"name": reference, **entry}, problems
    context = images_directory / entry["context"]
    inputs = {name: (context / name).read_bytes() for name in ("Dockerfile", entry["requirements"])}
    inputs.update({f"kernels/{name}": content for name, content in kernels.items()})
    tag = images.content_tag(inputs, entry)
    base_archive = str(values.get("spark_image_base_archive", ""))
    wheelhouse = str(values.get("spark_image_wheelhouse", ""))
    return {"name": f"sparkwright/{key}:{tag}", **entry, "base_archive": base_archive, "wheelhouse": wheelhouse}, []


class LookupModule(LookupBase):
    def _variables(self, host: str, variables: Any) -> dict[str, Any]:
        """The `spark_*` variables of a host, each resolved as that host would; unlike hostvars[host] also when a value
        reads hostvars itself.
        """
        theirs = variables["hostvars"].raw_get(host)
        templar = self._templar.copy_with_new_env(available_variables={**theirs, "hostvars": variables["hostvars"]})
        return {key: templar.template(raw) for key, raw in theirs.items() if key.startswith("spark_")}

    def run(self, terms: list[Any], variables: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
        self.set_options(var_options=variables, direct=kwargs)
        hosts = {host: self._variables(host, variables) for host in self.get_option("hosts")}
        values = next(iter(hosts.values()), {})
        directory = Path(self.get_option("recipe_directory"))
        if "spark_recipe" not in values:
            return [{"plan": None, "problems": cluster.check(hosts)[2]}]
        data, problems = _read(directory / "recipes", "recipe", str(values["spark_recipe"]))
        if not data:
            return [{"plan": None, "problems": problems + cluster.check(hosts)[2]}]
        engine, problems = _read(directory / "engines", "engine", str(data.get("engine")))
        kernels = _kernels(Path(self.get_option("kernels_directory")))
        engine["files"], more = _files(engine, directory / "mounted")
        problems += more
        image, more = _image(
            str(data.get("image")),
            Path(self.get_option("images_directory")),
            kernels,
            values,
        )
        problems += more
        fabric, more = _read(directory, "data file", "fabric")
        problems += more
        catalog, more = _read(directory, "data file", "weights")
        problems += more
        if problems:
            return [{"plan": None, "problems": problems + recipe.problems(data, hosts)}]
        plan, problems = recipe.resolve(
            data, engine, hosts, image, fabric, catalog, load_extra_vars(self._loader), images.content_tag(kernels, {})
        )
        return [{"plan": plan.to_dict() if plan else None, "problems": problems}]
