#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
module: engine_state
author: Sparkwright contributors (@sparkwright)
version_added: 0.1.0
short_description: State of one rank's container
description:
  - Reads the container's state, plan label, log size and last lines, CPU time, and asks its health URL.
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
  container:
    description: Name of the container.
    type: str
    required: true
  host:
    description: Name of this node in reports.
    type: str
    required: true
  health_url:
    description: URL that answers 200 when the endpoint is up; empty on ranks that serve none.
    type: str
    default: ""
  lines:
    description: How many of the log's last lines to return.
    type: int
    default: 20
"""

EXAMPLES = r"""
- name: Look at rank 0
  sparkwright.dsv41.engine_state:
    container: sparkwright-lab-r0
    host: spark1
    health_url: http://127.0.0.1:8000/health
"""

RETURN = r"""
state:
  description:
    - The rank as exists, running, status, exit_code, started_at, plan, image, log_bytes, log_tail, cpu_s (seconds of
      CPU time), healthy (null without a health URL).
  returned: always
  type: dict
"""

import http.client
import json
import os
import urllib.request
from typing import Any, Dict, List, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils.engine import PLAN_LABEL, merge_logs


def healthy(url: str) -> Optional[bool]:
    if not url:
        return None
    # The node's own proxy settings must not come between a rank and its own endpoint.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return int(answer.status) == 200
    except (OSError, ValueError, http.client.HTTPException):
        return False


def file_size(path: str) -> int:
    # The engine rotates logs at any moment.
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def cpu_seconds(pids: List[str]) -> float:
    ticks = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
                fields = stream.read().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "container": {"type": "str", "required": True},
            "host": {"type": "str", "required": True},
            "health_url": {"type": "str", "default": ""},
            "lines": {"type": "int", "default": 20},
        },
        supports_check_mode=True,
    )
    name = module.params["container"]
    docker = module.get_bin_path("docker")
    state: Dict[str, Any] = {"host": module.params["host"], "exists": False, "running": False}
    if docker is None:
        module.exit_json(changed=False, state=state)
    rc, out, err = module.run_command([docker, "container", "inspect", name])
    if rc != 0:
        if "no such container" not in err.lower():
            module.fail_json(msg=f"docker container inspect {name} failed: {err.strip()}")
        module.exit_json(changed=False, state=state)
    inspected = json.loads(out)[0]
    running = bool(inspected["State"]["Running"])
    lines = module.params["lines"]
    _rc, log, log_err = module.run_command(
        [docker, "logs", "--timestamps", "--tail", str(lines), name], errors="replace"
    )
    _rc, top, _err = module.run_command([docker, "top", name, "-eo", "pid"]) if running else (0, "", "")
    state.update(
        exists=True,
        running=running,
        status=inspected["State"]["Status"],
        exit_code=inspected["State"]["ExitCode"],
        started_at=inspected["State"]["StartedAt"],
        plan=(inspected["Config"].get("Labels") or {}).get(PLAN_LABEL, ""),
        image=inspected["Config"]["Image"],
        log_bytes=file_size(inspected.get("LogPath") or ""),
        log_tail=merge_logs(log, log_err, lines),
        cpu_s=cpu_seconds(top.split()[1:]),
        healthy=healthy(module.params["health_url"]) if running else None,
    )
    module.exit_json(changed=False, state=state)


if __name__ == "__main__":
    main()
