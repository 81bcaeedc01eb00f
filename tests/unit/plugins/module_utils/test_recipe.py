# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The resolver, with the project's own recipe of the lab and its engine."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.sparkwright.dsv41.plugins.module_utils import recipe
from ansible_collections.sparkwright.dsv41.plugins.module_utils.cabling import TOPOLOGIES

FILES = Path(__file__).parents[4] / "roles/recipe/files"
LAB = yaml.safe_load((FILES / "recipes/lab.yml").read_text())
# One repository to begin with.
del LAB["engram"], LAB["weights"][1:]
ENGINE = yaml.safe_load((FILES / "engines/vllm.yml").read_text())
ENGINE["files"] = [{"source": "/c/gate.py", "digest": "0123456789abcdef", "target": "/opt/gate.py"}]
FABRIC_DATA = yaml.safe_load((FILES / "fabric.yml").read_text())
CATALOG = yaml.safe_load((FILES / "weights.yml").read_text())
IMAGE = {"name": "sparkwright/x:0123456789ab", "base_archive": "/a", "wheelhouse": "/w"}
FABRIC = {"socket_interface": "enp1s0f0np0", "hcas": "=rocep1s0f0:1"}
PER_RANK = {"--node-rank", "--host", "--port", "--middleware", "--headless"}
GONE = object()


def hosts(count: int = 2, /, **variables: Any) -> dict[str, dict[str, Any]]:
    base = {"spark_cluster": "lab", "spark_recipe": "lab", **variables}
    if count > 2:
        base.setdefault("spark_fabric_topology", "switch")
    return {f"spark{n}": {**base, "spark_fabric_address": f"10.77.0.{n}"} for n in range(1, count + 1)}


def put(data: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with one value set, or with the key gone."""
    data = copy.deepcopy(data)
    target = data
    for key in path[:-1]:
        target = target.setdefault(key, {}) if isinstance(target, dict) else target[key]
    if value is GONE:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return data


def plan_of(data: dict[str, Any] = LAB, inventory: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    plan, problems = recipe.resolve(data, ENGINE, inventory or hosts(), IMAGE, FABRIC_DATA, CATALOG, **more)
    assert problems == [] and plan
    return plan.to_dict()


def problems_of(data: dict[str, Any] = LAB, inventory: dict[str, Any] | None = None) -> list[str]:
    plan, problems = recipe.resolve(data, ENGINE, inventory or hosts(), IMAGE, FABRIC_DATA, CATALOG)
    assert plan is None or not problems
    return problems


def value_of(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


WRONG_RECIPES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("argz",), {}, "recipe lab: unknown key 'argz'; did you mean 'args'?"),
    (("qqq",), {}, "recipe lab: unknown key 'qqq'; known: id, engine"),
    (("engine",), GONE, "recipe lab: engine is missing"),
    (("memory",), GONE, "recipe lab: memory is missing"),
    (("memory",), None, "recipe lab: memory is None; needed a mapping"),
    (("memory", "kv_gib"), GONE, "recipe lab: memory.kv_gib is missing"),
    (("memory", "kv_gib"), None, "recipe lab: memory.kv_gib is None; needed a number"),
    (("memory", "kv_gib"), True, "recipe lab: memory.kv_gib is True; needed a number"),
    (("memory", "kv_gb"), 1, "recipe lab: memory: unknown key 'kv_gb'; did you mean 'kv_gib'?"),
    (("ready", "deadline_s"), "900", "recipe lab: ready.deadline_s is '900'; needed a whole number"),
    (("container", "shm_gib"), GONE, "recipe lab: container.shm_gib is missing"),
    (("container", "shm_gib"), None, "recipe lab: container.shm_gib is missing"),
    (("container", "devices"), "/dev/x", "recipe lab: container.devices is '/dev/x'; needed a list"),
    (("check",), "true", "recipe lab: check is 'true'; needed a list"),
    (("check",), ["check", "--tp={tp}"], "check '--tp={tp}': {tp} is not a known placeholder"),
    (("nodes",), {}, "recipe lab: the inventory has 2 nodes; allowed: none"),
    (("nodes", "two"), {}, "recipe lab: nodes key 'two'; needed a number of nodes"),
    (("nodes", 2), {"nodes": {}}, "recipe lab nodes.2: unknown key 'nodes'"),
    (("nodes", 2), [], "recipe lab nodes.2 is []; needed a mapping"),
    (("weights",), [], "recipe lab: weights is empty; needed one repository or more"),
    (("weights",), "repo", "recipe lab: weights is 'repo'; needed a list"),
    (("weights", 0, "id"), GONE, "recipe lab: weights[0].id is missing or not a string"),
    (
        ("weights", 0, "id"),
        "arith-exl3",
        "recipe lab: weights: unknown key 'arith-exl3'; did you mean 'arith-exl3-3bpw'?",
    ),
    (("env", "bad-name"), "1", "recipe lab: env key 'bad-name'; needed a variable name"),
    (("env", "EMPTY"), "", "recipe lab: env EMPTY is empty; write null to leave the variable out"),
    (("env", "LISTED"), [1], "recipe lab: env LISTED is [1]; needed a scalar"),
    (("env", "HF_HUB_ENABLE_HF_TRANSFER"), 1, "recipe lab: env HF_HUB_ENABLE_HF_TRANSFER was removed; use HF_XET"),
    (("env", "X"), "{adress}", "env '{adress}': {adress} is not a known placeholder"),
    (("args", "--x"), "{gid_indx}", "args '{gid_indx}': {gid_indx} is not a known placeholder"),
    (("fabric", "topology"), "direct3", "recipe lab: fabric.topology is 'direct3'; needed one of direct2, switch"),
    (
        ("fabric", "topology"),
        "ring4",
        "spark_fabric_topology is ring4, which is not for 2 nodes; needed one of: direct2",
    ),
    (("fabric", "rdma"), 1, "recipe lab: fabric.rdma is 1; needed a true or false"),
    (("fabric", "min_rails"), -1, "recipe lab: fabric.min_rails is -1; needed 0 or more"),
    (("fabric", "mtu"), "9000", "recipe lab: fabric.mtu is '9000'; needed a whole number"),
    (("args", "max-model-len"), 1, "recipe lab: args key 'max-model-len'; needed a flag"),
    (("args", "--max-model-len=5"), True, "recipe lab: args key '--max-model-len'; needed a flag"),
]


@pytest.mark.parametrize(("path", "value", "problem"), WRONG_RECIPES)
def test_one_problem_of_a_recipe(path: tuple[Any, ...], value: Any, problem: str) -> None:
    problems = problems_of(put(LAB, path, value))
    assert len(problems) == 1, problems
    assert problems[0].startswith(problem)


@pytest.mark.parametrize("where", ["spark_recipe_overrides", "spark_recipe_set"])
@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        ({"arg": {}}, "unknown key 'arg'; did you mean 'args'?"),
        ({"weights": []}, "unknown key 'weights'"),
        ({"args": None}, "args is None; needed a mapping"),
        ({"memory": {"kv_gib": None}}, "memory.kv_gib is None; needed a number"),
        ({"env": {"A B": 1}}, "env key 'A B'; needed a variable name"),
    ],
)
def test_one_problem_of_an_override(where: str, layer: dict[str, Any], problem: str) -> None:
    problems = problems_of(LAB, hosts(**{where: layer}))
    assert len(problems) == 1
    assert problems[0].startswith(f"{where}: {problem}")


@pytest.mark.parametrize(("count", "allowed"), [(1, "2"), (4, "2"), (3, "2, 4")])
def test_an_impossible_number_of_nodes(count: int, allowed: str) -> None:
    data = put(LAB, ("nodes", 4), {}) if "4" in allowed else LAB
    problems = problems_of(data, hosts(count))
    assert problems == [f"recipe lab: the inventory has {count} nodes; allowed: {allowed}"]


def test_every_problem_at_once() -> None:
    data = put(put(LAB, ("argz",), {}), ("memory", "kv_gib"), GONE)
    inventory = hosts(4, spark_api_port=1, spark_head_ip="x", spark_recipe_set={"envs": {}})
    problems = problems_of(data, inventory)
    for part in ("spark_head_ip", "spark_api_port", "'argz'", "kv_gib", "'envs'", "has 4 nodes"):
        assert sum(part in problem for problem in problems) == 1, part
    assert len(problems) == 6


LAYERS = ("base", "overlay", "inventory", "extra")


@pytest.mark.parametrize(
    "present", [LAYERS[:1], LAYERS[:2], LAYERS[:3], LAYERS, ("base", "extra"), ("overlay", "extra")]
)
@pytest.mark.parametrize(
    ("section", "key", "kind"),
    [("args", "--max-num-seqs", str), ("env", "OMP_NUM_THREADS", str), ("memory", "kv_gib", float)],
)
def test_precedence_and_its_source(section: str, key: str, kind: type, present: tuple[str, ...]) -> None:
    """C1: -e over inventory over node overlay over base, and the plan tells which one it was."""
    data = put(LAB, (section, key), 11)
    data = put(data, ("nodes", 2), {section: {key: 12}}) if "overlay" in present else data
    variables: dict[str, Any] = {"spark_recipe_overrides": {section: {key: 13}}} if "inventory" in present else {}
    if "extra" in present:
        variables["spark_recipe_set"] = {section: {key: 14}}
    plan = plan_of(data, hosts(**variables), extra_vars=["spark_recipe_set"])
    source, expected = {
        "base": ("recipe lab", 11),
        "overlay": ("recipe lab nodes.2", 12),
        "inventory": ("inventory spark_recipe_overrides", 13),
        "extra": ("extra vars spark_recipe_set", 14),
    }[present[-1]]
    for rank in plan["ranks"]:
        seen = {"args": rank["argv"], "env": rank["env"], "memory": plan["memory"]}[section]
        assert (value_of(seen, key) if section == "args" else seen[key]) == kind(expected)
    assert plan["sources"][f"{section}.{key}"] == source
    assert any(str(expected) in line and source in line for line in recipe.describe(plan))


@pytest.mark.parametrize(
    ("variables", "extra_vars", "source"),
    [
        ({}, [], "default of spark_api_port"),
        ({"spark_api_port": 8001}, [], "inventory spark_api_port"),
        ({"spark_api_port": 8001}, ["spark_api_port"], "extra vars spark_api_port"),
    ],
)
def test_the_source_of_a_variable(variables: dict[str, Any], extra_vars: list[str], source: str) -> None:
    plan = plan_of(LAB, hosts(**variables), extra_vars=extra_vars)
    assert plan["sources"]["api_port"] == source
    assert any(source in line for line in recipe.describe(plan))


def test_an_override_replaces_what_the_engine_says() -> None:
    plan = plan_of(LAB, hosts(spark_recipe_set={"args": {"--master-port": 1234}}))
    assert {value_of(rank["argv"], "--master-port") for rank in plan["ranks"]} == {"1234"}


SEEDS = range(12)


def random_case(seed: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Some flags and variables in some layers, for two to four nodes."""
    rng = random.Random(seed)
    count = rng.choice([2, 3, 4])
    flags = {f"--flag-{rng.randrange(99)}": rng.choice([True, 7, "text", [1, 2], {"a": 1}]) for _ in range(4)}
    env = {f"VAR_{rng.randrange(99)}": rng.choice([True, False, 7, "text", "{address}"]) for _ in range(4)}
    data = put(put(LAB, ("nodes",), {2: {}, 3: {}, 4: {}}), ("args",), {})
    layers: list[dict[str, Any]] = [{}, {}, {}, {}]
    for section, values in (("args", flags), ("env", env)):
        for key, value in values.items():
            rng.choice(layers).setdefault(section, {})[key] = value
    for section, values in layers[0].items():
        data[section] = {**data.get(section, {}), **values}
    data["nodes"][count] = layers[1]
    inventory = hosts(count, spark_recipe_overrides=layers[2], spark_recipe_set=layers[3])
    return flags, env, plan_of(data, inventory), layers


@pytest.mark.parametrize("seed", SEEDS)
def test_every_flag_and_variable_reaches_every_rank(seed: int) -> None:
    """C2, whatever layer it comes from."""
    flags, env, plan, _ = random_case(seed)
    for rank in plan["ranks"]:
        assert set(flags) <= set(rank["argv"])
        assert set(env) <= set(rank["env"])


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_differ_only_in_what_is_per_rank(seed: int) -> None:
    _, _, plan, _ = random_case(seed)

    def common(rank: dict[str, Any]) -> list[str]:
        argv = rank["argv"]
        own = {i for i, word in enumerate(argv) if word in PER_RANK}
        own |= {i + 1 for i in own if argv[i] != "--headless"}
        return [word for i, word in enumerate(argv) if i not in own]

    first, *others = plan["ranks"]
    assert [rank["rank"] for rank in plan["ranks"]] == list(range(plan["world_size"]))
    for rank in others:
        assert common(rank) == common(first), "same flags in the same order"
        assert list(rank["env"]) == list(first["env"])
        assert rank["env"]["VLLM_HOST_IP"] == rank["address"], "never the first address of a node (R10)"


@pytest.mark.parametrize("seed", SEEDS)
def test_no_variable_is_ever_empty(seed: int) -> None:
    """R2: an empty value is not an unset one."""
    _, _, plan, _ = random_case(seed)
    for rank in plan["ranks"]:
        for fabric in ({}, {"socket_interface": "", "hcas": ""}, FABRIC):
            env = recipe.bind_fabric(plan, rank["host"], fabric)["env"]
            assert all(value != "" and value is not None for value in env.values())
            assert "NCCL_IB_GID_INDEX" not in env


def test_one_listener_and_no_port_on_workers() -> None:
    head, worker = plan_of()["ranks"]
    assert value_of(head["argv"], "--host") == "127.0.0.1"
    assert "--headless" not in head["argv"]
    assert "--headless" in worker["argv"]
    assert not {"--host", "--port"} & set(worker["argv"])
    assert [mount["target"] for mount in worker["mounts"]] == ["/model", "/opt/gate.py"], "the key is on the head only"
    assert all(mount["read_only"] for rank in (head, worker) for mount in rank["mounts"])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, []),
        (False, []),
        (True, ["--x"]),
        (7, ["--x", "7"]),
        (0.5, ["--x", "0.5"]),
        ("a b", ["--x", "a b"]),
        ([1, "b"], ["--x", "1", "b"]),
        ({"a": [1], "b": True}, ["--x", '{"a":[1],"b":true}']),
        ("{rank}", ["--x", "0"]),
    ],
)
def test_how_a_flag_becomes_words(value: Any, words: list[str]) -> None:
    argv = plan_of(LAB, hosts(spark_recipe_set={"args": {"--x": value}}))["ranks"][0]["argv"]
    assert argv[argv.index("--max-num-seqs") + 2 :] == words


@pytest.mark.parametrize(("value", "text"), [(True, "1"), (False, "0"), (3, "3"), ("{head_address}", "10.77.0.1")])
def test_how_a_variable_becomes_text(value: Any, text: str) -> None:
    plan = plan_of(LAB, hosts(spark_recipe_set={"env": {"X": value}}))
    assert [rank["env"]["X"] for rank in plan["ranks"]] == [text, text]


@pytest.mark.parametrize("where", ["spark_recipe_overrides", "spark_recipe_set"])
@pytest.mark.parametrize(
    "layer",
    [
        {"args": {"--api-key": "MARKER"}},
        {"args": {"--api-key=MARKER": True}},
        {"args": {"--hf-token": ["MARKER"]}},
        {"env": {"VLLM_API_KEY": "MARKER"}},
        {"env": {"HF_TOKEN": "MARKER"}},
        {"env": {"AWS_SECRET_ACCESS_KEY": "MARKER"}},
        {"env": {"HF_TOKEN": ["MARKER"]}},
    ],
)
def test_a_secret_gets_into_no_plan_and_no_message(where: str, layer: dict[str, Any]) -> None:
    """C5."""
    problems = problems_of(LAB, hosts(**{where: layer}))
    assert len(problems) == 1
    assert "MARKER" not in problems[0]


@pytest.mark.parametrize("key", ["--max-num-batched-tokens", "--return-tokens-as-token-ids", "--eos-token-id"])
def test_flags_about_tokens_are_no_secrets(key: str) -> None:
    assert key in plan_of(LAB, hosts(spark_recipe_set={"args": {key: 1}}))["ranks"][1]["argv"]


def test_null_takes_a_value_away_and_the_plan_says_so() -> None:
    taken = {"container": {"oom_score_adj": None}, "env": {"OMP_NUM_THREADS": None}, "args": {"--enforce-eager": None}}
    plan = plan_of(LAB, hosts(spark_recipe_overrides=taken))
    assert "oom_score_adj" not in plan["container"]
    for rank in plan["ranks"]:
        assert "OMP_NUM_THREADS" not in rank["env"] and "--enforce-eager" not in rank["argv"]
    left_out = [line for line in recipe.describe(plan) if line.startswith("left out on purpose")]
    assert left_out == [
        "left out on purpose: --enforce-eager  [inventory spark_recipe_overrides]",
        "left out on purpose: oom_score_adj  [inventory spark_recipe_overrides]",
        "left out on purpose: NCCL_IB_GID_INDEX  [fabric rdma]",
        "left out on purpose: OMP_NUM_THREADS  [inventory spark_recipe_overrides]",
    ]


@pytest.mark.parametrize(
    ("fabric", "there", "absent"),
    [
        (FABRIC, {"NCCL_SOCKET_IFNAME": "enp1s0f0np0", "NCCL_IB_HCA": "=rocep1s0f0:1"}, set()),
        ({"socket_interface": "eth1", "hcas": ""}, {"GLOO_SOCKET_IFNAME": "eth1"}, {"NCCL_IB_HCA"}),
        ({}, {"VLLM_HOST_IP": "10.77.0.2"}, {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}),
    ],
)
def test_bind_fabric(fabric: dict[str, Any], there: dict[str, str], absent: set[str]) -> None:
    rank = recipe.bind_fabric(plan_of(), "spark2", fabric)
    assert there.items() <= rank["env"].items()
    assert not absent & set(rank["env"])
    assert not re.search(r"\{\w+\}", json.dumps([rank["argv"], rank["env"]]))


def test_bind_fabric_changes_no_plan_and_knows_its_hosts() -> None:
    plan = plan_of()
    before = copy.deepcopy(plan)
    recipe.bind_fabric(plan, "spark1", FABRIC)
    assert plan == before
    with pytest.raises(ValueError, match="spark9 has no rank in the plan; ranks: spark1, spark2"):
        recipe.bind_fabric(plan, "spark9", FABRIC)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"spark_recipe_set": {"args": {"--x": 1}}}, True),
        ({"spark_recipe_set": {"env": {"X": 1}}}, True),
        ({"spark_recipe_set": {"container": {"shm_gib": 2}}}, True),
        ({"spark_api_port": 8001}, True),
        ({"spark_data_dir": "/srv/x"}, True),
        ({"spark_recipe_set": {"ready": {"deadline_s": 1}}}, False),
        ({"spark_recipe_set": {"smoke": {"max_tokens": 9}}}, False),
    ],
)
def test_the_hash_follows_what_a_container_is_started_with(change: dict[str, Any], changed: bool) -> None:
    for host in hosts():
        before, after = (recipe.bind_fabric(plan_of(LAB, hosts(**v)), host, FABRIC)["hash"] for v in ({}, change))
        assert (before != after) is changed


def test_the_hash_of_the_other_rank_changes_too() -> None:
    """A change of the head alone restarts the worker as well."""
    plan = plan_of()
    before = recipe.bind_fabric(plan, "spark2", FABRIC)["hash"]
    plan["ranks"][0]["argv"] += ["--x"]
    assert recipe.bind_fabric(plan, "spark2", FABRIC)["hash"] != before


def test_the_hash_is_the_same_for_another_controller_and_changes_with_the_image() -> None:
    def of(image: dict[str, Any]) -> str:
        plan, _ = recipe.resolve(LAB, ENGINE, hosts(), image, FABRIC_DATA, CATALOG)
        assert plan
        return str(recipe.bind_fabric(plan.to_dict(), "spark1", FABRIC)["hash"])

    assert of(IMAGE) == of({**IMAGE, "base_archive": "/b", "wheelhouse": ""})
    assert of(IMAGE) != of({**IMAGE, "name": "sparkwright/x:ba9876543210"})


def test_every_value_of_the_plan_is_shown_with_its_source() -> None:
    plan = plan_of()
    text = "\n".join(recipe.describe(plan))
    for rank in plan["ranks"]:
        for word in rank["argv"]:
            assert word in text
        for key in rank["env"]:
            assert re.search(rf"^  env   {key}=.+  \[.+\]$", text, re.MULTILINE)
    assert "(found on the node)" in text and "{hcas}" not in text
    assert "= 3.1 GiB a rank" in text


@pytest.mark.parametrize(("topology", "count"), [(n, c) for n, t in TOPOLOGIES.items() for c in t.nodes])
def test_environment_of_a_topology(topology: str, count: int) -> None:
    data = put(LAB, ("nodes",), {count: {}})
    plan = plan_of(data, hosts(count, spark_fabric_topology=topology))
    assert plan["fabric"]["topology"] == topology
    for rank in plan["ranks"]:
        for key, value in {**FABRIC_DATA["env"]["nccl"]["rdma"], **FABRIC_DATA["env"]["nccl"][topology]}.items():
            assert key == "NCCL_IB_GID_INDEX" or rank["env"][key] == str(value)


def test_topologies_are_the_ones_that_have_an_environment() -> None:
    assert set(FABRIC_DATA["env"]["nccl"]) == {"sockets", "rdma", *TOPOLOGIES}


def test_more_than_two_nodes_need_a_stated_topology() -> None:
    data = put(LAB, ("nodes",), {3: {}, 4: {"fabric": {"topology": "ring4"}}})
    missing = "spark_fabric_topology is missing for 3 nodes; needed one of: switch, triangle3"
    assert problems_of(data, hosts(3, spark_fabric_topology="")) == [missing]
    plan = plan_of(data, hosts(4, spark_fabric_topology=""))
    assert plan["fabric"]["topology"] == "ring4" and plan["sources"]["fabric.topology"] == "recipe lab nodes.4"
    plan = plan_of(data, hosts(4, spark_fabric_topology="switch"))
    assert plan["fabric"]["topology"] == "switch"
    assert plan["sources"]["fabric.topology"] == "inventory spark_fabric_topology"


def test_without_rdma_no_rdma_environment() -> None:
    env = plan_of(put(LAB, ("fabric",), {"rdma": False}))["ranks"][0]["env"]
    assert {key for key in env if key.startswith("NCCL_")} == {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME"}


def test_an_engine_without_nccl_gets_none_of_its_variables() -> None:
    engine = {key: value for key, value in ENGINE.items() if key != "collectives"}
    plan, _ = recipe.resolve(LAB, engine, hosts(), IMAGE, FABRIC_DATA, CATALOG)
    assert plan and not [key for key in plan.ranks[0].env if key.startswith("NCCL_")]


def test_a_pin_is_each_ranks_own() -> None:
    inventory = hosts()
    inventory["spark2"]["spark_fabric_gid_index"] = "5"
    head, worker = plan_of(LAB, inventory)["ranks"]
    assert "NCCL_IB_GID_INDEX" not in head["env"] and head["gid_index"] is None
    assert worker["env"]["NCCL_IB_GID_INDEX"] == "5" and worker["gid_index"] == 5


def test_addresses_that_the_inventory_leaves_out_are_found_on_the_nodes() -> None:
    inventory = {
        host: {k: v for k, v in values.items() if k != "spark_fabric_address"} for host, values in hosts().items()
    }
    plan = plan_of(LAB, inventory)
    assert plan["ranks"][1]["address"] == ""
    assert "rank 1 on spark2 (address found on the node)" in "\n".join(recipe.describe(plan))
    found = {**FABRIC, "address": "10.9.0.2", "head_address": "10.9.0.1"}
    rank = recipe.bind_fabric(plan, "spark2", found)
    assert rank["env"]["VLLM_HOST_IP"] == "10.9.0.2" and value_of(rank["argv"], "--master-addr") == "10.9.0.1"
    with pytest.raises(ValueError, match="spark2: the survey of the fabric found no head_address, which the engine"):
        recipe.bind_fabric(plan, "spark2", FABRIC)


def test_an_index_reaches_an_engine_that_asks_for_one() -> None:
    plan = plan_of(put(LAB, ("env", "TF_RDMA_GID_INDEX"), "{gid_index}"))
    assert recipe.bind_fabric(plan, "spark1", {**FABRIC, "gid_index": "3"})["env"]["TF_RDMA_GID_INDEX"] == "3"
    assert "TF_RDMA_GID_INDEX" not in recipe.bind_fabric(plan, "spark1", FABRIC)["env"]


@pytest.mark.parametrize("path", sorted((FILES / "recipes").glob("*.yml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_project_resolves_for_every_node_count(path: Path) -> None:
    data = yaml.safe_load(path.read_text())
    assert data["id"] == path.stem
    assert (FILES / "engines" / f"{data['engine']}.yml").exists()
    engine = yaml.safe_load((FILES / "engines" / f"{data['engine']}.yml").read_text())
    engine["files"] = [
        {"source": name, "digest": "0" * 12, "target": to} for name, to in engine.get("files", {}).items()
    ]
    pins = {name: "a" * 40 for name, entry in CATALOG.items() if not entry["revision"]}
    for count in data["nodes"]:
        inventory = hosts(count, spark_recipe=data["id"], spark_weights_revisions=pins)
        if count == 3:
            inventory = {name: {**values, "spark_fabric_topology": "triangle3"} for name, values in inventory.items()}
        plan, problems = recipe.resolve(data, engine, inventory, IMAGE, FABRIC_DATA, CATALOG)
        assert plan and problems == []
        texts = [text for rank in plan.ranks for text in (*rank.argv, *rank.env.values())]
        assert not any("{" + name + "}" in text for name in plan.settings for text in texts)
        given = json.dumps([data, engine])
        assert all("{" + name + "}" in given for name in plan.settings), "a setting that nothing uses"


def test_ports_of_the_recipe_count_until_the_cluster_says_others() -> None:
    data = put(LAB, ("ports",), {"api": 8888, "rendezvous": 29620})
    plan = plan_of(data)
    assert (plan["port"], plan["rendezvous_port"], plan["sources"]["api_port"]) == (8888, 29620, "recipe lab")
    assert plan_of(data, hosts(spark_api_port=9000))["port"] == 9000
    assert problems_of(data, hosts(spark_api_port="29620")) == [
        "spark_api_port and spark_rendezvous_port are both 29620"
    ]
    assert problems_of(put(LAB, ("ports",), {"api": 80, "apo": 1})) == [
        "recipe lab: ports.api is 80; needed a port from 1024 to 65535",
        "recipe lab: ports: unknown key 'apo'; did you mean 'api'?",
    ]


def test_a_recipe_may_have_a_command_of_its_own() -> None:
    assert all(rank["argv"][0] == "/model" for rank in plan_of(put(LAB, ("command",), ["/model"]))["ranks"])


def test_what_checks_the_weights_is_the_recipes() -> None:
    assert plan_of()["check"] == ["sparkwright-exl3-check", "/model", "--tp=2"]
    assert plan_of(put(LAB, ("check",), GONE))["check"] == []


# --- weights ----------------------------------------------------------------------------------------------------------


def with_weights(*names: str) -> dict[str, Any]:
    return put(LAB, ("weights",), [{"id": name, "mount": f"/{name}"} for name in names])


def test_weights_come_from_the_catalog_and_lie_by_their_id() -> None:
    (weights,) = plan_of()["weights"]
    assert weights["repo"] == "sparkwright/arith-exl3-3bpw" and weights["join"] == ""
    assert weights["path"] == "/var/lib/sparkwright/weights/arith-exl3-3bpw"


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_every_entry_of_the_catalog_can_be_planned_once_it_is_pinned(name: str) -> None:
    (weights,) = plan_of(with_weights(name), hosts(spark_weights_revisions={name: "a" * 40}))["weights"]
    assert weights["revision"] == "a" * 40
    assert set(CATALOG[name]) <= {"repo", "revision", "include", "must_exist", "join", "slim", "gib"}
    assert not CATALOG[name].get("join") or CATALOG[name]["join"] in weights["must_exist"]


def test_what_nobody_pins_is_not_fetched() -> None:
    (problem,) = problems_of(with_weights("deepseek-v41-flash-exl3"))
    assert "Mia-AiLab/DeepSeek-V4.1-Flash-EXL3-2.9bpw is pinned by nobody" in problem and "playbooks/pin.yml" in problem
    (problem,) = problems_of(inventory=hosts(spark_weights_revisions={"arith-exl3-3bpw": "main"}))
    assert "is 'main'; needed 40 hex digits" in problem


def test_an_existing_tree_is_used_where_it_is() -> None:
    plan = plan_of(inventory=hosts(spark_weights_paths={"arith-exl3-3bpw": "/srv/models/arith"}))
    assert plan["weights"][0]["path"] == "/srv/models/arith"
    assert {"source": "/srv/models/arith", "target": "/model", "read_only": True} in plan["ranks"][1]["mounts"]


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"spark_weights_paths": {"arith-exl3-3bpw": "models"}}, "spark_weights_paths: arith-exl3-3bpw is 'models'"),
        ({"spark_weights_paths": {"arith": "/srv"}}, "spark_weights_paths: unknown key 'arith'"),
        ({"spark_weights_revisions": {"arith-exl3-3bqw": "a" * 40}}, "did you mean 'arith-exl3-3bpw'?"),
    ],
)
def test_bad_weights_variables(variables: dict[str, Any], problem: str) -> None:
    assert any(problem in found for found in problems_of(inventory=hosts(**variables)))


def test_tables_and_native_checkpoint_of_one_repository_do_not_share_a_directory() -> None:
    names = ("deepseek-v41-flash-engram", "deepseek-v41-flash-native")
    first, second = plan_of(with_weights(*names))["weights"]
    assert (first["repo"], first["revision"]) == (second["repo"], second["revision"])
    assert first["path"] != second["path"]


OVERLAY = {"id": "deepseek-v41-flash-1017-abliterated", "mount": "/overlay"}


def test_an_option_is_a_layer_and_may_bring_weights() -> None:
    data = put(LAB, ("options",), {"other": {"weights": [OVERLAY], "env": {"ABLIT": 1}, "args": {"--dtype": "half"}}})
    assert "ABLIT" not in plan_of(data)["ranks"][0]["env"]
    pinned = {"spark_weights_revisions": {OVERLAY["id"]: "a" * 40}}
    plan = plan_of(data, hosts(spark_recipe_options=["other"], **pinned))
    assert [entry["id"] for entry in plan["weights"]] == ["arith-exl3-3bpw", OVERLAY["id"]]
    assert plan["weights"][0]["path"] != plan["weights"][1]["path"]
    for rank in plan["ranks"]:
        assert rank["env"]["ABLIT"] == "1" and value_of(rank["argv"], "--dtype") == "half"
        assert {"source": plan["weights"][1]["path"], "target": "/overlay", "read_only": True} in rank["mounts"]
    assert plan["sources"]["env.ABLIT"] == "recipe lab options.other"
    # What the user sets wins over it.
    changed = hosts(spark_recipe_options=["other"], spark_recipe_overrides={"env": {"ABLIT": None}}, **pinned)
    assert "ABLIT" not in plan_of(data, changed)["ranks"][0]["env"]
    # Its weights are pinned like others.
    (problem,) = problems_of(data, hosts(spark_recipe_options=["other"]))
    assert "keys-DeepSeek-V4.1-Flash-1017-Abliterated is pinned by nobody" in problem


def test_wrong_options_are_told() -> None:
    assert problems_of(LAB, hosts(spark_recipe_options=["other"])) == [
        "spark_recipe_options: recipe lab has no option 'other'; it has none"
    ]
    data = put(LAB, ("options",), {"one": {"weights": [{"id": "x"}], "envs": {}}, "two": "text"})
    assert problems_of(data, hosts(spark_recipe_options=["one", "three"])) == [
        "recipe lab options.one: unknown key 'envs'; did you mean 'env'?",
        "recipe lab options.one: weights[0].mount is missing or not a string",
        "recipe lab options.two is 'text'; needed a mapping",
        "spark_recipe_options: recipe lab has no option 'three'; known: one, two",
    ]
    for value in ("one", ["one", "one"], [1]):
        wrong = f"spark_recipe_options is {value!r}; needed a list of different names"
        assert wrong in problems_of(data, hosts(spark_recipe_options=value))


def test_the_engine_sees_the_engram_tables_alone() -> None:
    weights = [{"id": "deepseek-v41-flash-engram", "mount": "/engram"}]
    plan = plan_of(put(LAB, ("weights",), weights))
    (entry,) = plan["weights"]
    assert entry["slim"].startswith(f"{entry['path']}/")
    mount = {"source": entry["slim"], "target": "/engram", "read_only": True}
    assert all(mount in rank["mounts"] for rank in plan["ranks"])


ENGRAM = {"weights": "deepseek-v41-flash-engram", "format": "pages", "rule": "heads", "mount": "/packed"}


def with_engram(**changes: Any) -> dict[str, Any]:
    weights = [*LAB["weights"], {"id": "deepseek-v41-flash-engram", "mount": "/engram"}]
    return put(put(LAB, ("weights",), weights), ("engram",), {**ENGRAM, **changes})


def test_each_recipe_and_number_of_ranks_packs_engram_tables_of_its_own() -> None:
    assert plan_of()["engram"] is None
    data = put(with_engram(), ("nodes", 3), {})
    two, three = plan_of(data)["engram"], plan_of(data, hosts(3))["engram"]
    assert two["path"].endswith("/engram/lab/pages-heads-tp2") and three["path"].endswith("/pages-heads-tp3")
    plan = plan_of(data)
    assert two["source"] == plan["weights"][1]["slim"] and two["revision"] == plan["weights"][1]["revision"]
    mount = {"source": two["root"], "target": "/packed", "read_only": True}
    assert all(mount in rank["mounts"] for rank in plan["ranks"])
    assert any(two["path"] in line and "format pages" in line for line in recipe.describe(plan))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "fast"}, "recipe lab: engram.format is 'fast'; needed one of dsv41en1, pages"),
        ({"rule": "columns"}, "recipe lab: engram.rule is 'columns'; needed one of heads, rows"),
        ({"mount": None}, "recipe lab: engram.mount is missing or not a string"),
        ({"weights": "x"}, "recipe lab: engram.weights: unknown key 'x'; known: arith-exl3-3bpw, deepseek-v41"),
    ],
)
def test_wrong_engram_is_told(changes: dict[str, Any], message: str) -> None:
    (problem,) = problems_of(with_engram(**changes))
    assert problem.startswith(message)


def test_ranks_may_differ_in_each_layer() -> None:
    data = put(LAB, ("head",), {"env": {"A": 1, "B": 1}, "args": {"--x": 1}})
    data = put(data, ("workers",), {"env": {"A": 2}})
    data = put(data, ("env", "B"), 0)
    head, worker = plan_of(data)["ranks"]
    assert (head["env"]["A"], head["env"]["B"], value_of(head["argv"], "--x")) == ("1", "1", "1")
    assert (worker["env"]["A"], worker["env"]["B"]) == ("2", "0") and "--x" not in worker["argv"]
    # A later layer wins over what an earlier one says of a role.
    changed = hosts(spark_recipe_overrides={"env": {"A": 3}, "workers": {"env": {"B": 4}}})
    head, worker = plan_of(data, changed)["ranks"]
    assert (head["env"]["A"], worker["env"]["A"], worker["env"]["B"]) == ("3", "3", "4")
    wrong = put(LAB, ("workers",), {"smoke": {}})
    assert problems_of(wrong) == ["recipe lab workers: unknown key 'smoke'; known: env, args"]


def test_settings_fill_placeholders_of_their_name() -> None:
    data = put(put(LAB, ("settings",), {"context": 1024}), ("args", "--max-model-len"), "{context}")
    assert value_of(plan_of(data)["ranks"][1]["argv"], "--max-model-len") == "1024"
    smaller = hosts(spark_recipe_overrides={"settings": {"context": 512}})
    plan = plan_of(data, smaller)
    assert value_of(plan["ranks"][0]["argv"], "--max-model-len") == "512"
    assert "settings context: 512  [inventory spark_recipe_overrides]" in recipe.describe(plan)
    for name in ("port", "hcas", "a b"):
        (problem,) = problems_of(put(LAB, ("settings",), {name: 1}))
        assert problem == f"recipe lab: settings key {name!r}; needed a word that is no placeholder of the plan's own"


def test_caches_are_writable_and_of_the_recipe() -> None:
    plan = plan_of(put(LAB, ("container", "caches"), {"/root/.cache/vllm": "vllm"}))
    mount = {"source": "/var/lib/sparkwright/cache/lab/vllm", "target": "/root/.cache/vllm", "read_only": False}
    assert all(mount in rank["mounts"] for rank in plan["ranks"])


def test_mounted_files_are_named_by_their_content() -> None:
    plan = plan_of()
    path = "/var/lib/sparkwright/files/0123456789ab/gate.py"
    assert plan["files"] == [{"source": "/c/gate.py", "path": path, "target": "/opt/gate.py"}]
    mount = {"source": path, "target": "/opt/gate.py", "read_only": True}
    assert all(mount in rank["mounts"] for rank in plan["ranks"])
