# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""A real run of Ansible that fetches from a slow hub: what the terminal and ansible-runner see of it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import ansible_cli
import pytest
from hub import Hub, Rule

ansible_runner = pytest.importorskip("ansible_runner")
pytest.importorskip("huggingface_hub")

PLAYBOOK = """
- hosts: localhost
  gather_facts: false
  tasks:
    - name: Fetch
      sparkwright.dsv41.weights_fetch:
        repo: acme/tiny
        revision: {revision}
        dest: {dest}
        endpoint: {endpoint}
        workers: 1
"""
LINE = re.compile(r"\.\.\. Fetch: localhost: fetching \d+\.\d of \d+\.\d KiB \(\d+ %\), [\d.]+ \w+/s.* \(1\d s\)")


@pytest.mark.skipif(os.geteuid() != 0, reason="the module writes to /run, as root")
def test_bytes_rate_and_time_are_shown_and_are_events(hub: Hub, tmp_path: Path) -> None:
    # Five files, three seconds each.
    hub.faults(Rule("/resolve/", "slow", seconds=1.5))
    playbook = tmp_path / "fetch.yml"
    revision, dest = hub.commit("acme/tiny"), tmp_path / "weights"
    playbook.write_text(PLAYBOOK.format(revision=revision, dest=dest, endpoint=hub.url))
    private = tmp_path / "runner"
    private.mkdir()
    run = ansible_runner.run(
        private_data_dir=str(private),
        project_dir=str(ansible_cli.ROOT),
        playbook=str(playbook),
        inventory="localhost ansible_connection=local ansible_python_interpreter=" + sys.executable,
        envvars={"ANSIBLE_CONFIG": str(ansible_cli.ROOT / "ansible.cfg"), "NO_COLOR": "1", "ANSIBLE_NOCOLOR": "1"},
        quiet=True,
    )
    events = list(run.events)
    assert run.status == "successful", [event["stdout"] for event in events]
    told = [event["stdout"] for event in events if LINE.search(event["stdout"])]
    assert told, [event["stdout"] for event in events]
    assert not list(Path("/run/sparkwright").glob("*"))
