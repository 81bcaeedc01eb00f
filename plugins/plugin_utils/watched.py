# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs a module and meanwhile reads how far it is, for the callback to show."""

from __future__ import annotations

import shlex
import threading
import uuid
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.sparkwright.dsv41.plugins.module_utils.progress import parse
from ansible_collections.sparkwright.dsv41.plugins.plugin_utils.run_files import put, run_file

_EVERY_S = 2.0
# Made by the module, which runs as root; what it holds is no secret.
_DIRECTORY = "/run/sparkwright"


def sample_file(host: str) -> Path:
    """Where the sample of an inventory host is kept."""
    return run_file(f"progress-{host.replace('/', '_')}.json")


class WatchedModule(ActionBase):
    """Base of the action plugins of modules with a C(progress) option."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        there = f"{_DIRECTORY}/{uuid.uuid4().hex}.json"
        here = sample_file(str((task_vars or {}).get("inventory_hostname", "")))
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(there, here, ended), daemon=True)
        watch.start()
        try:
            args = {**self._task.args, "progress": there}
            result.update(self._execute_module(module_args=args, task_vars=task_vars))
        finally:
            ended.set()
            watch.join(_EVERY_S)
            here.unlink(missing_ok=True)
        return result

    def _watch(self, there: str, here: Path, ended: threading.Event) -> None:
        while not ended.wait(_EVERY_S):
            try:
                # Without becoming anybody: the module's own connection may be in the middle of that.
                answer = self._low_level_execute_command(f"cat {shlex.quote(there)}", sudoable=False)
            except Exception:  # progress is a courtesy; the module's own connection tells what is wrong
                continue
            text = answer.get("stdout", "")
            if parse(text) and not ended.is_set():
                put(here, text)
