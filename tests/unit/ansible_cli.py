# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Ansible's commands as a user runs them: in a process of their own, with the project's configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(command: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`ansible-<command>` in the project's directory; standard output and error in one."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    env.update(ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_NOCOLOR="1", COLUMNS="200")
    return subprocess.run(
        [sys.executable, "-m", "ansible", command, *map(str, arguments)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=120,
    )


def text(done: subprocess.CompletedProcess[str]) -> str:
    """What was printed, with every run of white space as one blank, since Ansible wraps lines."""
    return " ".join(done.stdout.split())
