# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
# The code is in plugins/action/engine_wait.py: it runs on the controller.
from __future__ import annotations

DOCUMENTATION = r"""
module: engine_wait
author: Sparkwright contributors (@sparkwright)
version_added: 0.1.0
short_description: Wait until a started cluster serves
description:
  - Run on every rank in one task. Samples each rank with M(sparkwright.dsv41.engine_state) and judges progress over
    all of them, so that the death of one rank ends the wait on all.
  - Prints what the ranks are doing while it waits.
attributes:
  check_mode:
    description: Skipped in check mode, since nothing was started.
    support: none
  diff_mode:
    description: Never changes anything.
    support: none
  idempotent:
    description: Reads only.
    support: full
options:
  container:
    description: Name of this rank's container.
    type: str
    required: true
  rank:
    description: This host's rank.
    type: int
    required: true
  world_size:
    description: Number of ranks.
    type: int
    required: true
  health_url:
    description: Health URL; empty on ranks that serve none.
    type: str
    default: ""
  deadline_s:
    description: Give up after this many seconds, whatever progress is seen.
    type: int
    required: true
  stall_s:
    description: Give up after this many seconds without a log line or CPU time on any rank.
    type: int
    required: true
  interval_s:
    description: Seconds between samples.
    type: int
    default: 3
"""

EXAMPLES = r"""
- name: Wait for the endpoint
  sparkwright.dsv41.engine_wait:
    container: sparkwright-lab-r0
    rank: 0
    world_size: 2
    health_url: http://127.0.0.1:8000/health
    deadline_s: 900
    stall_s: 240
"""

RETURN = r"""
verdict:
  description: ready, stalled or dead.
  returned: always
  type: str
seconds:
  description: How long this rank waited.
  returned: always
  type: float
"""
