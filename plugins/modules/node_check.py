#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
module: node_check
author: Sparkwright contributors (@sparkwright)
version_added: 0.1.0
short_description: Findings about a node before anything is put on it
description:
  - Checks engine, tools, ports, memory and disk against the plan, and returns every finding at once.
attributes:
  check_mode:
    description: Runs fully in check mode, as it only reads.
    support: full
  diff_mode:
    description: Never changes anything.
    support: none
  idempotent:
    description: Reads only.
    support: full
options:
  host:
    description: Name of this node in findings.
    type: str
    required: true
  container:
    description: This rank's container; while it runs, its own ports and memory are not counted against it.
    type: str
    required: true
  commands:
    description: Commands that must be in PATH.
    type: list
    elements: str
    default: []
  python_modules:
    description: Modules that the node's Python must have.
    type: list
    elements: str
    default: []
  ports:
    description: TCP ports that must be free.
    type: list
    elements: int
    default: []
  memory_bytes:
    description: Memory that must be available, in bytes.
    type: int
    default: 0
  disk_path:
    description: Path whose file system is checked; it need not exist yet.
    type: path
    required: true
  disk_bytes:
    description: Free space that must be there, in bytes.
    type: int
    default: 0
  proc_root:
    description: Where procfs is mounted.
    type: path
    default: /proc
"""

EXAMPLES = r"""
- name: Check the node
  sparkwright.dsv41.node_check:
    host: spark1
    container: sparkwright-lab-r0
    commands: [rsync]
    ports: [8000]
    disk_path: /var/lib/sparkwright
"""

RETURN = r"""
findings:
  description: What is wrong, as id, host, found, needed, repair, severity.
  returned: always
  type: list
  elements: dict
facts:
  description: What was read.
  returned: always
  type: dict
"""

import glob
import importlib.util
import os
from typing import Any, Dict

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils import node


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def owner(proc_root: str, inode: str) -> str:
    """Name of the process that holds a socket; "an unknown process" when it may not be seen."""
    for link in glob.glob(f"{proc_root}/[0-9]*/fd/*"):
        try:
            if os.readlink(link) == f"socket:[{inode}]":
                pid = link[len(proc_root) + 1 :].split("/")[0]
                return f"{read(f'{proc_root}/{pid}/comm').strip()} (pid {pid})"
        except OSError:
            continue
    return "an unknown process"


def disk_free(path: str) -> int:
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "container": {"type": "str", "required": True},
            "commands": {"type": "list", "elements": "str", "default": []},
            "python_modules": {"type": "list", "elements": "str", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
            "memory_bytes": {"type": "int", "default": 0},
            "disk_path": {"type": "path", "required": True},
            "disk_bytes": {"type": "int", "default": 0},
            "proc_root": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    params, root = module.params, module.params["proc_root"]
    docker_error, running = "no docker command", False
    docker = module.get_bin_path("docker")
    if docker:
        rc, _out, err = module.run_command([docker, "version", "--format", "{{.Server.Version}}"])
        docker_error = "" if rc == 0 else err.strip() or "docker version failed"
        rc, out, _err = module.run_command(
            [docker, "container", "inspect", "--format", "{{.State.Running}}", params["container"]]
        )
        running = rc == 0 and out.strip() == "true"
    listeners = {}
    for table in ("tcp", "tcp6"):
        for port, inode in node.listening_ports(read(f"{root}/net/{table}")).items():
            if port in params["ports"]:
                listeners[port] = owner(root, inode)
    facts: Dict[str, Any] = {
        "docker_error": docker_error,
        "missing_commands": [name for name in params["commands"] if not module.get_bin_path(name)],
        "missing_modules": [name for name in params["python_modules"] if importlib.util.find_spec(name) is None],
        "listeners": listeners,
        "ours_running": running,
        "mem_available": node.mem_available(read(f"{root}/meminfo")),
        "disk_free": disk_free(params["disk_path"]),
    }
    needs = node.Needs(
        commands=params["commands"],
        python_modules=params["python_modules"],
        ports=params["ports"],
        memory_bytes=params["memory_bytes"],
        disk_path=params["disk_path"],
        disk_bytes=params["disk_bytes"],
    )
    found = node.findings(facts, needs, params["host"])
    module.exit_json(changed=False, findings=[finding.to_dict() for finding in found], facts=facts)


if __name__ == "__main__":
    main()
