# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The resolver: recipe, node-count overlay and overrides become one plan for the whole cluster.

Everything here is a pure function over dicts. What only a node can tell (its fabric interface and HCAs) stays as a
placeholder in the plan until `bind_fabric` fills it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import posixpath
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.sparkwright.dsv41.plugins.module_utils import cluster as variables
from ansible_collections.sparkwright.dsv41.plugins.module_utils.cabling import TOPOLOGIES
from ansible_collections.sparkwright.dsv41.plugins.module_utils.weights import is_commit

# Placeholders that are filled from the fabric facts of the rank. The addresses are only where the inventory has none.
DISCOVERED = ("socket_interface", "hcas", "hca_names", "gid_index", "address", "head_address")

_NUMBER = (int, float)
_CONTAINER = {
    "shm_gib": _NUMBER,
    "devices": list,
    "capabilities": list,
    "ulimits": dict,
    "gpus": str,
    "entrypoint": list,
    "caches": dict,
    "oom_score_adj": int,
    "stop_timeout_s": int,
}
# The topology of two nodes where none is stated.
_TWO_NODES = "direct2"
_MEMORY = {"weights_gib": _NUMBER, "kv_gib": _NUMBER, "runtime_gib": _NUMBER, "margin_gib": _NUMBER}
_READY = {"deadline_s": int, "stall_s": int}
_SMOKE = {"prompt": str, "expect": str, "max_tokens": int}
_FABRIC = {"topology": str, "rdma": bool, "mtu": int, "min_rails": int, "max_rails": int}
# Sections that overlays and overrides may change; None: any key, scalar values (null unsets). What is in `settings`
# fills the placeholders of its name in env and args.
_MERGED: Dict[str, Optional[Mapping[str, Any]]] = {
    "fabric": _FABRIC,
    "container": _CONTAINER,
    "memory": _MEMORY,
    "ready": _READY,
    "smoke": _SMOKE,
    "settings": None,
    "env": None,
    "args": None,
}
# Layers within a layer, for some ranks only; they have these sections.
_ROLES = ("head", "workers")
_OF_ROLES = ("env", "args")
_FIXED = {
    "id": str,
    "engine": str,
    "image": str,
    "served_name": str,
    "weights": list,
    "nodes": dict,
    "engram": dict,
    "options": dict,
    "command": list,
    "check": list,
    "ports": dict,
    "client": dict,
    "published": list,
    "notes": list,
}
_MAY_LACK = ("engram", "options", "command", "check", "ports", "client", "published", "notes")
_PORTS = {"api": 8000, "rendezvous": 29521}
_WEIGHT = {"id": str, "mount": str}
# How the Engram tables are packed: a format, and a rule that splits them between ranks, of sparkwright_kernels.engram.
_ENGRAM = {"weights": str, "format": ("dsv41en1", "pages"), "rule": ("heads", "rows"), "mount": str}
_CATALOG = {"repo": str, "revision": str, "include": list, "must_exist": list, "gib": _NUMBER}
_REMOVED_ENV = {"HF_HUB_ENABLE_HF_TRANSFER": "HF_XET_HIGH_PERFORMANCE"}
# argv and environment of a container can be read by many; secrets reach the engine as files.
_SECRET = re.compile(r"(api_?key|access_?key|token|secret|password)$", re.IGNORECASE)
# Placeholders that the plan itself fills, beside those of the node.
_FILLED = ("rank", "world_size", "gid_pin", "rendezvous_port", "bind_address", "port", "served_name")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Weights:
    """One repository of the plan; `path` is where it lies on every node, `mount` where the engine sees it.

    `join` names the repository's list of SHA-256 digests where it stores files in parts, `slim` the directory with only
    its Engram tables where the engine is to see that one; else they are empty.
    """

    id: str
    repo: str
    revision: str
    include: List[str]
    must_exist: List[str]
    join: str
    path: str
    slim: str
    mount: str


@dataclass(frozen=True)
class Engram:
    """The packed Engram tables: each rank packs its own rows of the tables in `source` into `path` on its node.

    `path` is that of a format, rule and number of ranks below `root`, which is this recipe's alone: files of other
    splits have the same names.
    """

    source: str
    revision: str
    root: str
    path: str
    format: str
    rule: str
    mount: str


@dataclass(frozen=True)
class Rank:
    """What runs on one host. Values in braces are still to be found on the node.

    `address` ("": to be found), `rails` and `gid_index` are what the inventory states about its fabric.
    """

    host: str
    rank: int
    address: str
    rails: List[Dict[str, str]]
    gid_index: Optional[int]
    container: str
    argv: List[str]
    env: Dict[str, str]
    mounts: List[Dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """The whole cluster: read by preflight, templates, launch, status and the plan verb.

    `files` are mounted into every container: `source` on the controller, `path` on the node, which names the content,
    and `target` in the container. `check` is run on every node, with the first weights mounted, before anything starts.
    """

    cluster: str
    recipe: str
    world_size: int
    fabric: Dict[str, Any]
    image: Dict[str, Any]
    weights: List[Weights]
    engram: Optional[Engram]
    check: List[str]
    settings: Dict[str, Any]
    container: Dict[str, Any]
    memory: Dict[str, float]
    ready: Dict[str, int]
    smoke: Dict[str, Any]
    served_name: str
    bind_address: str
    port: int
    rendezvous_port: int
    health_path: str
    data_dir: str
    files: List[Dict[str, str]]
    kernels: str
    ranks: List[Rank]
    sources: Dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> Dict[str, Any]:
        return asdict(self)


def _type_name(kind: Any) -> str:
    names = {str: "string", int: "whole number", bool: "true or false", list: "list", dict: "mapping"}
    return "number" if kind is _NUMBER else names[kind]


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not (isinstance(value, bool) and kind in (int, _NUMBER))


def _unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown key {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}")


def _check_section(where: str, section: str, value: Any) -> List[str]:
    if not isinstance(value, Mapping):
        return [f"{where}: {section} is {value!r}; needed a mapping"]
    problems = []
    known = _MERGED[section]
    for key, item in value.items():
        if known is None:
            if section == "args" and not re.fullmatch(r"--?[A-Za-z][A-Za-z0-9._-]*", str(key)):
                shown = str(key).partition("=")[0]
                problems.append(f"{where}: args key {shown!r}; needed a flag that begins with '-' and holds no '='")
            if section == "env" and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(key)):
                problems.append(f"{where}: env key {key!r}; needed a variable name")
            if section == "settings" and (not re.fullmatch(r"\w+", str(key)) or key in (*_FILLED, *DISCOVERED)):
                problems.append(
                    f"{where}: settings key {key!r}; needed a word that is no placeholder of the plan's own"
                )
            if section == "env" and item == "":
                problems.append(f"{where}: env {key} is empty; write null to leave the variable out")
            if section == "env" and key in _REMOVED_ENV:
                problems.append(f"{where}: env {key} was removed; use {_REMOVED_ENV[key]}")
            if item is not None and _SECRET.search(str(key).replace("-", "_")):
                problems.append(f"{where}: {section} {key} may hold a secret; a plan holds none")
            elif not isinstance(item, (str, int, float, bool, type(None))) and not (
                section == "args" and isinstance(item, (list, Mapping))
            ):
                problems.append(f"{where}: {section} {key} is {item!r}; needed a scalar")
        elif key not in known:
            problems.append(f"{where}: {section}: {_unknown(str(key), list(known))}")
        elif not _is(item, known[key]) and not (item is None and section == "container"):
            problems.append(f"{where}: {section}.{key} is {item!r}; needed a {_type_name(known[key])}")
        elif section == "fabric" and key == "topology" and item not in TOPOLOGIES:
            problems.append(f"{where}: fabric.topology is {item!r}; needed one of {', '.join(TOPOLOGIES)}")
        elif section == "fabric" and isinstance(item, int) and item < 0:
            problems.append(f"{where}: fabric.{key} is {item}; needed 0 or more")
    return problems


def _check_layer(where: str, layer: Any, known: Sequence[str] = (*_MERGED, *_ROLES)) -> List[str]:
    if not isinstance(layer, Mapping):
        return [f"{where} is {layer!r}; needed a mapping"]
    problems = []
    for key, value in layer.items():
        if key not in known:
            problems.append(f"{where}: {_unknown(str(key), known)}")
        elif key in _ROLES:
            problems += _check_layer(f"{where} {key}", value, _OF_ROLES)
        else:
            problems += _check_section(where, str(key), value)
    return problems


def _check_recipe(recipe: Mapping[str, Any]) -> List[str]:
    where = f"recipe {recipe.get('id', '?')}"
    problems = []
    for key, value in recipe.items():
        if key in _MERGED or key in _ROLES:
            problems += _check_layer(where, {key: value})
        elif key not in _FIXED:
            problems.append(f"{where}: {_unknown(str(key), [*_FIXED, *_MERGED, *_ROLES])}")
        elif not _is(value, _FIXED[key]):
            problems.append(f"{where}: {key} is {value!r}; needed a {_type_name(_FIXED[key])}")
    for key in [*_FIXED, "memory", "ready", "smoke"]:
        if key not in recipe and key not in _MAY_LACK:
            problems.append(f"{where}: {key} is missing")
    for section, known in (("memory", _MEMORY), ("ready", _READY), ("smoke", _SMOKE)):
        values = recipe.get(section)
        for key in known:
            if isinstance(values, Mapping) and key not in values:
                problems.append(f"{where}: {section}.{key} is missing")
    if recipe.get("weights") == []:
        problems.append(f"{where}: weights is empty; needed one repository or more")
    problems += _check_weights(where, recipe.get("weights"))
    ports = recipe.get("ports")
    for key, value in ports.items() if isinstance(ports, Mapping) else ():
        if key not in _PORTS:
            problems.append(f"{where}: ports: {_unknown(str(key), list(_PORTS))}")
        elif not _is(value, int) or not 1024 <= value <= 65535:
            problems.append(f"{where}: ports.{key} is {value!r}; needed a port from 1024 to 65535")
    if isinstance(recipe.get("engram"), Mapping):
        problems += _check_engram(where, recipe["engram"])
    options = recipe.get("options")
    for name, option in options.items() if isinstance(options, Mapping) else ():
        layer = {key: value for key, value in option.items() if key != "weights"} if _is(option, dict) else option
        problems += _check_layer(f"{where} options.{name}", layer)
        problems += _check_weights(f"{where} options.{name}", option.get("weights") if _is(option, dict) else None)
    nodes = recipe.get("nodes")
    for count, overlay in nodes.items() if isinstance(nodes, Mapping) else ():
        if not _is(count, int):
            problems.append(f"{where}: nodes key {count!r}; needed a number of nodes")
        problems += _check_layer(f"{where} nodes.{count}", overlay)
    return problems


def _check_engram(where: str, engram: Mapping[str, Any]) -> List[str]:
    problems = []
    for key, kind in _ENGRAM.items():
        value = engram.get(key)
        if isinstance(kind, tuple) and value not in kind:
            problems.append(f"{where}: engram.{key} is {value!r}; needed one of {', '.join(kind)}")
        elif kind is str and not isinstance(value, str):
            problems.append(f"{where}: engram.{key} is missing or not a string")
    return problems


def _check_weights(where: str, weights: Any) -> List[str]:
    return [
        f"{where}: weights[{index}].{key} is missing or not a {_type_name(kind)}"
        for index, entry in enumerate(weights if isinstance(weights, list) else [])
        for key, kind in _WEIGHT.items()
        if not isinstance(entry, Mapping) or not _is(entry.get(key), kind)
    ]


def _merge(
    layers: Sequence[Tuple[str, Mapping[str, Any]]], role: str = ""
) -> Tuple[Dict[str, Dict[str, Any]], Dict[str, str]]:
    """Later layers win key by key, within a layer what it has for the role; without a role that is left out.

    The second result tells, for each `section.key`, which layer it came from.
    """
    merged: Dict[str, Dict[str, Any]] = {section: {} for section in _MERGED}
    sources: Dict[str, str] = {}
    for source, layer in layers:
        for part in (layer, layer.get(role) or {}):
            for section in _MERGED:
                for key, value in (part.get(section) or {}).items():
                    merged[section][str(key)] = value
                    sources[f"{section}.{key}"] = source
    return merged, sources


def _argv(args: Mapping[str, Any]) -> List[str]:
    argv: List[str] = []
    for flag, value in args.items():
        if value is None or value is False:
            continue
        argv.append(flag)
        if isinstance(value, list):
            argv += [_scalar(item) for item in value]
        elif isinstance(value, Mapping):
            argv.append(json.dumps(value, separators=(",", ":")))
        elif value is not True:
            argv.append(_scalar(value))
    return argv


def _scalar(value: Any) -> str:
    return {True: "1", False: "0"}[value] if isinstance(value, bool) else str(value)


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values.get(match.group(1), match.group(0)), text)


def _unfilled(kind: str, texts: Sequence[str], allowed: Sequence[str]) -> List[str]:
    return [
        f"{kind} {text!r}: {{{name}}} is not a known placeholder"
        for text in texts
        for name in _PLACEHOLDER.findall(text)
        if name not in allowed
    ]


def _weights(
    recipe: Mapping[str, Any], catalog: Mapping[str, Any], cluster: Mapping[str, Any]
) -> Tuple[List[Weights], List[str]]:
    """The recipe's weights as the catalog and the cluster have them, and what is wrong with them."""
    weights, problems = [], []
    for variable in ("spark_weights_revisions", "spark_weights_paths"):
        problems += [
            f"{variable}: {_unknown(str(name), list(catalog))}" for name in cluster[variable] if name not in catalog
        ]
    chosen = [recipe["options"][name].get("weights", []) for name in cluster["spark_recipe_options"]]
    for entry in [*recipe["weights"], *(entry for entries in chosen for entry in entries)]:
        name = entry["id"]
        if name not in catalog:
            problems.append(f"recipe {recipe['id']}: weights: {_unknown(name, list(catalog))}")
            continue
        data = catalog[name]
        fields = data if isinstance(data, Mapping) else {}
        wrong = [key for key, kind in _CATALOG.items() if not _is(fields.get(key), kind)]
        problems += [f"weights {name}: {key} is missing or not a {_type_name(_CATALOG[key])}" for key in wrong]
        if wrong:
            continue
        revision = str(cluster["spark_weights_revisions"].get(name, data["revision"]))
        if not is_commit(revision):
            found = f"is {revision!r}" if revision else "is pinned by nobody"
            problems.append(
                f"weights {name}: the revision of {data['repo']} {found}; needed 40 hex digits in "
                f"spark_weights_revisions, as playbooks/pin.yml prints them"
            )
        path = str(cluster["spark_weights_paths"].get(name, f"{cluster['spark_data_dir']}/weights/{name}"))
        if variables.directory(path):
            problems.append(f"spark_weights_paths: {name} is {path!r}; {variables.directory(path)}")
        weights.append(
            Weights(
                id=name,
                repo=data["repo"],
                revision=revision,
                include=data["include"],
                must_exist=data["must_exist"],
                join=data.get("join", ""),
                path=path,
                # Below the repository, so that it is on the same file system, in its exports and in its snapshots.
                slim=f"{path}/engram-only" if data.get("slim") else "",
                mount=entry["mount"],
            )
        )
    return weights, problems


def _engram(
    recipe: Mapping[str, Any], weights: Sequence[Weights], root: str, ranks: int
) -> Tuple[Optional[Engram], List[str]]:
    """Where the recipe's packed tables lie and what they are made of; None where it has none."""
    wanted = recipe.get("engram")
    if wanted is None:
        return None, []
    how = {key: wanted[key] for key in ("format", "rule", "mount")}
    for entry in weights:
        if entry.id == wanted["weights"]:
            path = f"{root}/{how['format']}-{how['rule']}-tp{ranks}"
            return Engram(entry.slim or entry.path, entry.revision, root, path, **how), []
    known = [entry.id for entry in weights]
    return None, [f"recipe {recipe['id']}: engram.weights: {_unknown(wanted['weights'], known)}"]


def problems(recipe: Mapping[str, Any], hosts: Mapping[str, Mapping[str, Any]]) -> List[str]:
    """Everything that is wrong with a recipe and the `spark_*` variables of the hosts."""
    cluster, _, found = variables.check(hosts)
    found += _check_recipe(recipe)
    for where in ("spark_recipe_overrides", "spark_recipe_set"):
        if isinstance(cluster[where], Mapping):
            found += _check_layer(where, cluster[where])
    ports = _ports(recipe, cluster)
    if str(ports["api"]) == str(ports["rendezvous"]):
        found.append(f"spark_api_port and spark_rendezvous_port are both {ports['api']}")
    known = recipe.get("options")
    options = known if isinstance(known, Mapping) else {}
    asked = cluster["spark_recipe_options"]
    chosen = [str(name) for name in asked] if _is(asked, list) else []
    for name in chosen:
        if name not in options:
            offered = f"known: {', '.join(options)}" if options else "it has none"
            found.append(f"spark_recipe_options: recipe {recipe.get('id')} has no option {name!r}; {offered}")
    nodes = recipe.get("nodes")
    allowed = sorted(n for n in nodes if _is(n, int)) if isinstance(nodes, Mapping) else []
    if len(hosts) not in allowed:
        known = ", ".join(map(str, allowed)) or "none"
        found.append(f"recipe {recipe.get('id')}: the inventory has {len(hosts)} nodes; allowed: {known}")
    overlay = nodes.get(len(hosts)) if isinstance(nodes, Mapping) else None
    picked = [options.get(name) for name in chosen]
    layers = [recipe, overlay, *picked, cluster["spark_recipe_overrides"], cluster["spark_recipe_set"]]
    return found + _topology_problems(cluster["spark_fabric_topology"], layers, len(hosts))


def _ports(recipe: Mapping[str, Any], cluster: Mapping[str, Any]) -> Dict[str, Any]:
    """What the cluster says, else the recipe, else everybody."""
    own = recipe.get("ports")
    usual = {**_PORTS, **own} if isinstance(own, Mapping) else _PORTS
    return {
        name: usual[name] if cluster[f"spark_{name}_port"] is None else cluster[f"spark_{name}_port"] for name in _PORTS
    }


def _topology_problems(stated: str, layers: Sequence[Any], world_size: int) -> List[str]:
    fits = [name for name, topology in TOPOLOGIES.items() if world_size in topology.nodes]
    sections = [layer.get("fabric") for layer in layers if isinstance(layer, Mapping)]
    topologies = [section["topology"] for section in sections if isinstance(section, Mapping) and "topology" in section]
    # Two nodes are joined by a cable until somebody says otherwise; for more, a guess would be wrong too often.
    topology = stated or [_TWO_NODES if world_size == 2 else "", *topologies][-1]
    # What is no topology at all, and a number of nodes that nothing fits, are told elsewhere.
    if not fits or topology in fits or (topology and topology not in TOPOLOGIES):
        return []
    found = f"is {topology}, which is not for {world_size} nodes" if topology else f"is missing for {world_size} nodes"
    return [f"spark_fabric_topology {found}; needed one of: {', '.join(fits)}"]


def resolve(
    recipe: Mapping[str, Any],
    engine: Mapping[str, Any],
    hosts: Mapping[str, Mapping[str, Any]],
    image: Mapping[str, Any],
    fabric: Mapping[str, Any],
    catalog: Mapping[str, Any],
    extra_vars: Collection[str] = (),
    kernels: str = "",
) -> Tuple[Optional[Plan], List[str]]:
    """One plan, or every problem at once.

    `hosts` maps inventory hosts in rank order to their `spark_*` variables; `engine` is the data file of the engine,
    with `files` as a list of source, digest and target;
    `image` tells name and build of the image (keys of images.lock.yml plus `name`); `fabric` is the data file of what
    the cabling asks for; `catalog` that of all weights by id; `extra_vars` names the variables that were given with
    -e, for the sources; `kernels` is the tag of our package's content.
    """

    def origin(name: str) -> str:
        if name in extra_vars:
            return f"extra vars {name}"
        return f"inventory {name}" if any(name in values for values in hosts.values()) else f"default of {name}"

    found = problems(recipe, hosts)
    if found:
        return None, found

    cluster, per_host, _ = variables.check(hosts)
    world_size = len(hosts)
    chosen = cluster["spark_recipe_options"]
    layers = [
        (f"recipe {recipe['id']}", recipe),
        (f"recipe {recipe['id']} nodes.{world_size}", recipe["nodes"][world_size]),
        *((f"recipe {recipe['id']} options.{name}", recipe["options"][name]) for name in chosen),
        (origin("spark_recipe_overrides"), cluster["spark_recipe_overrides"]),
        (origin("spark_recipe_set"), cluster["spark_recipe_set"]),
    ]
    if cluster["spark_fabric_topology"]:
        layers.append((origin("spark_fabric_topology"), {"fabric": {"topology": cluster["spark_fabric_topology"]}}))
    usual = ("fabric default", {"fabric": {**fabric["defaults"], "topology": _TWO_NODES}})
    shape = _merge([usual, *layers])[0]["fabric"]
    asked = fabric["env"].get(engine.get("collectives"), {})
    names = ["sockets", *(["rdma", shape["topology"]] if shape["rdma"] else [])]
    base: List[Tuple[str, Mapping[str, Any]]] = [
        usual,
        (f"engine {engine['id']}", engine),
        *((f"fabric {name}", {"env": asked.get(name, {})}) for name in names),
    ]
    merged, sources = _merge([*base, *layers])
    for name in ("bind_address", "data_dir"):
        sources[name] = origin(f"spark_{name}")
    ports = {name: int(port) for name, port in _ports(recipe, cluster).items()}
    for name in ports:
        by_recipe = cluster[f"spark_{name}_port"] is None and name in recipe.get("ports", {})
        sources[f"{name}_port"] = f"recipe {recipe['id']}" if by_recipe else origin(f"spark_{name}_port")

    data_dir = cluster["spark_data_dir"]
    weights, found = _weights(recipe, catalog, cluster)
    engram, wrong = _engram(recipe, weights, f"{data_dir}/engram/{recipe['id']}", world_size)
    found += wrong
    files = [
        {
            "source": entry["source"],
            "path": f"{data_dir}/files/{entry['digest'][:12]}/{posixpath.basename(entry['target'])}",
            "target": entry["target"],
        }
        for entry in engine.get("files", [])
    ]
    addresses = {host: str(values["spark_fabric_address"]) for host, values in per_host.items()}
    head_address = next(iter(addresses.values()))
    ranks = []
    container = {key: value for key, value in merged["container"].items() if value is not None}
    if "shm_gib" not in container:
        found.append(f"recipe {recipe['id']}: container.shm_gib is missing")
    for number, host in enumerate(hosts):
        role = "head" if number == 0 else "workers"
        own, own_sources = _merge([*base, *layers], role)
        sources.update(own_sources)
        pin = per_host[host]["spark_fabric_gid_index"]
        values = {
            "rank": str(number),
            "world_size": str(world_size),
            **({"address": addresses[host]} if addresses[host] else {}),
            **({"head_address": head_address} if head_address else {}),
            **({} if pin is None else {"gid_pin": str(pin)}),
            "rendezvous_port": str(ports["rendezvous"]),
            "bind_address": str(cluster["spark_bind_address"]),
            "port": str(ports["api"]),
            "served_name": str(recipe["served_name"]),
            **{key: _scalar(value) for key, value in merged["settings"].items() if value is not None},
        }
        mounts = [{"source": entry.slim or entry.path, "target": entry.mount, "read_only": True} for entry in weights]
        if engram:
            mounts.append({"source": engram.root, "target": engram.mount, "read_only": True})
        mounts += [{"source": entry["path"], "target": entry["target"], "read_only": True} for entry in files]
        for target, name in container.get("caches", {}).items():
            source = f"{data_dir}/cache/{recipe['id']}/{name}"
            mounts.append({"source": source, "target": target, "read_only": False})
        if number == 0:
            mounts.append({"source": f"{data_dir}/secrets", "target": "/run/secrets/sparkwright", "read_only": True})
        command = recipe.get("command") or (engine.get(role) or {}).get("command") or engine["command"]
        argv = [_fill(item, values) for item in [*command, *_argv(own["args"])]]
        env = {k: _fill(_scalar(v), values) for k, v in sorted(own["env"].items()) if v is not None}
        # Without a pin a variable that holds one is left out: empty would be read as 0.
        env = {key: value for key, value in env.items() if value != "{gid_pin}"}
        found += _unfilled("args", argv, DISCOVERED) + _unfilled("env", list(env.values()), DISCOVERED)
        ranks.append(
            Rank(
                host=host,
                rank=number,
                address=addresses[host],
                rails=[
                    {key: str(value) for key, value in rail.items()} for rail in per_host[host]["spark_fabric_rails"]
                ],
                gid_index=None if pin is None else int(pin),
                container=f"sparkwright-{cluster['spark_cluster']}-r{number}",
                argv=argv,
                env=env,
                mounts=mounts,
            )
        )
    check = [_fill(str(item), {"world_size": str(world_size)}) for item in recipe.get("check", [])]
    found += _unfilled("check", check, ())
    if found:
        return None, list(dict.fromkeys(found))
    plan = Plan(
        cluster=cluster["spark_cluster"],
        recipe=recipe["id"],
        world_size=world_size,
        fabric=merged["fabric"],
        image=dict(image),
        weights=weights,
        engram=engram,
        check=check,
        settings=merged["settings"],
        container=container,
        memory={key: float(value) for key, value in merged["memory"].items()},
        ready=merged["ready"],
        smoke=merged["smoke"],
        served_name=recipe["served_name"],
        bind_address=str(cluster["spark_bind_address"]),
        port=ports["api"],
        rendezvous_port=ports["rendezvous"],
        health_path=engine["health_path"],
        data_dir=data_dir,
        files=files,
        kernels=kernels,
        ranks=ranks,
        sources=sources,
    )
    return plan, []


def rank_of(plan: Mapping[str, Any], host: str) -> Dict[str, Any]:
    """The rank that runs on an inventory host."""
    for rank in plan["ranks"]:
        if rank["host"] == host:
            return dict(rank)
    raise ValueError(f"{host} has no rank in the plan; ranks: {', '.join(rank['host'] for rank in plan['ranks'])}")


def bind_fabric(plan: Mapping[str, Any], host: str, fabric: Mapping[str, Any]) -> Dict[str, Any]:
    """The rank of a host with nothing left open, and `hash`: what the container must have been started with.

    `fabric` is the rank's part of the survey. A variable of the environment that needs an empty fact is left out; an
    argument that does raises ValueError.
    """
    rank = rank_of(plan, host)
    known = {name: str(fabric[name]) for name in DISCOVERED if fabric.get(name)}
    filled = {key: _fill(value, known) for key, value in rank["env"].items()}
    env = {key: value for key, value in filled.items() if not _PLACEHOLDER.search(value)}
    argv = [_fill(item, known) for item in rank["argv"]]
    missing = sorted({name for item in argv for name in _PLACEHOLDER.findall(item) if name in DISCOVERED})
    if missing:
        raise ValueError(f"{host}: the survey of the fabric found no {', '.join(missing)}, which the engine needs")
    rank = {key: rank[key] for key in ("host", "rank", "container", "mounts")}
    rank.update(env=env, argv=argv)
    shared = {key: plan[key] for key in ("recipe", "world_size", "container", "weights", "engram")}
    # The name tells all that is in an image; the rest are paths on whichever controller made the plan.
    shared["image"] = plan["image"]["name"]
    others = [{key: other[key] for key in ("host", "argv", "mounts")} for other in plan["ranks"]]
    text = json.dumps({"rank": rank, "shared": shared, "ranks": others}, sort_keys=True, default=str)
    rank["hash"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return rank


def describe(plan: Mapping[str, Any]) -> List[str]:
    """The plan for a reader: every rank's argv, env, mounts, image and memory, each value with its source."""
    sources = plan["sources"]
    memory = plan["memory"]
    total = sum(memory.values())
    found = "(found on the node)"
    lines = [
        f"cluster {plan['cluster']}: recipe {plan['recipe']} on {plan['world_size']} nodes",
        f"image   {plan['image']['name']}",
        f"api     http://{plan['bind_address']}:{plan['port']}/v1  [{sources['bind_address']}; {sources['api_port']}]",
        "memory  "
        + " + ".join(f"{key[:-4]} {value:g} [{sources['memory.' + key]}]" for key, value in memory.items())
        + f" = {total:g} GiB a rank",
    ]
    lines += [f"weights {entry['repo']}@{entry['revision']} -> {entry['path']}" for entry in plan["weights"]]
    if plan["engram"]:
        engram = plan["engram"]
        lines.append(
            f"engram  {engram['source']} -> {engram['path']}, format {engram['format']}, rule {engram['rule']}"
        )
    for section in ("fabric", "settings", "container", "ready", "smoke"):
        lines += [f"{section} {key}: {value}  [{sources[f'{section}.{key}']}]" for key, value in plan[section].items()]
    for rank in plan["ranks"]:
        where = rank["address"] or "address found on the node"
        lines += ["", f"rank {rank['rank']} on {rank['host']} ({where}), container {rank['container']}"]
        shown = [_PLACEHOLDER.sub(found, item) for item in rank["argv"]]
        lines += [f"  argv  {line}" for line in _argv_lines(shown, sources)]
        for key, value in rank["env"].items():
            lines.append(f"  env   {key}={_PLACEHOLDER.sub(found, value)}  [{sources['env.' + key]}]")
        for mount in rank["mounts"]:
            mode = "read-only" if mount["read_only"] else "writable"
            lines.append(f"  mount {mount['source']} -> {mount['target']} ({mode})")
    present = {f"container.{key}" for key in plan["container"]}
    present.update(f"env.{key}" for rank in plan["ranks"] for key in rank["env"])
    present.update(f"args.{item}" for rank in plan["ranks"] for item in rank["argv"])
    unset = [key for key in sorted(set(sources) - present) if key.startswith(("container.", "env.", "args."))]
    return [*lines, "", *(f"left out on purpose: {key.partition('.')[2]}  [{sources[key]}]" for key in unset)]


def _argv_lines(argv: Sequence[str], sources: Mapping[str, str]) -> List[str]:
    lines: List[str] = []
    for item in argv:
        source = sources.get(f"args.{item}")
        if source:
            lines.append(f"{item}  [{source}]")
        elif lines and "  [" in lines[-1]:
            flag, _, rest = lines[-1].partition("  [")
            lines[-1] = f"{flag} {item}  [{rest}"
        else:
            lines.append(item)
    return lines
