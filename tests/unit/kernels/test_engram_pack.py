# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Packing: byte by byte what the specification says, whatever interrupts it; and everything that is refused."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engram_support import DTYPES, Tables, make_tables, mounted_ext4, reference_bytes, save_planes
from sparkwright_kernels.engram import cli, formats, native
from sparkwright_kernels.engram import pack as packing
from sparkwright_kernels.engram.errors import EngramError, EngramErrors
from sparkwright_kernels.engram.formats import PAGE, directory_name, planned
from sparkwright_kernels.engram.reader import EngramReader
from sparkwright_kernels.engram.source import find_source

FORMATS = ["dsv41en1", "pages"]
CHUNK_PAGES = 160
# Bytes, and calls, are few with small chunks; what is tested is the same.


@pytest.fixture(autouse=True)
def built(engram_library: Path | None) -> None:
    if engram_library is None:
        pytest.skip("NOT TESTED: packing needs a C++ compiler")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return make_tables(tmp_path_factory.mktemp("model") / "model", 1000)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_CHUNK_PAGES", CHUNK_PAGES)


def tasks(
    tables: Tables, root: Path, format: Any, rule: Any = "heads", rank: int = 1, tp: int = 2
) -> list[packing.Task]:
    directory = root / directory_name(format, rule, tp)
    files = [planned(tables.layout, format, layer, rule, rank, tp) for layer in tables.layout.layer_ids]
    sources = [find_source(tables.directory, tables.layout, file.layer) for file in files]
    return [packing.Task(source, file, directory / file.name) for source, file in zip(sources, files, strict=True)]


def wanted(tables: Tables, task: packing.Task) -> bytes:
    rows = task.file.rows
    return reference_bytes(task.file, tables.rows[task.file.layer][rows.lo : rows.hi])


def assert_packed(tables: Tables, all_of_them: list[packing.Task]) -> None:
    """These files, byte by byte, and nothing else in their directory."""
    for task in all_of_them:
        assert task.path.read_bytes() == wanted(tables, task), task.path
    names = {task.path.name for task in all_of_them}
    assert {path.name for path in all_of_them[0].path.parent.iterdir()} == names


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rule, rank, tp", [("heads", 0, 1), ("heads", 1, 2), ("rows", 0, 2), ("rows", 2, 3)])
def test_byte_by_byte(format: str, rule: str, rank: int, tp: int, tables: Tables, tmp_path: Path) -> None:
    these = tasks(tables, tmp_path, format, rule, rank, tp)
    assert set(packing.pack(these, tables.layout).values()) == {"packed"}
    assert_packed(tables, these)
    before = [task.path.stat() for task in these]
    assert set(packing.pack(these, tables.layout).values()) == {"kept"}
    assert [task.path.stat().st_mtime_ns for task in these] == [stat.st_mtime_ns for stat in before]
    for task in these:
        assert packing.verify(task, None, tables.layout) == task.file.rows.rows
        assert 0 < packing.verify(task, 100, tables.layout) <= 102
        with EngramReader(task.path, task.file) as reader:
            ids = np.arange(task.file.rows.lo, task.file.rows.hi)
            out = np.empty((len(ids), 264), np.uint8)
            reader.read(ids, out)
            assert np.array_equal(out, tables.rows[task.file.layer][ids])


@pytest.mark.parametrize("format", FORMATS)
def test_many_chunks_and_the_page_cache(
    format: str, tables: Tables, tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without direct I/O, and where room cannot be taken first."""
    monkeypatch.setattr(packing, "_open_direct", lambda path, flags: (os.open(path, flags, 0o644), False))
    monkeypatch.setattr(packing, "_FLUSH_CHUNKS", 2)
    monkeypatch.setattr(packing, "_libc", NoFallocate())
    these = tasks(tables, tmp_path, format)
    assert min(task.file.chunks for task in these) >= 3
    packing.pack(these, tables.layout, workers=3)
    assert packing.verify(these[0], None) == these[0].file.rows.rows
    monkeypatch.undo()
    monkeypatch.setattr(formats, "_CHUNK_PAGES", CHUNK_PAGES)
    for task in these:
        data = task.path.read_bytes()
        payload = slice(PAGE, PAGE + task.file.payload_bytes)
        assert data[payload] == wanted(tables, replace(task))[payload]
    assert len(list(these[0].path.parent.iterdir())) == 2


def resident(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size = path.stat().st_size
    pages = ctypes.create_string_buffer(-(-size // PAGE))
    with path.open("rb") as stream:
        address = libc.mmap(None, size, 1, 1, stream.fileno(), 0)
        assert libc.mincore(address, size, pages) == 0
        libc.munmap(address, size)
    return sum(page & 1 for page in pages.raw)


@pytest.mark.parametrize("direct", [True, False])
def test_the_page_cache_is_left_alone(
    direct: bool, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    these = tasks(tables, tmp_path, "pages")
    sources = {task.source.weight.path for task in these}
    for path in sources:
        with path.open("rb") as stream:
            os.fdatasync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if sum(map(resident, sources)) > 64:
        pytest.skip("NOT TESTED: this file system keeps files in the page cache whatever it is told")
    if not direct:
        monkeypatch.setattr(packing, "_open_direct", lambda path, flags: (os.open(path, flags, 0o644), False))
    packing.pack(these, tables.layout)
    packing.verify(these[0], None)
    # Headers and tables of checksums are read the usual way, and readahead takes a little more.
    assert max(map(resident, [*sources, *(task.path for task in these)])) < 150
    assert min(task.file.file_bytes for task in these) > 600 * PAGE


class NoFallocate:
    def fallocate(self, *_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1


# ------------------------------------------------------------------------------------------------ killed at any point


class Killer:
    """Kills this process at the n-th change that packing makes, `half` way through it where it is a write."""

    CHANGES = ("write", "pwrite", "truncate", "fsync", "open", "rename", "unlink")

    def __init__(self, at: int, half: bool) -> None:
        self.left, self.half = at, half
        self.lock = threading.Lock()
        for name in self.CHANGES:
            setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            with self.lock:
                self.left -= 1
                if self.left < 0:
                    if self.half and name in ("write", "pwrite"):
                        data = memoryview(arguments[1])
                        call(
                            arguments[0],
                            data[
                                : len(data)
                                // 2
                                // (PAGE if name == "pwrite" else 1)
                                * (PAGE if name == "pwrite" else 1)
                            ],
                            *arguments[2:],
                        )
                    os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(60)
            return call(*arguments, **options)

        return counted


def forked(work: Callable[[], None]) -> int:
    """Do it in a process of its own: its status, as os.waitpid gives it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(9)
    return os.waitpid(child, 0)[1]


def journaled(task: packing.Task) -> int:
    """Chunks that an earlier run noted in whole lines."""
    if not task.journal.exists() or not task.part.exists():
        return 0
    lines = task.journal.read_bytes().splitlines(keepends=True)
    return sum(bool(packing._LINE.fullmatch(line)) for line in lines[1:])


@pytest.mark.parametrize("format, half", [("pages", False), ("pages", True), ("dsv41en1", True)])
def test_killed_at_every_change(
    format: str, half: bool, tables: Tables, tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And run again: the same bytes, and no chunk that was noted is packed a second time."""
    (task, *_) = tasks(tables, tmp_path, format)
    whole = wanted_small(tables, task)
    made: list[int] = []
    make = packing._Chunks.make
    monkeypatch.setattr(packing._Chunks, "make", lambda self, n: (made.append(n), make(self, n))[1])
    for at in range(1000):
        status = forked(lambda at=at: (Killer(at, half), packing.pack([task], workers=2))[1])  # type: ignore[misc]
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        finished, noted = task.path.exists(), journaled(task)
        made.clear()
        packing.pack([task], workers=2)
        assert len(made) == (0 if finished else task.file.chunks - noted), at
        assert task.path.read_bytes() == whole, at
        assert [path.name for path in task.path.parent.iterdir()] == [task.path.name], at
        task.path.unlink()
    assert at > 15 and task.path.read_bytes() == whole


def wanted_small(tables: Tables, task: packing.Task) -> bytes:
    """With small chunks, whose hashes are another table."""
    import engram_support

    rows = tables.rows[task.file.layer][task.file.rows.lo : task.file.rows.hi]
    return engram_support.reference_bytes(task.file, rows, CHUNK_PAGES)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """The command itself, over and over until it gets to its end."""
    tables = make_tables(tmp_path / "model", 4000)
    these = tasks(tables, tmp_path, "pages")
    command = [sys.executable, "-m", "sparkwright_kernels.engram.cli", "pack", "--model", tables.directory]
    command += ["--directory", tmp_path, "--tp", "2", "--rank", "1", "--workers", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    rng = random.Random(4)
    killed = 0
    for attempt in range(60):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout
        process.stdout.readline()  # it has begun, or is at its end
        try:
            # A busy machine needs more time to get anywhere.
            process.wait(rng.random() * 0.2 * (1 + attempt / 4))
        except subprocess.TimeoutExpired:
            process.kill()
            killed += 1
        process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert process.returncode == 0 and killed > 1
    assert_packed(tables, these)


def test_what_a_crash_leaves(
    tables: Tables, tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks noted of which the disk has other bytes, lines cut short or empty: only those are packed again."""
    (task, *_) = tasks(tables, tmp_path, "pages")
    made: list[int] = []
    make = packing._Chunks.make
    monkeypatch.setattr(packing._Chunks, "make", lambda self, n: (made.append(n), make(self, n))[1])

    def stopped_after(chunks: int) -> None:
        made.clear()
        stop = threading.Event()
        with pytest.raises(EngramError, match=rf"found \d+ of {task.file.chunks} chunks: it was stopped.*run again"):
            packing.pack([task], None, 1, lambda name, done, total: stop.set() if len(made) == chunks else None, stop)

    def again() -> list[int]:
        made.clear()
        packing.pack([task], workers=1)
        assert task.path.read_bytes() == wanted_small(tables, task)
        task.path.unlink()
        return sorted(made)

    everything = list(range(task.file.chunks))
    stopped_after(3)
    with task.part.open("r+b") as stream:  # a block of chunk 1 that never reached the disk
        stream.seek(task.file.offset(task.file.chunk(1)[0]) + PAGE)
        stream.write(bytes(PAGE))
    assert again() == [1, *everything[3:]]
    stopped_after(3)
    with task.journal.open("ab") as stream:
        stream.write(b"7 0123")
    assert again() == everything[3:]
    stopped_after(2)
    with task.journal.open("ab") as stream:
        stream.write(b"7 0123")
    stopped_after(1)  # the line after the one that was cut short counts
    assert again() == everything[3:]
    stopped_after(3)
    with task.journal.open("ab") as stream:
        stream.write(bytes(100) + b"\n999999 0123456789abcdef\n3 0123456789abcdef\n")
    assert again() == everything[3:]
    stopped_after(2)
    task.journal.unlink()
    assert again() == everything
    stopped_after(2)
    os.truncate(task.part, task.file.file_bytes - PAGE)
    assert again() == everything
    stopped_after(2)
    os.utime(task.source.weight.path)  # fetched anew: perhaps something else
    assert again() == everything


def test_one_at_a_time(tables: Tables, tmp_path: Path) -> None:
    these = tasks(tables, tmp_path, "pages")
    these[0].path.parent.mkdir(parents=True)
    with packing._only_one(these[0].path.parent), pytest.raises(EngramError, match="another packing"):
        packing.pack(these)


# ------------------------------------------------------------------------------------------------------------ refused


def test_a_file_that_is_there_and_wrong_is_not_touched(tables: Tables, tmp_path: Path) -> None:
    good, wrong = tasks(tables, tmp_path, "dsv41en1")
    wrong.path.parent.mkdir(parents=True)
    other = planned(tables.layout, "dsv41en1", 14, "rows", 1, 2)
    lo, hi = other.rows.lo, other.rows.hi
    wrong.path.write_bytes(reference_bytes(other, tables.rows[14][lo:hi]))
    before = wrong.path.read_bytes()
    with pytest.raises(EngramError, match=r"rows \d+ to \d+ of \d+ \(rule rows, rank 1 of 2\), needed rows"):
        packing.pack([good, wrong], tables.layout)
    assert wrong.path.read_bytes() == before
    assert [path.name for path in wrong.path.parent.iterdir()] == [wrong.path.name]


def test_a_damaged_file_is_found(tables: Tables, tmp_path: Path) -> None:
    task, other = tasks(tables, tmp_path, "pages")
    packing.pack([task, other])
    at = task.file.offset(777) + 100
    with task.path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 1]))
    row = task.file.rows.lo + 777
    with pytest.raises(EngramError, match=rf"found other bytes in row {row}, needed the source's; delete it"):
        packing.verify(task, None)
    with pytest.raises(EngramError, match=f"checksums in 1 of 1 chunks .from row {task.file.rows.lo} on"):
        packing.verify_checksums(task.path)
    with pytest.raises(EngramError, match=f"in row {row}"):
        packing.verify(task, 40 * task.file.rows.rows, seed=1)
    with task.path.open("r+b") as stream:
        stream.seek(PAGE + task.file.payload_bytes)
        stream.write(b"x")
    with pytest.raises(EngramError, match="a damaged table of checksums"):
        packing.pack([task, other])
    assert packing.verify_checksums(other.path) == 1
    # Padding counts too: it is part of what is specified.
    with other.path.open("r+b") as stream:
        stream.seek(PAGE + 4090)
        stream.write(b"x")
    with pytest.raises(EngramError, match=f"in row {other.file.rows.lo + 14},"):
        packing.verify(other, None)


def copied(model: Path, where: Path) -> Path:
    """A copy whose shards are hard links."""
    where.mkdir()
    for path in model.iterdir():
        (os.link if path.suffix == ".safetensors" else shutil.copy)(path, where / path.name)
    return where


def test_a_table_of_checksums_that_is_not_of_this_file(tables: Tables, tmp_path: Path) -> None:
    """Every row is right, and so is the header: verifying all of it looks at the table too."""
    (task, *_) = tasks(tables, tmp_path, "pages")
    packing.pack([task])
    table = bytes(8 * task.file.chunks)
    with task.path.open("r+b") as stream:
        stream.write(replace(task.file, table_digest=hashlib.sha256(table).digest()).header())
        stream.seek(PAGE + task.file.payload_bytes)
        stream.write(table)
    for wrong in (lambda: packing.verify(task, None), lambda: packing.verify_checksums(task.path)):
        with pytest.raises(EngramError, match="delete it and pack it again"):
            wrong()


def changed(tables: Tables, where: Path, dtypes: dict[str, str], rows: int = 0, cut: int = 0) -> Path:
    """A copy of the model with other dtypes in layer 1's shard, fewer rows, or bytes less at its end."""
    copied(tables.directory, where)
    shard = where / "model-00047-of-00048.safetensors"
    data = tables.rows[1][: len(tables.rows[1]) - rows]
    planes = {"weight": data[:, :256], "scale": data[:, 256:]}
    shard.unlink()
    tensors = {f"layers.1.engram.embed.{part}": np.ascontiguousarray(plane) for part, plane in planes.items()}
    save_planes(shard, tensors, {**DTYPES, **dtypes})
    os.truncate(shard, shard.stat().st_size - cut)
    return where


@pytest.mark.parametrize(
    "change, told",
    [
        ({"dtypes": {"weight": "U8"}}, r"embed.weight: found U8 \[\d+, 256\], needed F8_E4M3 \[\d+, 256\]"),
        ({"dtypes": {"weight": "F8_E5M2"}}, r"found F8_E5M2"),
        ({"dtypes": {"scale": "U8"}}, r"embed.scale: found U8 \[\d+, 8\], needed F8_E8M0"),
        ({"dtypes": {}, "rows": 1}, r"found F8_E4M3 \[\d+, 256\], needed F8_E4M3 \[\d+, 256\], as config.json says"),
        ({"dtypes": {}, "cut": 1}, r"found \d+ bytes, needed \d+ bytes, as its header says; fetch"),
        ({"dtypes": {}, "cut": 6_000_000}, r"as its header says; fetch the model's Engram files again"),
    ],
)
def test_a_source_that_is_none(change: dict[str, Any], told: str, tables: Tables, tmp_path: Path) -> None:
    model = changed(tables, tmp_path / "model", **change)
    with pytest.raises(EngramError, match=told):
        find_source(model, tables.layout, 1)
    assert find_source(model, tables.layout, 14).rows == tables.layout.total(14)


def test_everything_wrong_with_a_source_at_once(tables: Tables, tmp_path: Path) -> None:
    model = changed(tables, tmp_path / "model", {"weight": "U8", "scale": "U8"})
    with pytest.raises(EngramErrors) as error:
        find_source(model, tables.layout, 1)
    assert len(error.value.errors) == 2
    (model / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(EngramError, match="no 'layers.1.engram.embed.weight'"):
        find_source(model, tables.layout, 1)
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(EngramError, match="No such file"):
        find_source(model, tables.layout, 1)


def test_planes_in_two_shards(tables: Tables, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    data, weight_map = tables.rows[1], {}
    for part, plane in (("weight", data[:, :256]), ("scale", data[:, 256:])):
        name = f"layers.1.engram.embed.{part}"
        save_planes(model / f"{part}.safetensors", {name: np.ascontiguousarray(plane)})
        weight_map[name] = f"{part}.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    task = replace(tasks(tables, tmp_path, "pages")[0], source=find_source(model, tables.layout, 1))
    packing.pack([task])
    assert_packed(tables, [task])


def test_a_source_that_is_cut_short_while_it_is_read(tables: Tables, tmp_path: Path) -> None:
    model = changed(tables, tmp_path / "model", {})
    (task, *_) = tasks(replace(tables, directory=model), tmp_path, "pages")
    os.truncate(task.source.weight.path, 5_000_000)
    with pytest.raises(EngramError, match="its end at byte 5000000, needed .*fetch it again"):
        packing.pack([task])
    assert not task.path.exists()


# ---------------------------------------------------------------------------------------------------------- full disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted ext4 of 24 MiB."""
    with mounted_ext4(tmp_path, 24, "a full disk") as (_, mount):
        yield mount


def fill(disk: Path, leave: int = 0) -> None:
    with (disk / "ballast").open("ab") as stream:
        step = 2**22
        while step >= 4096:
            if shutil.disk_usage(disk).free - step < leave:
                step //= 2
                continue
            try:
                os.posix_fallocate(stream.fileno(), os.fstat(stream.fileno()).st_size, step)
            except OSError:
                step //= 2


def test_room_is_known_first(tables: Tables, disk: Path) -> None:
    these = tasks(tables, disk, "pages")
    fill(disk, leave=5_000_000)
    size = sum(task.file.file_bytes for task in these)
    with pytest.raises(EngramError) as error:
        packing.pack(these)
    free = shutil.disk_usage(disk).free
    assert f"found {free} bytes free, needed {size} - 0 there = {size} bytes for 2 file(s)" in str(error.value)
    assert f"make room for {size - free} bytes" in str(error.value)
    assert not list(these[0].path.parent.iterdir())
    (disk / "ballast").unlink()
    packing.pack(these)
    assert_packed(tables, these)


@pytest.mark.parametrize("room_first", [True, False])
def test_a_disk_that_fills_up(
    room_first: bool, tables: Tables, disk: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else takes the room: before it is taken, or, where it cannot be, between two chunks."""
    (task, *_) = tasks(tables, disk, "pages")
    if room_first:
        check_room = packing._check_room
        monkeypatch.setattr(packing, "_check_room", lambda *given: (check_room(*given), fill(disk))[0])
        filling = None
    else:
        monkeypatch.setattr(packing, "_libc", NoFallocate())

        def filling(name: str, done: int, total: int) -> None:
            if done > total // 3:
                fill(disk)

    with pytest.raises(EngramError, match=r"found a full file system, \d+ bytes free, needed \d+ - (\d+) there"):
        packing.pack([task], None, 1, *([filling] if filling else []))
    noted = journaled(task)
    assert (noted > 0) is not room_first and not task.path.exists()
    assert task.part.exists() is not room_first
    (disk / "ballast").unlink()
    monkeypatch.undo()
    monkeypatch.setattr(formats, "_CHUNK_PAGES", CHUNK_PAGES)
    packing.pack([task])
    assert task.path.read_bytes() == wanted_small(tables, task)


# ------------------------------------------------------------------------------------------------------- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, list[dict[str, Any]], str]:
    status = cli.main([*map(str, arguments), "--json"])
    told = capsys.readouterr()
    return status, [json.loads(line) for line in told.out.splitlines()], told.err


def test_the_command(tables: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = copied(tables.directory, tmp_path / "model")
    (model / ".sparkwright-weights.json").write_text('{"revision": "abc123"}')
    of_rank = ("--model", model, "--directory", tmp_path / "data", "--tp", 2, "--rank", 0)
    status, (plan,), _ = run(capsys, "plan", *of_rank)
    assert status == 0 and [file["state"] for file in plan["files"]] == ["missing", "missing"]
    assert plan["need_bytes"] == sum(file["file_bytes"] for file in plan["files"]) and plan["free_bytes"] > 0
    assert not (tmp_path / "data").exists()

    status, events, _ = run(capsys, "pack", *of_rank)
    assert status == 0 and events[-1]["event"] == "result" and events[-1]["changed"]
    assert {event["event"] for event in events[:-1]} == {"progress"}
    assert events[-2]["done"] == events[-2]["total"] > 0
    status, events, _ = run(capsys, "pack", *of_rank)
    assert status == 0 and not events[-1]["changed"] and len(events) == 1
    assert [file["state"] for file in run(capsys, "plan", *of_rank)[1][0]["files"]] == ["there", "there"]

    paths = [Path(file["path"]) for file in events[-1]["files"]]
    directory = tmp_path / "data/pages-heads-tp2"
    assert paths == [directory / "engram-l1-r0of2.bin", directory / "engram-l14-r0of2.bin"]
    status, (info,), _ = run(capsys, "info", *paths)
    assert status == 0 and {file["revision"] for file in info["files"]} == {"abc123"}
    for how, unit in ((["--sample", "50"], "rows"), (["--all"], "rows"), (["--checksums"], "chunks")):
        status, events, _ = run(capsys, "verify", *of_rank, *how)
        assert status == 0 and events[-1]["unit"] == unit and len(events[-1]["verified"]) == 2

    with paths[0].open("r+b") as stream:
        stream.seek(PAGE)
        stream.write(bytes(5000))
    paths[1].unlink()
    status, events, told = run(capsys, "verify", *of_rank, "--all")
    assert status == 1 and len(told.splitlines()) == 2
    assert [error["subject"] for error in events[-1]["errors"]] == [str(path) for path in paths]
    assert all(line.startswith("sparkwright-engram: /") and "found" in line for line in told.splitlines())
    shutil.copy(paths[0], paths[1])
    status, events, told = run(capsys, "plan", *of_rank)
    assert status == 1 and [file["state"] for file in events[0]["files"]] == ["there", "wrong"]
    assert "layer 1, needed 14" in told
    status, _, told = run(capsys, "pack", *of_rank, "--revision", "other")
    assert status == 1 and "revision abc123, needed other" in told


def test_the_command_in_words(tables: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_rank = ["--model", str(tables.directory), "--directory", str(tmp_path), "--tp", "2"]
    assert cli.main(["pack", *of_rank, "--rank", "1", "--format", "dsv41en1", "--rule", "rows", "--layer", "14"]) == 0
    told = capsys.readouterr()
    assert "engram-l14-r1of2.bin: dsv41en1, layer 14, rank 1 of 2, rows" in told.out and "[packed]" in told.out
    assert "MiB/s" in told.err
    for arguments, line in (
        (["pack", *of_rank, "--rank", "2"], "rank: found 2, needed 0 to 1 at tensor-parallel size 2"),
        (["pack", *of_rank, "--rank", "0", "--workers", "0"], "--workers: found 0, needed at least 1"),
        (["plan", *of_rank, "--layer", "3"], "layer: found 3, needed one of 1, 14"),
        (["info", str(tmp_path / "none")], "none: found no readable file"),
        (["plan", "--model", str(tmp_path), "--directory", str(tmp_path), "--tp", "2"], "the model's config.json"),
    ):
        assert cli.main(arguments) == 1
        told = capsys.readouterr()
        assert line in told.err and len(told.err.splitlines()) == 1 and not told.out
    with pytest.raises(SystemExit) as usage:
        cli.main(["pack", *of_rank])
    assert usage.value.code == 2


def test_the_command_stopped_by_a_signal(tables: Tables, tmp_path: Path) -> None:
    """It ends after the chunks it is at, and says that it can go on."""
    code = """
import os, signal, sys
from sparkwright_kernels.engram import cli, formats, pack
formats._CHUNK_PAGES = 160
make = pack._Chunks.make
def stopping(self, number):
    os.kill(os.getpid(), signal.SIGTERM)
    return make(self, number)
pack._Chunks.make = stopping
sys.exit(cli.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "pack", "--model", tables.directory, "--directory", tmp_path, "--tp", "2"]
    done = subprocess.run(
        [*command, "--rank", "0"], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "chunks: it was stopped, needed all of them; run again to go on from there" in done.stderr


def test_interleaving_of_any_shape() -> None:
    """The native interleave and its hash, against NumPy."""
    from engram_support import xxh64

    rng = np.random.default_rng(3)
    library = native.library()
    for weight_bytes, scale_bytes in ((256, 8), (32, 1), (96, 3), (3840, 120)):
        row_bytes = weight_bytes + scale_bytes
        for rows in (1, 2, 14, 15, 16, 127, 128, 129, 1000):
            data = rng.integers(0, 256, (rows, row_bytes), np.uint8)
            planes = [np.ascontiguousarray(part) for part in np.split(data, [weight_bytes], 1)]
            for per_page in (0, PAGE // row_bytes):
                size = -(-rows // per_page) * PAGE if per_page else rows * row_bytes
                out = np.full(size + 8, 7, np.uint8)
                addresses = [array.ctypes.data for array in (*planes, out)]
                digest = library.engram_pack(*addresses, rows, weight_bytes, scale_bytes, per_page)
                needed = np.zeros(size, np.uint8)
                for row in range(rows):
                    at = row // per_page * PAGE + row % per_page * row_bytes if per_page else row * row_bytes
                    needed[at : at + row_bytes] = data[row]
                assert np.array_equal(out[:size], needed) and (out[size:] == 7).all()
                assert digest == library.engram_xxh64(needed.ctypes.data, size)
                if rows < 20:
                    assert digest == xxh64(needed.tobytes())
