#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""How fast a directory of weights is verified, against `xargs -P $(nproc) sha256sum` of the same files in the same run.

See README.md beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shards import MIB, blocks, cpu

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.sparkwright.dsv41.plugins.module_utils import weights  # noqa: E402

RIVALS = {
    "xargs sha256sum": ["sha256sum"],
    # The fastest that most systems have; sha256sum is often built without it.
    "xargs openssl": ["openssl", "dgst", "-sha256", "-r"],
}


def fill(directory: Path, count: int, size: int) -> list[weights.FileEntry]:
    entries = []
    for number in range(count):
        digest = hashlib.sha256()
        path = directory / f"model-{number + 1:05}-of-{count:05}.bin"
        with open(path, "wb", buffering=0) as stream:
            for data in blocks(number, size):
                stream.write(data)
                digest.update(data)
            os.fsync(stream.fileno())
        entries.append(weights.FileEntry(path.name, size, f"sha256:{digest.hexdigest()}"))
    return entries


def forget(directory: Path) -> None:
    """Have these files, and no others, out of memory."""
    for path in directory.iterdir():
        with open(path, "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def recall(directory: Path) -> None:
    for path in directory.iterdir():
        with open(path, "rb", buffering=0) as stream:
            while stream.read(MIB):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="size of all files together")
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--caches", nargs="*", choices=["cold", "warm"], default=["cold", "warm"])
    parser.add_argument("--directory", help="where; by default TMPDIR says it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as top:
        directory = Path(top)
        entries = fill(directory, options.files, int(options.gib * 2**30) // options.files)
        total = sum(entry.size for entry in entries)
        wanted = {entry.path: entry.digest for entry in entries}

        def ours() -> None:
            with ThreadPoolExecutor(options.workers) as pool:
                checked = list(pool.map(lambda entry: weights.check_file(str(directory), entry, rehash=True), entries))
            assert not [item for item in checked if item.finding]

        def rival(command: list[str]) -> Callable[[], None]:
            def run() -> None:
                names = "\0".join(wanted)
                argv = ["xargs", "-0", "-n1", f"-P{options.workers}", *command]
                done = subprocess.run(argv, cwd=directory, input=names, capture_output=True, text=True, check=True)
                lines = (line.split() for line in done.stdout.splitlines())
                assert {path.lstrip("*"): f"sha256:{digest}" for digest, path in lines} == wanted

            return run

        ways = {"check_file": ours, **{name: rival(command) for name, command in RIVALS.items()}}
        print(f"{total / 2**30:.2f} GiB in {len(entries)} files, {options.workers} workers;", end=" ")
        print(f"median of {options.rounds}, least and most; Python {platform.python_version()}\n")
        print(f"{'cache':6} {'what':18} {'s':>7} {'least':>7} {'most':>7} {'cpu s':>7} {'MiB/s':>7} {'ours/its':>8}")
        for cache in options.caches:
            wall: dict[str, list[float]] = {name: [] for name in ways}
            used: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(options.rounds):
                for name in list(ways) if turn % 2 == 0 else list(reversed(ways)):
                    (forget if cache == "cold" else recall)(directory)
                    started, before = time.perf_counter(), cpu()
                    ways[name]()
                    wall[name].append(time.perf_counter() - started)
                    used[name].append(cpu() - before)
            for name, times in wall.items():
                middle = statistics.median(times)
                # Of each round by itself: what else the machine does changes from round to round.
                ratio = statistics.median(a / b for a, b in zip(times, wall["check_file"], strict=True))
                print(
                    f"{cache:6} {name:18} {middle:7.2f} {min(times):7.2f} {max(times):7.2f} "
                    f"{statistics.median(used[name]):7.2f} {total / MIB / middle:7.0f} {ratio:8.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
