#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""How fast packing is, against `cp` of the same bytes on the same disk and against NumPy, in the same run.

See README.md beside it.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from table import KERNELS, drop, library, make

sys.path.insert(0, str(KERNELS / "src"))

from sparkwright_kernels.engram import pack as packing  # noqa: E402
from sparkwright_kernels.engram.formats import planned  # noqa: E402
from sparkwright_kernels.engram.source import Source, find_source  # noqa: E402

ROWS = 2**18  # of the NumPy packer, at a time


def planes_of(source: Source) -> list[np.memmap]:  # type: ignore[type-arg]
    return [
        np.memmap(plane.path, np.uint8, "r", plane.offset, (source.rows, plane.row_bytes))
        for plane in (source.weight, source.scale)
    ]


def numpy_maps(source: Source, out: Path) -> None:
    """As one would write it at first: a map of the file, and each plane assigned to its columns."""
    packed = np.memmap(out, np.uint8, "w+", 4096, (source.rows, 264))
    packed[:, :256], packed[:, 256:] = planes_of(source)
    packed.flush()


def numpy_chunks(source: Source, out: Path) -> None:
    """As one would write it next: an array for some rows, one write after another."""
    planes = planes_of(source)
    with out.open("wb") as stream:
        stream.write(bytes(4096))
        for first in range(0, source.rows, ROWS):
            rows = np.empty((min(ROWS, source.rows - first), 264), np.uint8)
            rows[:, :256] = planes[0][first : first + ROWS]
            rows[:, 256:] = planes[1][first : first + ROWS]
            rows.tofile(stream)
    subprocess.run(["sync", out], check=True)


def processors() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4, help="size of the table; twice this is needed on the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=packing.WORKERS)
    parser.add_argument("--directory", help="where; by default TMPDIR says it")
    options = parser.parse_args()
    library()
    with tempfile.TemporaryDirectory(dir=options.directory) as top:
        model = Path(top) / "model"
        layout = make(model, options.gib)
        source = find_source(model, layout, 1)
        out = Path(top) / "out"

        def ours(format: str) -> Callable[[], None]:
            file = planned(layout, format, 1, "heads", 0, 1)  # type: ignore[arg-type]
            return lambda: packing.pack([packing.Task(source, file, out / "file")], workers=options.workers) and None

        def cp(then: str = "") -> Callable[[], None]:
            script = f"cp '{source.weight.path}' '{out}/file'{then}"
            return lambda: subprocess.run(["sh", "-c", script], check=True) and None

        ways = {
            "pages": ours("pages"),
            "dsv41en1": ours("dsv41en1"),
            "cp, sync": cp(f" && sync '{out}/file'"),
            "cp": cp(),
            "NumPy, a map of the file": lambda: numpy_maps(source, out / "file"),
            "NumPy, arrays of 66 MiB, sync": lambda: numpy_chunks(source, out / "file"),
        }
        wall: dict[str, list[float]] = {name: [] for name in ways}
        cpu: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for round in range(options.rounds):
            for name in names[round % len(names) :] + names[: round % len(names)]:
                out.mkdir(exist_ok=True)
                drop(source.weight.path)
                began, spent = time.monotonic(), processors()
                ways[name]()
                wall[name].append(time.monotonic() - began)
                cpu[name].append(processors() - spent)
                drop(out / "file")  # what `cp` alone has left in memory is written now
                (out / "file").unlink()
    size = source.rows * 264
    print(f"{size / 2**30:.2f} GiB, {options.rounds} rounds, medians; ratios: its time over pages' and over dsv41en1's")
    print("| way | seconds | MiB/s | CPU seconds | pages | dsv41en1 |\n|---|---|---|---|---|---|")
    for name in ways:
        ratios = [
            statistics.median(theirs / mine for theirs, mine in zip(wall[name], wall[us], strict=True))
            for us in ("pages", "dsv41en1")
        ]
        seconds = statistics.median(wall[name])
        row = f"{seconds:.2f} | {size / seconds / 2**20:.0f} | {statistics.median(cpu[name]):.2f}"
        print(f"| {name} | {row} | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
