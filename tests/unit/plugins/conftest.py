# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What tests of plugins share: a module run as Ansible runs it, commands that answer from a table, recorded answers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

Result = dict[str, Any]


@pytest.fixture
def run_module(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a module's main() and return what it told Ansible."""

    def run(main: Callable[[], None], check: bool = False, **options: Any) -> Result:
        with patch_module_args({**options, "_ansible_check_mode": check}), pytest.raises(SystemExit) as stop:
            main()
        result: Result = json.loads(capsys.readouterr().out)
        assert bool(stop.value.code) == bool(result.get("failed"))
        return result

    return run


@dataclass
class Commands:
    """A PATH with commands that answer from tables and note how they were called."""

    directory: Path

    def add(self, name: str, answers: dict[str, tuple[int, str, str]]) -> None:
        """`answers` maps arguments (as in the shell, `*` for any) to exit code, standard output and error."""
        lines = ["#!/bin/sh", f"printf '%s\\n' \"$*\" >> {self.directory}/{name}.calls", 'case "$*" in']
        for arguments, (code, out, err) in answers.items():
            pattern = arguments if arguments == "*" else shlex.quote(arguments)
            lines.append(
                f"  {pattern}) printf '%s' {shlex.quote(out)}; printf '%s' {shlex.quote(err)} >&2; exit {code} ;;"
            )
        lines += [f'  *) echo "unexpected: {name} $*" >&2; exit 99 ;;', "esac"]
        (self.directory / name).write_text("\n".join(lines) + "\n")
        (self.directory / name).chmod(0o755)

    def calls(self, name: str) -> list[str]:
        record = self.directory / f"{name}.calls"
        return record.read_text().splitlines() if record.exists() else []


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return Commands(directory)


@pytest.fixture
def recorded() -> Callable[[str], str]:
    """A recorded answer by name; see recorded/README.md."""
    return lambda name: (Path(__file__).parent / "recorded" / f"{name}.json").read_text()
