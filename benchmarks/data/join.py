#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""How long joining and verifying a file in parts takes, against `cat parts > file && sha256sum file` in the same run.

See README.md beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shards import MIB, blocks, cpu

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.sparkwright.dsv41.plugins.module_utils import join as joining  # noqa: E402
from ansible_collections.sparkwright.dsv41.plugins.module_utils import weights  # noqa: E402

NAME = "model.safetensors"
# On the rivals' side nothing but the shell's own commands, as an operator would type them.
RIVALS = {
    "cat, sha256sum": 'cat {parts} > {name} && test "$(sha256sum {name})" = "{digest}  {name}"',
    "cat, sync, sha256sum": 'cat {parts} > {name} && sync {name} && test "$(sha256sum {name})" = "{digest}  {name}"',
    "cat, openssl": 'cat {parts} > {name} && test "$(openssl dgst -sha256 -r {name})" = "{digest} *{name}"',
    "cat, sync, openssl": "cat {parts} > {name} && sync {name} && "
    'test "$(openssl dgst -sha256 -r {name})" = "{digest} *{name}"',
}


@dataclass
class Spent:
    """What one way took: seconds, seconds of processors and bytes of extra disk, one each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    extra: list[int] = field(default_factory=list)


class Disk(threading.Thread):
    """The most that the files of a directory took meanwhile, beyond what they took at first. Bytes."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.before = self.used()
        self.most = 0
        self.over = threading.Event()

    def used(self) -> int:
        total = 0
        for entry in os.scandir(self.directory):
            try:
                total += entry.stat().st_blocks * 512
            except FileNotFoundError:
                continue
        return total

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.most = max(self.most, self.used() - self.before)


def fill(directory: Path, sizes: list[int]) -> tuple[list[tuple[str, int]], str]:
    """Write the parts, have them on the disk and not in memory. Returns them and the digest, each time the same."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    digest = hashlib.sha256()
    parts = []
    for number, size in enumerate(sizes, 1):
        path = directory / f"{NAME}.part{number:02}"
        with open(path, "wb", buffering=0) as stream:
            for data in blocks(number, size):
                stream.write(data)
                digest.update(data)
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        parts.append((path.name, size))
    weights.flush(str(directory))
    return parts, digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.4, help="size of the file; twice this is needed on the disk")
    parser.add_argument("--parts", type=int, default=11)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=["cat, sha256sum", "cat, sync, openssl"])
    parser.add_argument("--directory", help="where; by default TMPDIR says it")
    options = parser.parse_args()
    size = int(options.gib * 2**30) // options.parts
    sizes = [size + number for number in range(options.parts)]
    spent = {name: Spent() for name in ["join", *options.rivals]}
    with tempfile.TemporaryDirectory(dir=options.directory) as top:
        directory = Path(top) / "files"

        def ours(parts: list[tuple[str, int]], digest: str) -> None:
            joining.join(str(directory), NAME, parts, f"sha256:{digest}")

        def rival(command: str) -> Callable[[list[tuple[str, int]], str], None]:
            def run(parts: list[tuple[str, int]], digest: str) -> None:
                names = " ".join(name for name, _ in parts)
                script = command.format(parts=names, name=NAME, digest=digest)
                subprocess.run(["sh", "-c", script], cwd=directory, check=True)

            return run

        ways = {"join": ours, **{name: rival(RIVALS[name]) for name in options.rivals}}
        for turn in range(options.rounds):
            order = list(ways) if turn % 2 == 0 else list(reversed(ways))
            for name in order:
                parts, digest = fill(directory, sizes)
                time.sleep(1)
                disk = Disk(directory)
                disk.start()
                started, used = time.perf_counter(), cpu()
                ways[name](parts, digest)
                spent[name].wall.append(time.perf_counter() - started)
                spent[name].cpu.append(cpu() - used)
                disk.over.set()
                disk.join()
                spent[name].extra.append(disk.most)
                print(f"round {turn + 1}: {name}: {spent[name].wall[-1]:.2f} s", file=sys.stderr)
    print(f"{sum(sizes) / 2**30:.2f} GiB in {len(sizes)} parts; median of {options.rounds}, least and most;", end=" ")
    print(f"{os.cpu_count()} cores; Python {platform.python_version()}\n")
    print(
        f"{'what':22} {'s':>7} {'least':>7} {'most':>7} {'cpu s':>7} {'MiB/s':>7} {'extra MiB':>10} {'ratio':>6} disk"
    )
    ours_spent = spent["join"]
    for name, each in spent.items():
        wall, extra = statistics.median(each.wall), statistics.median(each.extra)
        # Of each round by itself: what else the machine does changes from round to round.
        ratio = statistics.median(a / b for a, b in zip(each.wall, ours_spent.wall, strict=True))
        part = statistics.median(ours_spent.extra) / extra if extra else 0
        print(
            f"{name:22} {wall:7.2f} {min(each.wall):7.2f} {max(each.wall):7.2f} {statistics.median(each.cpu):7.2f} "
            f"{sum(sizes) / MIB / wall:7.0f} {extra / MIB:10.0f} {ratio:6.2f} {part:4.2f}"
        )


if __name__ == "__main__":
    main()
