#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_probe
author: Sparkwright contributors (@sparkwright)
version_added: 0.1.0
short_description: Send traffic over the rails of this node and say what arrives
description:
  - Pings every peer over every rail with frames of the port's MTU that may not be fragmented, then runs an RDMA
    pingpong with the chosen GID, and if asked for a bandwidth test.
  - Both ends of a rail run at the same time, one waiting for the other, so all ranks must be in one task and C(forks)
    must not be smaller than their number.
  - It changes nothing, so it runs in check mode too.
attributes:
  check_mode:
    description: Runs fully in check mode, as it changes nothing.
    support: full
  diff_mode:
    description: Never changes anything.
    support: none
  idempotent:
    description: Changes nothing.
    support: full
options:
  rails:
    description:
      - What to probe, from P(sparkwright.dsv41.fabric_probe_plan#filter). Each has rail, peer, netdev, hca, port,
        gid_index, mtu, path_mtu, rate_gbps, local, remote, serves and tcp_port.
    type: list
    elements: dict
    required: true
  rdma:
    description: Whether to run the RDMA pingpong.
    type: bool
    default: true
  bandwidth:
    description: Whether to run the bandwidth test, one rail after the other, with blocks of 1 MiB at most.
    type: bool
    default: false
  bandwidth_s:
    description: Seconds of each bandwidth test.
    type: int
    default: 3
  min_ratio:
    description: Bandwidth that is enough, as part of the link's rate.
    type: float
    default: 0.4
  deadline_s:
    description: Seconds that one end waits for the other.
    type: int
    default: 20
"""

EXAMPLES = r"""
- name: Probe the rails
  sparkwright.dsv41.fabric_probe:
    rails: "{{ fabric_survey | sparkwright.dsv41.fabric_probe_plan(inventory_hostname, 18600) }}"
"""

RETURN = r"""
results:
  description:
    - One entry for each probe, as kind (ping, rdma or bandwidth), rail, peer, ok, detail and evidence.
    - Kind tool names a missing program, as tool and package.
  returned: always
  type: list
  elements: dict
"""

import concurrent.futures
import os
import subprocess
import time
from typing import Any, Dict, List, Mapping

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils import probes


def execute(argv: List[str], limit_s: float) -> probes.Done:
    """Run a command to its end, or kill it at its limit."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            timeout=limit_s,
            check=False,
            stdin=subprocess.DEVNULL,
            # ping speaks the user's language.
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as late:
        return probes.Done(None, ((late.stdout or b"") + (late.stderr or b"")).decode(errors="replace"))
    return probes.Done(done.returncode, (done.stdout + done.stderr).decode(errors="replace"))


def meet(argv: List[str], rail: Mapping[str, Any], deadline_s: float) -> probes.Done:
    """Serve a peer, or call it until it serves; both ends begin within seconds of each other."""
    end = time.monotonic() + deadline_s
    if rail["serves"]:
        return execute(argv, deadline_s)
    while True:
        left = end - time.monotonic()
        done = execute([*argv, rail["remote"]], max(left, 1.0))
        if not probes.not_serving(done) or left < 0:
            return done
        time.sleep(0.3)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "rails": {"type": "list", "elements": "dict", "required": True},
            "rdma": {"type": "bool", "default": True},
            "bandwidth": {"type": "bool", "default": False},
            "bandwidth_s": {"type": "int", "default": 3},
            "min_ratio": {"type": "float", "default": 0.4},
            "deadline_s": {"type": "int", "default": 20},
        },
        supports_check_mode=True,
    )
    params, rails = module.params, module.params["rails"]
    results: List[Dict[str, Any]] = []
    tools = {}
    for name, wanted in (("ping", True), ("ibv_rc_pingpong", params["rdma"]), ("ib_write_bw", params["bandwidth"])):
        path = module.get_bin_path(name) if wanted else None
        if path:
            tools[name] = path
        elif wanted and rails:
            results.append({"kind": "tool", "ok": False, "tool": name, "package": probes.PACKAGES[name]})
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(rails))) as pool:
        if "ping" in tools:
            pings = pool.map(lambda rail: execute(probes.ping(tools["ping"], rail), params["deadline_s"]), rails)
            results += [probes.judge_ping(rail, done) for rail, done in zip(rails, pings)]
        if "ibv_rc_pingpong" in tools:
            argvs = [probes.pingpong(tools["ibv_rc_pingpong"], rail) for rail in rails]
            met = pool.map(lambda argv, rail: meet(argv, rail, params["deadline_s"]), argvs, rails)
            results += [probes.judge_pingpong(rail, done) for rail, done in zip(rails, met)]
    if "ib_write_bw" in tools:
        # One after the other, in the same order on all ranks: rails of one cable share its bandwidth.
        for rail in sorted(rails, key=lambda rail: rail["tcp_port"]):
            argv = probes.bandwidth(tools["ib_write_bw"], rail, params["bandwidth_s"])
            done = meet(argv, rail, params["deadline_s"] * len(rails))
            results.append(probes.judge_bandwidth(rail, done, params["min_ratio"]))
    module.exit_json(changed=False, results=results)


if __name__ == "__main__":
    main()
