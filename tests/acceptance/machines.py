# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""How the tests reach the machines of vm.py, and run playbooks on them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

from vm import HERE, ROOT, SSH_CONFIG

HOSTS = HEAD, WORKER = "spark1", "spark2"
INVENTORY = "tests/acceptance/inventory"
# Sockets of SSH, whose names must be short. A login takes more than a second under emulation, so there is one for all.
CONTROL = tempfile.mkdtemp(prefix="sw-")


class Outcome(NamedTuple):
    rc: int
    text: str  # the output in one line, since Ansible wraps lines
    changed: list[int]  # by host


def vm(command: str) -> None:
    subprocess.run([sys.executable, HERE / "vm.py", command], cwd=ROOT, check=True, timeout=1500)


def argv(host: str, command: str) -> list[str]:
    shared = ["-o", "ControlMaster=auto", "-o", "ControlPersist=60", "-o", f"ControlPath={CONTROL}/%C"]
    return ["ssh", "-F", str(SSH_CONFIG), "-o", "BatchMode=yes", *shared, host, command]


def ssh(host: str, command: str, stdin: bytes = b"", check: bool = True) -> str:
    """What a shell command prints on a machine; without check it may fail, and its errors count, too."""
    done = subprocess.run(argv(host, command), input=stdin, capture_output=True, timeout=240, check=False)
    out, errors = done.stdout.decode(), done.stderr.decode()
    assert not check or done.returncode == 0, f"{command}: {out}{errors}"
    return out.strip() if check else out + errors


def disconnect() -> None:
    for host in HOSTS:
        subprocess.run([*argv(host, "")[:-2], "-O", "exit", host], capture_output=True, check=False)
    shutil.rmtree(CONTROL)


def playbook(name: str, *arguments: str, **variables: Any) -> Outcome:
    command = ["ansible-playbook", name, "-i", INVENTORY, "-e", json.dumps(variables), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    text = " ".join(f"{done.stdout}{done.stderr}".split())
    changed = [int(count) for count in re.findall(r"spark\d : ok=\d+ changed=(\d+)", text)]
    return Outcome(done.returncode, text, changed)
