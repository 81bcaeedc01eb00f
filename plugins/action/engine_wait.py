# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Controller side of engine_wait: one process per rank, all on this machine, that share their samples as files."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.sparkwright.dsv41.plugins.module_utils import engine

# Ranks start their wait together; one that has not written a sample by then is judged without.
_PEERS_S = 60


class ActionModule(ActionBase):
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={
                "container": {"type": "str", "required": True},
                "rank": {"type": "int", "required": True},
                "world_size": {"type": "int", "required": True},
                "health_url": {"type": "str", "default": ""},
                "deadline_s": {"type": "int", "required": True},
                "stall_s": {"type": "int", "required": True},
                "interval_s": {"type": "int", "default": 3},
            }
        )
        if self._task.check_mode:
            return {**result, "changed": False, "skipped": True, "msg": "nothing was started in check mode"}

        # All forks of one ansible-playbook have the same parent, so the directory belongs to this task of this run.
        share = Path(tempfile.gettempdir()) / f"sparkwright-wait-{os.getuid()}-{os.getppid()}-{self._task._uuid}"
        share.mkdir(mode=0o700, exist_ok=True)
        if share.stat().st_uid != os.getuid():
            return {**result, "failed": True, "msg": f"{share} belongs to another user"}
        rank, started, told = args["rank"], time.monotonic(), 0.0
        mine = share / f"{rank}.json"
        history: list[dict[int, dict[str, Any]]] = []
        seconds: list[float] = []
        while True:
            # A sibling's verdict is final: it may have left already, with its sample.
            answer = self._execute_module(
                module_name="sparkwright.dsv41.engine_state",
                module_args={
                    "container": args["container"],
                    "host": task_vars["inventory_hostname"] if task_vars else "",
                    "health_url": args["health_url"],
                },
                task_vars=task_vars,
            )
            if answer.get("failed") or "state" not in answer:
                state = {
                    "exists": True,
                    "running": False,
                    "status": "unreachable",
                    "log_tail": [str(answer.get("msg"))],
                }
            else:
                state = answer["state"]
            state["interval_s"] = args["interval_s"]
            state["host"] = task_vars["inventory_hostname"] if task_vars else ""
            partial = mine.with_suffix(".tmp")
            partial.write_text(json.dumps(state))
            partial.rename(mine)
            samples = {int(path.stem): json.loads(path.read_text()) for path in share.glob("*.json")}
            elapsed = time.monotonic() - started
            history.append(samples)
            seconds.append(elapsed)
            verdict = engine.judge(history, seconds, args["deadline_s"], args["stall_s"])
            complete = len(samples) == args["world_size"] or elapsed > _PEERS_S
            if verdict.state == "dead" or (verdict.state != "progressing" and complete):
                break
            if rank == 0 and elapsed - told >= 10:
                told = elapsed
                Display().display(f"  engine: {verdict.reason}")
            time.sleep(args["interval_s"])
        result.update(changed=False, verdict=verdict.state, seconds=round(elapsed, 1), msg=verdict.reason)
        if verdict.state != "ready":
            result["failed"] = True
        return result
