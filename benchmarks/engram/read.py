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
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass
class Rate:
    """Reads a second, microseconds of processors a read, and blocks of 4 KiB a row (of distinct rows)."""

    reads: float
    cpu_us: float
    blocks: float = 1.0


def processors() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def ours(path: Path, seconds: float, backend: Any, depth: int, batch: int, threads: int = 32) -> Rate:
    """In batches of so many rows."""
    with EngramReader(path, backend=backend, queue_depth=depth, threads=threads) as reader:
        ids, out = Ids(reader.file), np.empty((batch, 264), np.uint8)
        spent = cpu = 0.0
        while spent < seconds:
            drawn = ids.draw(batch)
            began, cpu_before = time.perf_counter(), processors()
            reader.read(drawn, out)
            spent += time.perf_counter() - began
            cpu += processors() - cpu_before
        stats = reader.stats
        return Rate(stats.reads / spent, cpu / stats.reads * 1e6, stats.read_bytes / 4096 / stats.unique_rows)


def fio(path: Path, seconds: float, *options: str, jobs: int = 1) -> Rate:
    command = ["fio", "--name=r", f"--filename={path}", "--rw=randread", "--bs=4k", "--direct=1", "--readonly"]
    command += ["--time_based", f"--runtime={seconds}", "--norandommap", "--group_reporting", "--output-format=json"]
    done = subprocess.run([*command, *options, f"--numjobs={jobs}"], check=True, capture_output=True, text=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    rate = job["read"]["iops"]
    return Rate(rate, (job["usr_cpu"] + job["sys_cpu"]) / 100 * jobs / rate * 1e6)


def python_pool(path: Path, seconds: float, file: EngramFile, batch: int, threads: int = 32) -> Rate:
    """A pool of Python threads, a future a row: the first thing one writes."""
    ids, mine = Ids(file), local()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(id: int) -> bytes:
        if not hasattr(mine, "block"):
            mine.block = mmap.mmap(-1, 8192)
        offset = file.offset(id - file.rows.lo)
        os.preadv(fd, [memoryview(mine.block)[: 4096 if offset % 4096 <= 4096 - 264 else 8192]], offset // 4096 * 4096)
        return mine.block[offset % 4096 : offset % 4096 + 264]

    rows, spent, cpu_before = 0, 0.0, processors()
    with ThreadPoolExecutor(threads) as pool:
        while spent < seconds:
            drawn = ids.draw(batch).tolist()
            began = time.perf_counter()
            for _ in pool.map(read, drawn):
                pass
            spent += time.perf_counter() - began
            rows += batch
    os.close(fd)
    return Rate(rows / spent, (processors() - cpu_before) / rows * 1e6)


def in_turns(ways: dict[str, Callable[[], Rate]], rounds: int) -> dict[str, list[Rate]]:
    found: dict[str, list[Rate]] = {name: [] for name in ways}
    names = list(ways)
    for round in range(rounds):
        for name in names[round % len(names) :] + names[: round % len(names)]:
            found[name].append(ways[name]())
    return found


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


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

        def reads(path: Path, backend: str, depth: int, batch: int = BATCH) -> Callable[[], Rate]:
            return lambda: ours(path, seconds, backend, depth, batch)

        for depth in (64, 256):
            rival = f"fio, io_uring, {depth} deep"
            pread = "fio, 32 threads of pread"
            ways = {
                f"pages, io_uring, {depth} deep": reads(path, "io_uring", depth),
                f"dsv41en1, io_uring, {depth} deep": reads(Path(top) / "dsv41en1", "io_uring", depth),
                "pages, our 32 threads": reads(path, "threads", depth),
                rival: lambda depth=depth: fio(path, seconds, "--ioengine=io_uring", f"--iodepth={depth}"),
                pread: lambda: fio(path, seconds, "--ioengine=psync", "--thread", jobs=32),
                "32 Python threads": lambda: python_pool(path, seconds, files["pages"], BATCH // 8),
            }
            found = in_turns(ways, options.rounds)
            print(f"\n{depth} deep, batches of {BATCH} rows")
            print(
                "| way | reads a second | CPU us a read | over fio | over fio's pread threads |\n|---|---|---|---|---|"
            )
            for name, rates in found.items():
                over = [
                    median(mine.reads / theirs.reads for mine, theirs in zip(rates, found[other], strict=True))
                    for other in (rival, pread)
                ]
                row = f"{median(rate.reads for rate in rates):,.0f} | {median(rate.cpu_us for rate in rates):.1f}"
                print(f"| {name} | {row} | {over[0]:.2f} | {over[1]:.2f} |")

        print("\n| rows of a batch | io_uring, ms | our 32 threads, ms | 32 Python threads, ms |\n|---|---|---|---|")
        for batch in DECODE:
            ways = {
                "io_uring": reads(path, "io_uring", 256, batch),
                "threads": reads(path, "threads", 256, batch),
                "Python": lambda batch=batch: python_pool(path, seconds / 2, files["pages"], batch),
            }
            found = in_turns(ways, options.rounds)
            times = [f"{median(batch / rate.reads for rate in rates) * 1e3:.2f}" for rates in found.values()]
            print(f"| {batch} | {' | '.join(times)} |")

        for format in files:
            blocks = ours(Path(top) / format, 0.5, "auto", 256, 1000).blocks
            print(f"\n{format}: {blocks:.4f} blocks of 4 KiB a row")


if __name__ == "__main__":
    main()
