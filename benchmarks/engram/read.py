#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Random rows a second, against fio on the same file and against pools of threads, in the same run.

See README.md beside it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import Any

import numpy as np
from table import KERNELS, drop, library, make

sys.path.insert(0, str(KERNELS / "src"))

from sparkwright_kernels.engram import pack as packing  # noqa: E402
from sparkwright_kernels.engram.formats import EngramFile, planned  # noqa: E402
from sparkwright_kernels.engram.reader import EngramReader  # noqa: E402
from sparkwright_kernels.engram.source import find_source  # noqa: E402

BATCH = 49_152  # rows of a 2048-token chunk on a rank at tensor-parallel size 2, both layers
DECODE = (24, 96, 144)  # of one token, and of drafts of 3 and 5


class Ids:
    """Random ids of a file, other ones each time, each time the same ones."""

    def __init__(self, file: EngramFile) -> None:
        self.rng, self.rows = np.random.default_rng(1), file.rows

    def draw(self, count: int) -> Any:
        return self.rng.integers(self.rows.lo, self.rows.hi, count)


def ours(path: Path, seconds: float, backend: Any, depth: int, batch: int, threads: int = 32) -> tuple[float, float]:
    """Reads a second, and blocks of 4 KiB a row (of distinct rows), in batches of so many rows."""
    with EngramReader(path, backend=backend, queue_depth=depth, threads=threads) as reader:
        ids, out = Ids(reader.file), np.empty((batch, 264), np.uint8)
        spent = 0.0
        while spent < seconds:
            drawn = ids.draw(batch)
            began = time.perf_counter()
            reader.read(drawn, out)
            spent += time.perf_counter() - began
        stats = reader.stats
        return stats.reads / spent, stats.read_bytes / 4096 / stats.unique_rows


def fio(path: Path, seconds: float, *options: str) -> float:
    command = ["fio", "--name=r", f"--filename={path}", "--rw=randread", "--bs=4k", "--direct=1", "--readonly"]
    command += ["--time_based", f"--runtime={seconds}", "--norandommap", "--group_reporting", "--output-format=json"]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    found: float = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["iops"]
    return found


def python_pool(path: Path, seconds: float, file: EngramFile, batch: int, threads: int = 32) -> float:
    """Reads a second of a pool of Python threads, a future a row: the first thing one writes."""
    ids, mine = Ids(file), local()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(id: int) -> bytes:
        if not hasattr(mine, "block"):
            mine.block = mmap.mmap(-1, 8192)
        offset = file.offset(id - file.rows.lo)
        os.preadv(fd, [memoryview(mine.block)[: 4096 if offset % 4096 <= 4096 - 264 else 8192]], offset // 4096 * 4096)
        return mine.block[offset % 4096 : offset % 4096 + 264]

    rows, spent = 0, 0.0
    with ThreadPoolExecutor(threads) as pool:
        while spent < seconds:
            drawn = ids.draw(batch).tolist()
            began = time.perf_counter()
            for _ in pool.map(read, drawn):
                pass
            spent += time.perf_counter() - began
            rows += batch
    os.close(fd)
    return rows / spent


def in_turns(ways: dict[str, Callable[[], float]], rounds: int) -> Iterator[tuple[str, list[float]]]:
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for round in range(rounds):
        for name in names[round % len(names) :] + names[: round % len(names)]:
            found[name].append(ways[name]())
    yield from found.items()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gib", type=float, default=4, help="size of the table; three times this is needed on the disk"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement")
    parser.add_argument("--directory", help="where; by default TMPDIR says it")
    options = parser.parse_args()
    library()
    with tempfile.TemporaryDirectory(dir=options.directory) as top:
        model = Path(top) / "model"
        layout = make(model, options.gib)
        source = find_source(model, layout, 1)
        files: dict[str, EngramFile] = {}
        for format in ("pages", "dsv41en1"):
            files[format] = planned(layout, format, 1, "heads", 0, 1)  # type: ignore[arg-type]
            packing.pack([packing.Task(source, files[format], Path(top) / format)])
            drop(Path(top) / format)
        path = Path(top) / "pages"
        seconds = options.seconds

        def reads(path: Path, backend: str, depth: int, batch: int = BATCH) -> Callable[[], float]:
            return lambda: ours(path, seconds, backend, depth, batch)[0]

        for depth in (64, 256):
            rival = f"fio, io_uring, {depth} deep"
            pread = "fio, 32 threads of pread"
            ways = {
                f"pages, io_uring, {depth} deep": reads(path, "io_uring", depth),
                f"dsv41en1, io_uring, {depth} deep": reads(Path(top) / "dsv41en1", "io_uring", depth),
                "pages, our 32 threads": reads(path, "threads", depth),
                rival: lambda depth=depth: fio(path, seconds, "--ioengine=io_uring", f"--iodepth={depth}"),
                pread: lambda: fio(path, seconds, "--ioengine=psync", "--thread", "--numjobs=32"),
                "32 Python threads": lambda: python_pool(path, seconds, files["pages"], BATCH // 8),
            }
            found = dict(in_turns(ways, options.rounds))
            print(f"\n{depth} deep, batches of {BATCH} rows")
            print("| way | reads a second | over fio | over fio's pread threads |\n|---|---|---|---|")
            for name, rates in found.items():
                over = [
                    statistics.median(mine / theirs for mine, theirs in zip(rates, found[other], strict=True))
                    for other in (rival, pread)
                ]
                print(f"| {name} | {statistics.median(rates):,.0f} | {over[0]:.2f} | {over[1]:.2f} |")

        print("\n| rows of a batch | io_uring, ms | our 32 threads, ms | 32 Python threads, ms |\n|---|---|---|---|")
        for batch in DECODE:
            ways = {
                "io_uring": reads(path, "io_uring", 256, batch),
                "threads": reads(path, "threads", 256, batch),
                "Python": lambda batch=batch: python_pool(path, seconds / 2, files["pages"], batch),
            }
            times = [f"{batch / statistics.median(rates) * 1e3:.2f}" for _, rates in in_turns(ways, options.rounds)]
            print(f"| {batch} | {' | '.join(times)} |")

        for format in files:
            blocks = ours(Path(top) / format, 0.5, "auto", 256, 1000)[1]
            print(f"\n{format}: {blocks:.4f} blocks of 4 KiB a row")


if __name__ == "__main__":
    main()
