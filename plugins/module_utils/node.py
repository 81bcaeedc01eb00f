# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What a node must have before anything is put on it: facts from text, and the findings that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding

GIB = 1 << 30
# Where the package is not named for what is missing.
_PACKAGES = {"ssh": "openssh-client", "rrsync": "rsync", "ip": "iproute2", "ensurepip": "python3-venv"}


@dataclass(frozen=True)
class Needs:
    """What the plan asks of one node; memory and disk in bytes."""

    commands: List[str]
    python_modules: List[str]
    ports: List[int]
    memory_bytes: int
    disk_path: str
    disk_bytes: int


def mem_available(meminfo: str) -> Optional[int]:
    """MemAvailable of /proc/meminfo in bytes, or None when the line is missing."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and rest.split():
            return int(rest.split()[0]) * 1024
    return None


def listening_ports(tcp: str) -> Dict[int, str]:
    """Port -> socket inode of every listening socket in a /proc/net/tcp or tcp6 table."""
    ports = {}
    for line in tcp.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == "0A":
            ports[int(fields[1].rpartition(":")[2], 16)] = fields[9]
    return ports


def findings(facts: Mapping[str, Any], needs: Needs, host: str) -> List[Finding]:
    """Everything that is wrong, not only the first.

    `facts` has docker_error ("" when the engine answers), missing_commands, missing_modules, listeners (port -> name of
    the process), ours_running (whether this plan's container already runs here and holds ports and memory),
    mem_available and disk_free in bytes (None: unknown).
    """
    found: List[Finding] = []

    def add(name: str, seen: str, needed: str, repair: str) -> None:
        found.append(Finding(f"node.{name}", host, seen, needed, repair))

    if facts["docker_error"]:
        # Never name a package to install here: docker.io would replace the docker-ce of a Spark.
        repair = "systemctl enable --now docker, or install a Docker engine where there is none"
        add("docker", facts["docker_error"], "a Docker engine that answers", repair)
    for name in facts["missing_commands"]:
        add("command", f"no {name}", f"{name} in PATH", f"apt-get install {_PACKAGES.get(name, name)}")
    for name in facts["missing_modules"]:
        package = _PACKAGES.get(name, f"python3-{name}")
        add("python", f"no Python module {name}", name, f"apt-get install {package}")
    if not facts["ours_running"]:
        for port in needs.ports:
            if port in facts["listeners"]:
                owner = facts["listeners"][port]
                repair = f"stop {owner}, or set spark_api_port or spark_rendezvous_port"
                add("port", f"port {port} is taken by {owner}", "a free port", repair)
        available = facts["mem_available"]
        if available is None or available < needs.memory_bytes:
            seen = "unknown" if available is None else f"{available / GIB:.2f} GiB available"
            needed = f"{needs.memory_bytes / GIB:.2f} GiB (weights + KV + runtime + margin of the plan)"
            add("memory", seen, needed, "stop what else runs there, or lower the plan's memory")
    free = facts["disk_free"]
    if free is None or free < needs.disk_bytes:
        seen = "unknown" if free is None else f"{free / GIB:.2f} GiB free"
        needed = f"{needs.disk_bytes / GIB:.2f} GiB"
        add("disk", f"{seen} for {needs.disk_path}", needed, "free space, or set spark_data_dir")
    return found
