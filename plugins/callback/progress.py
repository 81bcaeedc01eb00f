# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
name: progress
author: Sparkwright contributors (@sparkwright)
version_added: 0.1.0
type: aggregate
short_description: Says what is being done while a task takes long, and sums up at the end
description:
  - Prints a line every ten seconds while one task runs, with the hosts it still runs on. Where a module tells how far
    it is, each host has its own line with bytes, rate and remaining time.
  - After the recap prints the C(summary) lines that roles put into their results.
requirements:
  - enabled by C(callbacks_enabled)
"""

import os
import threading
import time
from typing import Any

from ansible.plugins.callback import CallbackBase
from ansible_collections.sparkwright.dsv41.plugins.module_utils.progress import Sample, parse
from ansible_collections.sparkwright.dsv41.plugins.plugin_utils.watched import sample_file

_EVERY_S = 10.0


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "sparkwright.dsv41.progress"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._task = ""
        self._since = 0.0
        self._running: set[str] = set()
        self._summary: list[str] = []
        self._ended = threading.Event()

    def v2_playbook_on_start(self, playbook: Any) -> None:
        # One command may run several playbooks.
        self._ended = threading.Event()
        self._summary = []
        threading.Thread(target=self._tick, args=(self._ended,), daemon=True).start()

    def _tick(self, ended: threading.Event) -> None:
        told = 0.0
        while not ended.wait(1.0):
            running, task, since = sorted(self._running), self._task, self._since
            now = time.monotonic()
            waited = now - since
            if running and waited >= _EVERY_S and now - told >= _EVERY_S:
                told = now
                samples = {host: self._sample(host) for host in running}
                lines = [f"{host}: {sample.line()}" for host, sample in samples.items() if sample]
                others = ", ".join(host for host, sample in samples.items() if not sample)
                for line in [*lines, *([others] if others else [])]:
                    # Straight to the descriptor: a lock held here while Ansible forks would stay held in the fork.
                    os.write(1, f"  ... {task}: {line} ({waited:.0f} s)\n".encode())

    def _sample(self, host: str) -> Sample | None:
        try:
            return parse(sample_file(host).read_text())
        except OSError:
            return None

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        self._running = set()
        self._task, self._since = task.get_name(), time.monotonic()

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        # engine_wait tells more itself.
        if not task.action.endswith("engine_wait"):
            self._running.add(host.get_name())

    def _done(self, result: Any) -> None:
        self._running.discard(result._host.get_name())
        lines = result._result.get("summary")
        # Other modules may return something else under this name.
        for line in lines if isinstance(lines, list) else []:
            if not result._result.get("_ansible_no_log") and line not in self._summary:
                self._summary.append(str(line))

    def v2_runner_on_ok(self, result: Any) -> None:
        self._done(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._done(result)

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._done(result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._done(result)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self._ended.set()
        for line in self._summary:
            self._display.display(line)
