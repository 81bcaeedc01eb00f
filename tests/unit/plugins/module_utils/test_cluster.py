# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import cluster

GOOD = {
    "spark1": {"spark_cluster": "lab", "spark_recipe": "lab", "spark_fabric_address": "10.77.0.1"},
    "spark2": {"spark_cluster": "lab", "spark_recipe": "lab", "spark_fabric_address": "10.77.0.2"},
}
GONE = object()


def inventory(everywhere: dict[str, Any], second: dict[str, Any]) -> dict[str, dict[str, Any]]:
    changes = {"spark1": everywhere, "spark2": {**everywhere, **second}}
    return {
        host: {name: value for name, value in {**values, **changes[host]}.items() if value is not GONE}
        for host, values in GOOD.items()
    }


def test_a_good_inventory_gets_defaults_and_keeps_rank_order() -> None:
    values, per_host, problems = cluster.check(GOOD)
    assert problems == []
    assert values["spark_bind_address"] == "127.0.0.1", "closed unless it is opened"
    assert (values["spark_cluster"], values["spark_api_port"], values["spark_recipe_set"]) == ("lab", None, {})
    assert list(per_host) == ["spark1", "spark2"]
    assert "spark_fabric_address" not in values


@pytest.mark.parametrize(
    ("everywhere", "second", "problem"),
    [
        ({"spark_api_prot": 8000}, {}, "spark_api_prot is not a known variable; did you mean spark_api_port?"),
        ({"spark_zzz": 1}, {}, "spark_zzz is not a known variable"),
        ({"spark_cluster": GONE}, {}, "spark_cluster is missing; needed name in inventory group_vars/all"),
        ({"spark_recipe": GONE}, {}, "spark_recipe is missing; needed name in inventory group_vars/all"),
        ({"spark_fabric_topology": "star"}, {}, "spark_fabric_topology is 'star'; needed one of direct2, switch"),
        ({}, {"spark_fabric_gid_index": "v2"}, "spark2: spark_fabric_gid_index is 'v2'; needed the index of a GID"),
        ({}, {"spark_fabric_gid_index": -1}, "spark2: spark_fabric_gid_index is -1; needed the index of a GID"),
        ({}, {"spark_fabric_rails": "p0"}, "spark2: spark_fabric_rails is 'p0'; needed a list of {netdev: NAME"),
        ({}, {"spark_fabric_rails": [{"netdev": "p0", "mtu": 1}]}, "has other keys than netdev and address"),
        ({}, {"spark_fabric_rails": ["p0"]}, "'p0' has other keys than netdev and address"),
        ({}, {"spark_fabric_rails": [{"netdev": "p 0"}]}, "netdev 'p 0' is no name of a network device"),
        ({}, {"spark_fabric_rails": [{"netdev": "p0"}, {"netdev": "p0"}]}, "a network device is named twice"),
        (
            {},
            {"spark_fabric_rails": [{"netdev": "p0", "address": "10.0.0.1"}]},
            "p0: needed an IPv4 address with its prefix",
        ),
        (
            {},
            {"spark_fabric_rails": [{"netdev": "p0", "address": "10.0.0.255/24"}]},
            "p0: needed the address of a host in 10.0.0.0/24",
        ),
        (
            {},
            {"spark_fabric_rails": [{"netdev": "p0", "address": "127.0.0.1/8"}]},
            "p0: needed the address of a fabric port, not loopback",
        ),
        ({"spark_cluster": "Lab_1"}, {}, "spark_cluster is 'Lab_1'; needed lower-case letters"),
        ({"spark_cluster": "lab-"}, {}, "spark_cluster is 'lab-'; needed lower-case"),
        ({"spark_cluster": "lab\n"}, {}, "spark_cluster is 'lab\\n'; needed lower-case"),
        ({"spark_recipe": 5}, {}, "spark_recipe is 5; needed lower-case"),
        ({"spark_api_port": 80}, {}, "spark_api_port is 80; needed a port"),
        ({"spark_api_port": 70000}, {}, "spark_api_port is 70000; needed a port"),
        ({"spark_api_port": True}, {}, "spark_api_port is True; needed a port"),
        ({"spark_api_port": "8000²"}, {}, "spark_api_port is '8000²'; needed a port"),
        ({"spark_api_port": 8000.5}, {}, "spark_api_port is 8000.5; needed a port"),
        ({"spark_bind_address": "spark1"}, {}, "spark_bind_address is 'spark1'; needed an IPv4 address"),
        ({"spark_bind_address": "224.0.0.1"}, {}, "spark_bind_address is '224.0.0.1'; needed a unicast"),
        ({}, {"spark_fabric_address": "127.0.0.1"}, "spark2: spark_fabric_address is '127.0.0.1'; needed the address"),
        ({}, {"spark_fabric_address": "0.0.0.0"}, "spark2: spark_fabric_address is '0.0.0.0'; needed the address"),
        (
            {},
            {"spark_fabric_address": "10.77.0.1/24"},
            "spark2: spark_fabric_address is '10.77.0.1/24'; needed an IPv4",
        ),
        ({}, {"spark_fabric_address": "10.77.0.1"}, "spark_fabric_address 10.77.0.1 is used by more than one host"),
        ({"spark_data_dir": "var/lib"}, {}, "spark_data_dir is 'var/lib'; needed an absolute path"),
        ({"spark_data_dir": "/var/../etc"}, {}, "spark_data_dir is '/var/../etc'; needed an absolute path"),
        ({"spark_data_dir": "/a b"}, {}, "spark_data_dir is '/a b'; needed an absolute path"),
        ({"spark_data_dir": "/"}, {}, "spark_data_dir is '/'; needed an absolute path"),
        ({"spark_hub_endpoint": 1}, {}, "spark_hub_endpoint is 1; needed a string"),
        ({"spark_recipe_overrides": ["--x"]}, {}, "spark_recipe_overrides is ['--x']; needed a mapping"),
        ({"spark_api_port": 8000}, {"spark_api_port": 8001}, "spark_api_port differs between hosts"),
        ({}, {"spark_api_port": 8001}, "spark_api_port is set for spark2 only; it belongs to the cluster"),
        *(({name: "x"}, {}, f"{name} was removed; use {instead}") for name, instead in cluster.REMOVED.items()),
    ],
)
def test_one_problem(everywhere: dict[str, Any], second: dict[str, Any], problem: str) -> None:
    problems = cluster.check(inventory(everywhere, second))[2]
    assert len(problems) == 1, problems
    assert problem in problems[0]


@pytest.mark.parametrize(
    "values",
    [
        {"spark_api_port": "8080"},
        {"spark_bind_address": "0.0.0.0"},
        {"spark_data_dir": "/srv/spark-1/data.d"},
        # Any subnet will do: no address is blessed in code (R16).
        {"spark_fabric_address": "192.168.178.9"},
        {"spark_fabric_address": "169.254.10.1"},
    ],
)
def test_accepted(values: dict[str, Any]) -> None:
    hosts = {"spark1": {**GOOD["spark1"], **values}}
    assert cluster.check(hosts)[2] == []


def test_every_problem_at_once() -> None:
    hosts = inventory({"spark_cluster": GONE, "spark_api_port": 1, "spark_head_ip": "x"}, {"spark_fabric_address": "y"})
    problems = cluster.check(hosts)[2]
    assert [problem.split()[0] for problem in problems] == [
        "spark_head_ip",
        "spark_cluster",
        "spark2:",
        "spark_api_port",
    ]


def test_no_hosts_at_all() -> None:
    assert len(cluster.check({})[2]) == 2
