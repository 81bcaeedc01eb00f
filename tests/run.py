#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Every test, in the order in which a fault is cheapest to find: `run.py [part ...]`; without a part, all of them.

Each part has a time limit and a line that says how long it took. A lab that this run made is removed at the end; one
that was there before stays. What only costs processor time runs beside the others, at the lowest priority, until a part
needs it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
LAB = [sys.executable, "tests/lab/lab.py"]
VM = [sys.executable, "tests/acceptance/vm.py"]
WORKERS = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
SCRIPTS = [
    "roles/recipe/files/mounted/sparkwright_gate.py",
    "tests/lab/lab.py",
    "tests/run.py",
    "tests/acceptance/vm.py",
    "tests/acceptance/record.py",
]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
# The order of deploy.yml: a role's scenario needs what the roles before it left.
ORDER = [
    "preflight",
    "fabric",
    "peers",
    "weights",
    "weight_sync",
    "engram",
    "image",
    "engine",
    "recipe",
    "smoke",
    "doctor",
]


@dataclass(frozen=True)
class Part:
    """A step of the run; `limit_s` is generous, for a slow shared machine."""

    name: str
    argv: list[str]
    limit_s: int
    inside: bool = True  # in the lab's environment (virtual environment, engine)
    beside: str = ""  # runs beside the others, until the part of this name is due


def molecule() -> list[Part]:
    names = [*ORDER, *(role for role in ROLES if role not in ORDER)]
    return [Part(f"molecule-{name}", ["molecule", "test", "-s", name, "--destroy=never"], 600) for name in names]


PARTS = [
    Part("controller", [*LAB, "venv"], 600, inside=False),
    Part("compiler", [*LAB, "compiler"], 300, inside=False),
    # On a fresh machine this builds ZFS for a kernel: minutes of both processors, and nothing waits for it for long.
    Part("machine-image", [*VM, "image"], 3000, inside=False, beside="machines"),
    Part("ruff", ["ruff", "check", "."], 60),
    Part("format", ["ruff", "format", "--check", "."], 60),
    Part("mypy", ["mypy", "plugins", "kernels/src", *SCRIPTS, "tests/support"], 300),
    Part("yamllint", ["yamllint", "."], 120),
    Part("ansible-lint", ["ansible-lint", "--nocolor"], 600),
    Part("unit", ["pytest", *WORKERS, "tests/unit", "tests/render"], 900),
    Part("lab-create", [*LAB, "create"], 1200, inside=False),
    Part("disk-full", ["pytest", "tests/e2e/test_disk_full.py"], 300),
    Part("e2e-fresh", ["pytest", "tests/e2e/test_fresh.py"], 300),
    Part("lab", ["make", "lab"], 1500, inside=False),
    Part("e2e", ["pytest", "tests/e2e/test_lab.py"], 1800),
    *molecule(),
    Part("engine", ["pytest", "tests/e2e/test_engine_suite.py"], 900),
    Part("machines", [*VM, "up"], 1500, inside=False),
    Part("acceptance", ["pytest", "tests/acceptance"], 2400),
]
GROUPS = {
    "lint": ["controller", "ruff", "format", "mypy", "yamllint", "ansible-lint"],
    "unit": ["controller", "compiler", "unit"],
    "acceptance": ["controller", "machine-image", "machines", "acceptance"],
}


@dataclass(eq=False)
class Running:
    part: Part
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None  # of a part beside the others, which would not be readable between theirs
    started: float


RUNNING: set[Running] = set()


def start(part: Part) -> Running:
    argv = [*LAB, "exec", *part.argv] if part.inside else part.argv
    note = f" (beside what comes before {part.beside}; told when it ends)" if part.beside else ""
    print(f"=== {part.name}: {' '.join(part.argv)}{note}", flush=True)
    output = tempfile.TemporaryFile() if part.beside else None  # noqa: SIM115
    process = subprocess.Popen(
        ["nice", "-n", "19", *argv] if part.beside else argv,
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1", "ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    running = Running(part, process, output, time.monotonic())
    RUNNING.add(running)
    return running


def finish(running: Running) -> bool:
    part, process = running.part, running.process
    try:
        code: int | str = process.wait(part.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = f"stopped at its limit of {part.limit_s} s"
    took = time.monotonic() - running.started
    RUNNING.discard(running)
    said = ""
    if running.output:
        running.output.seek(0)
        said = running.output.read().decode(errors="replace")
    result = "ok" if code == 0 else f"FAILED ({code})"
    print(f"{said}=== {part.name}: {result} in {took:.0f} s\n", end="", flush=True)
    return code == 0


def stop() -> None:
    """End what still runs: at an interrupt all of it, else what runs beside and is not needed any more."""
    for running in list(RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGTERM)


def main(names: list[str]) -> int:
    chosen = [name for given in names for name in GROUPS.get(given, [given])]
    unknown = set(chosen) - {part.name for part in PARTS}
    if unknown:
        print(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(part.name for part in PARTS)}")
        return 2
    lab_was_there = (ROOT / ".lab").exists()
    results: dict[str, bool] = {}
    beside: dict[str, tuple[str, Future[bool]]] = {}  # by the part that waits for them
    with ThreadPoolExecutor() as pool:
        try:
            for part in [part for part in PARTS if not chosen or part.name in chosen]:
                if part.name in beside:
                    name, future = beside.pop(part.name)
                    results[name] = future.result()
                # A fresh lab cannot be shown on one that is deployed already.
                if part.name == "e2e-fresh" and lab_was_there:
                    print("=== e2e-fresh: SKIPPED, the lab was there before this run (make lab-down first)")
                elif part.beside:
                    beside[part.beside] = part.name, pool.submit(finish, start(part))
                else:
                    results[part.name] = finish(start(part))
                    if not results[part.name] and part.name in ("controller", "lab-create", "lab"):
                        break
            else:
                results |= {name: future.result() for name, future in beside.values()}
        finally:
            stop()
            if not chosen and not lab_was_there:
                subprocess.run([*LAB, "down"], cwd=ROOT, check=False)
    failed = [name for name, passed in results.items() if not passed]
    print(
        f"parts: {len(results) - len(failed)} passed, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
