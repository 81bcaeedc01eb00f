# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Controller side of engine_wait: one process per rank, all on this machine, that share their samples as files."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.sparkwright.dsv41.plugins.module_utils import engine, fabric_logs
from ansible_collections.sparkwright.dsv41.plugins.plugin_utils.run_files import put, run_file

# Ranks start their wait together; one that has not written a sample by then is judged without.
_PEERS_S = 60

Sample = dict[str, Any]


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

        share = run_file(f"engine-wait-{self._task._uuid}")
        share.mkdir(exist_ok=True)
        rank, started, told = args["rank"], time.monotonic(), 0.0
        mine: Sample = {"exists": True, "running": True, "host": (task_vars or {}).get("inventory_hostname", "")}
        history: list[dict[int, Sample]] = []
        seconds: list[float] = []
        while True:
            mine = self._sample(args, mine, task_vars)
            put(share / f"{rank}.json", json.dumps(mine))
            # A sibling that has left leaves its last sample, and its verdict where that was not ready.
            samples = {int(path.stem): json.loads(path.read_text()) for path in share.glob("*.json")}
            elapsed = time.monotonic() - started
            history.append(samples)
            seconds.append(elapsed)
            told_by_sibling = next((sample["verdict"] for sample in samples.values() if "verdict" in sample), None)
            if told_by_sibling:
                verdict = engine.Verdict(**told_by_sibling)
                break
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
            result["msg"] = "\n".join([verdict.reason, *_meaning(samples)])
            put(share / f"{rank}.json", json.dumps({**mine, "verdict": asdict(verdict)}))
            result["failed"] = True
        return result

    def _sample(self, args: dict[str, Any], last: Sample, task_vars: dict[str, Any] | None) -> Sample:
        """The rank's state now, or its last one with the number of attempts in a row that got no answer."""
        try:
            answer = self._execute_module(
                module_name="sparkwright.dsv41.engine_state",
                module_args={"container": args["container"], "host": last["host"], "health_url": args["health_url"]},
                task_vars=task_vars,
            )
        except AnsibleConnectionFailure as error:
            answer = {"msg": str(error)}
        if "state" not in answer:
            return {**last, "lost": last.get("lost", 0) + 1, "error": str(answer.get("msg"))}
        return {**answer["state"], "interval_s": args["interval_s"]}


def _meaning(samples: dict[int, Sample]) -> list[str]:
    """What the errors in the ranks' logs mean, with what repairs them."""
    return [
        finding.line()
        for sample in samples.values()
        for finding in fabric_logs.match(sample.get("log_tail") or [], str(sample.get("host")))
    ]
