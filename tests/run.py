#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Every test, in the order in which a fault is cheapest to find: `run.py [part ...]`; without a part, all of them.

Each part has a time limit and a line that says how long it took. A lab that this run made is removed at the end; one
that was there before stays.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAB = [sys.executable, "tests/lab/lab.py"]
SCRIPTS = [
    "roles/recipe/files/mounted/sparkwright_gate.py",
    "tests/lab/lab.py",
    "tests/run.py",
    "tests/acceptance/vm.py",
    "tests/acceptance/record.py",
]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
# The order of deploy.yml: a role's scenario needs what the roles before it left.
ORDER = ["preflight", "fabric", "peers", "weights", "weight_sync", "image", "engine", "recipe", "smoke", "doctor"]


@dataclass(frozen=True)
class Part:
    """A step of the run; `limit_s` is generous, for a slow shared machine."""

    name: str
    argv: list[str]
    limit_s: int
    inside: bool = True  # in the lab's environment (virtual environment, engine)


def molecule() -> list[Part]:
    names = [*ORDER, *(role for role in ROLES if role not in ORDER)]
    return [Part(f"molecule-{name}", ["molecule", "test", "-s", name, "--destroy=never"], 600) for name in names]


PARTS = [
    Part("controller", [*LAB, "venv"], 600, inside=False),
    Part("ruff", ["ruff", "check", "."], 60),
    Part("format", ["ruff", "format", "--check", "."], 60),
    Part("mypy", ["mypy", "plugins", "kernels/src", *SCRIPTS, "tests/support"], 300),
    Part("yamllint", ["yamllint", "."], 120),
    Part("ansible-lint", ["ansible-lint", "--nocolor"], 600),
    Part("unit", ["pytest", "tests/unit", "tests/render"], 900),
    Part("lab-create", [*LAB, "create"], 1200, inside=False),
    Part("disk-full", ["pytest", "tests/e2e/test_disk_full.py"], 300),
    Part("e2e-fresh", ["pytest", "tests/e2e/test_fresh.py"], 300),
    Part("lab", ["make", "lab"], 1500, inside=False),
    Part("e2e", ["pytest", "tests/e2e/test_lab.py"], 1800),
    *molecule(),
    Part("engine", ["pytest", "tests/e2e/test_engine_suite.py"], 900),
    # On a fresh machine this builds ZFS for their kernel, which takes ten minutes.
    Part("machines", [sys.executable, "tests/acceptance/vm.py", "up"], 1500, inside=False),
    Part("acceptance", ["pytest", "tests/acceptance"], 2400),
]
GROUPS = {
    "lint": ["controller", "ruff", "format", "mypy", "yamllint", "ansible-lint"],
    "unit": ["controller", "unit"],
    "acceptance": ["controller", "machines", "acceptance"],
}


def run(part: Part) -> bool:
    argv = [*LAB, "exec", *part.argv] if part.inside else part.argv
    print(f"=== {part.name}: {' '.join(part.argv)}", flush=True)
    started = time.monotonic()
    env = {**os.environ, "NO_COLOR": "1", "ANSIBLE_NOCOLOR": "1"}
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code: int | str = process.wait(part.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = f"stopped at its limit of {part.limit_s} s"
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    took = time.monotonic() - started
    print(f"=== {part.name}: {'ok' if code == 0 else f'FAILED ({code})'} in {took:.0f} s", flush=True)
    return code == 0


def main(names: list[str]) -> int:
    chosen = [name for given in names for name in GROUPS.get(given, [given])]
    unknown = set(chosen) - {part.name for part in PARTS}
    if unknown:
        print(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(part.name for part in PARTS)}")
        return 2
    lab_was_there = (ROOT / ".lab").exists()
    passed, failed = 0, []
    try:
        for part in [part for part in PARTS if not chosen or part.name in chosen]:
            # A fresh lab cannot be shown on one that is deployed already.
            if part.name == "e2e-fresh" and lab_was_there:
                print("=== e2e-fresh: SKIPPED, the lab was there before this run (make lab-down first)")
            elif run(part):
                passed += 1
            else:
                failed.append(part.name)
                if part.name in ("controller", "lab-create", "lab"):
                    break
    finally:
        if not chosen and not lab_was_there:
            subprocess.run([*LAB, "down"], cwd=ROOT, check=False)
    print(f"parts: {passed} passed, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
