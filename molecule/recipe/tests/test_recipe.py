"""What runs on a node is what the plan prints for it."""

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]


@cache
def printed_plan() -> list[str]:
    command = ["ansible-playbook", "playbooks/plan.yml", "-i", "inventory/lab"]
    # YAML would wrap long lines.
    env = {**os.environ, "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout.splitlines()


def printed(host: str, kind: str) -> list[str]:
    """Values that the plan prints for one host, without their sources."""
    values, ours = [], False
    for line in (line.strip(' ",') for line in printed_plan()):
        if line.startswith("rank "):
            ours = f" on {host} " in line
        elif ours and re.match(rf"{kind}\s", line):
            values.append(re.sub(r"\s+\[.*\]$", "", line[len(kind) :].strip()))
    return values


def running(host) -> dict:
    rank = 0 if host.check_output("hostname") == "spark1" else 1
    return json.loads(host.check_output(f"docker inspect sparkwright-lab-r{rank}"))[0]


def test_argv_is_the_printed_one(host):
    argv = printed(host.check_output("hostname"), "argv")
    assert len(argv) > 10
    assert " ".join(argv).split() == running(host)["Config"]["Cmd"]


def test_env_is_the_printed_one(host):
    env = running(host)["Config"]["Env"]
    shown = printed(host.check_output("hostname"), "env")
    assert len(shown) > 5
    for entry in shown:
        name, _, value = entry.partition("=")
        assert (entry in env) or (value == "(found on the node)" and any(item.startswith(f"{name}=") for item in env))


def test_mounts_are_the_printed_ones(host):
    mounts = {f"{mount['Source']} -> {mount['Destination']} (read-only)" for mount in running(host)["Mounts"]}
    assert mounts == set(printed(host.check_output("hostname"), "mount"))
