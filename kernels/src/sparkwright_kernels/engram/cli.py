# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""`sparkwright-engram plan|pack|verify|info`: pack a rank's Engram rows, and say what is packed.

Exit status: 0 done, 1 something is wrong (one line each on standard error), 2 wrong usage, 128 + n stopped by signal n.
With --json standard output has one object a line, each with an "event": "progress" (pack, verify), then "result" or
"errors".
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sparkwright_kernels.engram import pack as packing
from sparkwright_kernels.engram.errors import EngramError, EngramErrors
from sparkwright_kernels.engram.formats import FORMATS, EngramFile, check_file, directory_name, planned, read_file
from sparkwright_kernels.engram.layout import RULES, EngramLayout
from sparkwright_kernels.engram.source import find_source, source_revision

PROG = "sparkwright-engram"
SAMPLE = 10_000
_EVERY_S = 1.0


class _Output:
    """Lines for people or, with `json`, for programs."""

    def __init__(self, json: bool) -> None:
        self.json = json
        self.begun: dict[str, tuple[float, int]] = {}
        self.last = 0.0
        self.lock = threading.Lock()

    def result(self, text: str, **values: Any) -> None:
        print(json.dumps({"event": "result", **values}) if self.json else text, flush=True)

    def errors(self, error: EngramError) -> None:
        errors = error.errors if isinstance(error, EngramErrors) else [error]
        for each in errors:
            print(f"{PROG}: {each}", file=sys.stderr)
        if self.json:
            told = [{name: getattr(each, name) for name in ("subject", "found", "needed", "repair")} for each in errors]
            print(json.dumps({"event": "errors", "errors": told}), flush=True)

    def progress(self, name: str, done: int, total: int) -> None:
        with self.lock:
            now = time.monotonic()
            since, from_bytes = self.begun.setdefault(name, (now, done))
            if now - self.last < _EVERY_S and done < total:
                return
            self.last = now
            rate = (done - from_bytes) / max(now - since, 1e-9)
            if self.json:
                values = {"file": name, "done": done, "total": total, "bytes_per_second": round(rate)}
                print(json.dumps({"event": "progress", **values}), flush=True)
            else:
                left = (total - done) / rate if rate else 0.0
                gib = f"{done / 2**30:.2f} of {total / 2**30:.2f} GiB"
                print(f"{name}: {gib}, {rate / 2**20:.0f} MiB/s, {left:.0f} s left", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Pack a rank's Engram rows, and say what is packed.")
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, help: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=help, description=help)
        added.add_argument("--json", action="store_true", help="one JSON object a line on standard output")
        return added

    def of_a_model(added: argparse.ArgumentParser, rank_needed: bool) -> None:
        added.add_argument(
            "--model", type=Path, required=True, help="directory with config.json and the tables' shards"
        )
        added.add_argument("--data-dir", type=Path, required=True, help="files go to engram/FORMAT-RULE-tpN below it")
        added.add_argument("--format", choices=FORMATS, default="pages")
        added.add_argument(
            "--rule", choices=RULES, default="heads", help="how the engine shares rows out (default heads)"
        )
        added.add_argument("--tp", type=int, required=True, help="tensor-parallel size")
        added.add_argument("--rank", type=int, required=rank_needed, help=None if rank_needed else "default all")
        added.add_argument("--layer", type=int, action="append", help="repeatable; default all")
        added.add_argument("--revision", help="the model's commit; default what its directory says")

    of_a_model(verb("plan", "Say which files a rank needs and which are there; reads config.json only."), False)
    packer = verb("pack", "Pack a rank's files. Goes on where a run that was stopped or killed ended.")
    of_a_model(packer, True)
    verifier = verb("verify", "Compare a rank's files with the source they were packed from.")
    of_a_model(verifier, True)
    for added in (packer, verifier):
        added.add_argument("--workers", type=int, default=packing.WORKERS, help="threads (default %(default)s)")
    how = verifier.add_mutually_exclusive_group()
    how.add_argument(
        "--sample", type=int, metavar="ROWS", default=SAMPLE, help="random rows a file (default %(default)s)"
    )
    how.add_argument("--all", action="store_true", help="every row")
    how.add_argument(
        "--checksums", action="store_true", help="every byte, against the file's own table: no source needed"
    )
    verb("info", "Say what files hold.").add_argument("files", type=Path, nargs="+", metavar="FILE")
    return parser


def _files(args: argparse.Namespace, layout: EngramLayout) -> dict[Path, EngramFile]:
    revision = source_revision(args.model) if args.revision is None else args.revision
    directory = args.data_dir / "engram" / directory_name(args.format, args.rule, args.tp)
    ranks = range(args.tp) if args.rank is None else [args.rank]
    layers = args.layer or layout.layer_ids
    files = [planned(layout, args.format, layer, args.rule, r, args.tp, revision) for r in ranks for layer in layers]
    return {directory / file.name: file for file in files}


def _described(path: Path, file: EngramFile) -> dict[str, Any]:
    return {
        "path": str(path), "format": file.format, "layer": file.layer, "rule": file.rule, "rank": file.rank,
        "ranks": file.ranks, "row_lo": file.rows.lo, "row_hi": file.rows.hi, "rows_total": file.rows.total,
        "row_bytes": file.row_bytes, "file_bytes": file.file_bytes, "revision": file.revision,
    }  # fmt: skip


def _line(values: dict[str, Any]) -> str:
    rule = f"rule {values['rule']}, " if values["rule"] else ""
    rank = f"rank {values['rank']} of {values['ranks']}, " if values["rank"] is not None else ""
    rows = f"rows {values['row_lo']} to {values['row_hi']} of {values['rows_total']}"
    size = f"{values['file_bytes']} bytes ({values['file_bytes'] / 2**30:.2f} GiB)"
    state = f" [{values['state']}]" if "state" in values else ""
    return f"{values['path']}: {values['format']}, layer {values['layer']}, {rule}{rank}{rows}, {size}{state}"


def _plan(args: argparse.Namespace, output: _Output) -> int:
    layout = EngramLayout.from_model(args.model)
    listed, errors = [], []
    for path, file in _files(args, layout).items():
        state = "missing"
        if path.exists():
            try:
                packing.read_table(path, check_file(path, file, layout))
                state = "there"
            except EngramError as error:
                errors += error.errors if isinstance(error, EngramErrors) else [error]
                state = "wrong"
        listed.append({**_described(path, file), "state": state})
    there = next(each for each in (args.data_dir, *args.data_dir.absolute().parents) if each.exists())
    file_system = os.statvfs(there)
    need = sum(each["file_bytes"] for each in listed if each["state"] == "missing")
    free = file_system.f_bavail * file_system.f_frsize
    text = [*map(_line, listed), f"{need} bytes to pack, {free} bytes free"]
    output.result("\n".join(text), files=listed, need_bytes=need, free_bytes=free)
    if errors:
        output.errors(EngramErrors(errors))
    return 1 if errors else 0


def _tasks(args: argparse.Namespace, layout: EngramLayout) -> list[packing.Task]:
    if args.workers < 1:
        raise EngramError("--workers", str(args.workers), "at least 1")
    files = _files(args, layout).items()
    return [packing.Task(find_source(args.model, layout, file.layer), file, path) for path, file in files]


def _pack(args: argparse.Namespace, output: _Output) -> int:
    layout = EngramLayout.from_model(args.model)
    stop, caught = threading.Event(), []

    def on_signal(number: int, _frame: object) -> None:
        caught.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        states = packing.pack(_tasks(args, layout), layout, args.workers, output.progress, stop)
    except EngramError as error:
        output.errors(error)
        return 128 + caught[0] if caught else 1
    listed = [{**_described(path, read_file(path)), "state": state} for path, state in states.items()]
    output.result("\n".join(map(_line, listed)), files=listed, changed="packed" in states.values())
    return 0


def _verify(args: argparse.Namespace, output: _Output) -> int:
    layout = EngramLayout.from_model(args.model)
    counted: dict[str, int] = {}
    errors: list[EngramError] = []
    what = "chunks" if args.checksums else "rows"
    tasks = None if args.checksums else _tasks(args, layout)
    for path, file in _files(args, layout).items():
        try:
            if tasks is None:
                counted[str(path)] = packing.verify_checksums(path, file, layout, args.workers)
            else:
                task = next(task for task in tasks if task.path == path)
                rows = None if args.all else args.sample
                counted[str(path)] = packing.verify(task, rows, layout, args.workers, output.progress)
        except EngramError as error:
            errors += error.errors if isinstance(error, EngramErrors) else [error]
    if errors:
        output.errors(EngramErrors(errors))
        return 1
    text = "\n".join(f"{path}: {count} {what} are right" for path, count in counted.items())
    output.result(text, verified=counted, unit=what)
    return 0


def _info(args: argparse.Namespace, output: _Output) -> int:
    listed = []
    for path in args.files:
        found = read_file(path)
        packing.read_table(path, found)
        listed.append(_described(path, found))
    output.result("\n".join(map(_line, listed)), files=listed)
    return 0


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    output = _Output(args.json)
    try:
        return {"plan": _plan, "pack": _pack, "verify": _verify, "info": _info}[args.verb](args, output)
    except EngramError as error:
        output.errors(error)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
