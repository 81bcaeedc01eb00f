# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Packs a rank's rows into files, and verifies files against what they were packed from.

Threads take one chunk after another: read it from both planes, interleave and hash it natively, write it. Memory does
not grow with the table. Reads and writes bypass the page cache where the filesystem permits, else what they leave in it
is dropped. A file is built as `NAME.part`, and `NAME.journal` has a line for each chunk written, with its hash: a run
goes on where a killed one ended, with those chunks whose bytes still have their hash. A file gets its name when all of
it is on the disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparkwright_kernels.engram import native
from sparkwright_kernels.engram.errors import EngramError, EngramErrors, raise_all
from sparkwright_kernels.engram.formats import PAGE, EngramFile, check_file, read_file
from sparkwright_kernels.engram.layout import EngramLayout
from sparkwright_kernels.engram.source import Plane, Source

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Progress = Callable[[str, int, int], None]
"""Called with a file's name, its bytes done and its bytes in all; by several threads at once."""

WORKERS = 4
_SAMPLERS = 16  # threads that compare single rows: each waits for the disk nearly all the time

_HUGE = 2**21
_FLUSH_CHUNKS = 32  # without direct I/O: chunks that may wait in the page cache
_LINE = re.compile(rb"(\d{1,10}) ([0-9a-f]{16})\n")
_MAX_TOLD = 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True)
class Task:
    """A file to be: where, of what."""

    source: Source
    file: EngramFile
    path: Path

    @property
    def part(self) -> Path:
        return self.path.with_name(f"{self.path.name}.part")

    @property
    def journal(self) -> Path:
        return self.path.with_name(f"{self.path.name}.journal")

    def identity(self) -> bytes:
        """First line of the journal: what the chunks were packed from and for."""
        header = hashlib.sha256(self.file.header()).hexdigest()
        return json.dumps([header, self.file.chunk_rows, self.source.identity()]).encode() + b"\n"


def pack(
    tasks: Sequence[Task],
    layout: EngramLayout | None = None,
    workers: int = WORKERS,
    progress: Progress = lambda name, done, total: None,
    stop: threading.Event | None = None,
) -> dict[Path, str]:
    """Make every file that is not there; path to "kept" or "packed". All in one directory, which is made.

    Nothing is written unless there is room for all of them and every file that is there is what it should be; raises
    EngramError otherwise. A set `stop` ends it early with EngramError; a later call goes on from there.
    """
    native.library()
    stop = stop or threading.Event()
    directory = tasks[0].path.parent
    with _only_one(directory):
        missing = [task for task in tasks if not task.path.exists()]
        check((task for task in tasks if task not in missing), layout)
        begun = {task: _resume(task, workers, stop) for task in missing}
        _check_room(directory, missing, begun)
        for task in tasks:
            if task in begun:
                _pack_file(task, begun[task], workers, progress, stop)
            # A run that was killed between a file's last steps left these.
            task.journal.unlink(missing_ok=True)
            task.part.unlink(missing_ok=True)
    return {task.path: "packed" if task in begun else "kept" for task in tasks}


def check(tasks: Iterable[Task], layout: EngramLayout | None = None) -> None:
    """Raise whatever is wrong with these files by their size, header and table of checksums."""
    errors: list[EngramError] = []
    for task in tasks:
        try:
            read_table(task.path, check_file(task.path, task.file, layout))
        except EngramError as error:
            errors += error.errors if isinstance(error, EngramErrors) else [error]
    raise_all(errors)


def read_table(path: Path, file: EngramFile) -> list[int]:
    """XXH64 of each chunk of a `pages` file, nothing for the other format; `file` is what read_file found."""
    with path.open("rb") as stream:
        stream.seek(PAGE + file.payload_bytes)
        table = stream.read(file.table_bytes)
    if file.table_bytes and hashlib.sha256(table).digest() != file.table_digest:
        again = "delete it and pack it again"
        raise EngramError(path, "a damaged table of checksums", "the one that its header was made with", again)
    return list(struct.unpack(f"<{len(table) // 8}Q", table))


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as reason:
        raise EngramError(directory, reason.strerror or str(reason), "a directory that can be written") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise EngramError(directory, "another packing of it", "one at a time", "wait for that one to end") from None
    finally:
        os.close(handle)


def _check_room(directory: Path, tasks: list[Task], begun: dict[Task, dict[int, int]]) -> None:
    file_system = os.statvfs(directory)
    free = file_system.f_bavail * file_system.f_frsize
    size = sum(task.file.file_bytes for task in tasks)
    there = sum(min(task.part.stat().st_blocks * 512, task.file.file_bytes) for task in tasks if begun[task])
    if size - there > free:
        found = f"{free} bytes free"
        needed = f"{size} - {there} there = {size - there} bytes for {len(tasks)} file(s)"
        short = size - there - free
        raise EngramError(directory, found, needed, f"make room for {short} bytes ({short / 2**30:.2f} GiB) more")


# ------------------------------------------------------------------------------------------------------ direct I/O


def _open_direct(path: Path, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o644), True
    except OSError as reason:
        if reason.errno != errno.EINVAL:
            raise
    return os.open(path, flags | os.O_CLOEXEC, 0o644), False


def _memory(bytes: int) -> Bytes:
    """Aligned to pages, with room for what a range takes more when it is widened to whole pages.

    In huge pages where there are any: direct I/O to scattered pages is cut into small requests, at half the rate.
    """
    size = _whole_pages(bytes) + 2 * PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if size < _HUGE:
        return np.frombuffer(mmap.mmap(-1, size, private), np.uint8)
    mapped = mmap.mmap(-1, -(-size // _HUGE) * _HUGE + _HUGE, private)
    with suppress(OSError):  # a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    return memory[-memory.ctypes.data % _HUGE :][:size]


class _Input:
    """A file read in ranges; `read` may be called by many threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd, self.direct = _open_direct(path, os.O_RDONLY)
        except OSError as reason:
            raise EngramError(path, reason.strerror or str(reason), "a readable file") from None

    def read(self, buffer: Bytes, offset: int, size: int) -> Bytes:
        """Bytes `offset` to `offset + size`, as a view into `buffer`; raises EngramError where the file ends first."""
        first = offset // PAGE * PAGE
        space, needed = buffer.data[: -(-(offset + size - first) // PAGE) * PAGE], offset + size - first
        got = 0
        while got < needed:
            # Whole pages, also after a read that ended within one.
            at = got // PAGE * PAGE
            try:
                more = os.preadv(self.fd, [space[at:]], first + at)
            except OSError as reason:
                place = f"{size} bytes at byte {offset}"
                raise EngramError(self.path, f"{reason.strerror}", place, "the kernel's log says more") from None
            if at + more <= got:
                found, wanted = f"its end at byte {first + got}", f"{size} bytes at byte {offset}"
                raise EngramError(self.path, found, wanted, "it was cut short: fetch it again")
            got = at + more
        if not self.direct:
            os.posix_fadvise(self.fd, first, got, os.POSIX_FADV_DONTNEED)
        return buffer[offset - first : needed]

    def close(self) -> None:
        os.close(self.fd)


class _Chunks:
    """One thread's chunks of a table, as they are in a file: `out` has the last one."""

    def __init__(self, task: Task, inputs: dict[Path, _Input]) -> None:
        self.task, self.inputs = task, inputs
        rows, source = task.file.chunk_rows, task.source
        self.memory = {plane: _memory(rows * plane.row_bytes) for plane in (source.weight, source.scale)}
        self.out = _memory(task.file.span(rows))

    def make(self, number: int) -> tuple[int, int]:
        """Read a chunk's rows and interleave them to `out`; returns its bytes and their XXH64."""
        file, source = self.task.file, self.task.source
        first, count = file.chunk(number)
        weights, scales = (self._rows(plane, first + file.rows.lo, count) for plane in (source.weight, source.scale))
        digest = native.library().engram_pack(
            weights.ctypes.data, scales.ctypes.data, self.out.ctypes.data, count,
            source.weight.row_bytes, source.scale.row_bytes, file.rows_per_page,
        )  # fmt: skip
        return file.span(count), digest

    def _rows(self, plane: Plane, first: int, count: int) -> Bytes:
        at, size = plane.offset + first * plane.row_bytes, count * plane.row_bytes
        return self.inputs[plane.path].read(self.memory[plane], at, size)


@contextmanager
def _inputs(source: Source, *others: Path) -> Iterator[dict[Path, _Input]]:
    opened: dict[Path, _Input] = {}
    try:
        for path in {source.weight.path, source.scale.path, *others}:
            opened[path] = _Input(path)
        yield opened
    finally:
        for input in opened.values():
            input.close()


def _for_each(
    numbers: Iterable[int], workers: int, stop: threading.Event, start: Callable[[], Callable[[int], None]]
) -> None:
    """Call what `start` (called once a thread) returns with each number. The first error ends all, and is raised."""
    left, lock = iter(numbers), threading.Lock()

    def work() -> None:
        try:
            do = start()
            while not stop.is_set():
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                do(number)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(work) for _ in range(workers)]
        try:
            for each in running:
                each.result()
        except BaseException:  # an interrupt too: the threads end after the chunk they are at
            stop.set()
            raise


# --------------------------------------------------------------------------------------------------------- one file


def _resume(task: Task, workers: int, stop: threading.Event) -> dict[int, int]:
    """Chunks of an earlier run that are in the part file: number to hash. What cannot be gone on with is removed."""
    done: dict[int, int] = {}
    try:
        lines = task.journal.read_bytes().splitlines(keepends=True)
        size = task.part.stat().st_size
    except FileNotFoundError:
        lines, size = [], 0
    sizes = (task.file.file_bytes, _whole_pages(task.file.file_bytes))  # the former once it is finished
    if lines and lines[0] == task.identity() and size in sizes:
        # A line that a crash cut short, or zeros in its place, is no line.
        matches = [match for line in lines[1:] if (match := _LINE.fullmatch(line))]
        listed = {int(match[1]): int(match[2], 16) for match in matches}
        done = {number: digest for number, digest in listed.items() if number < task.file.chunks}
    if done:
        wrong = _wrong_chunks(task.part, task.file, done, workers, stop)
        if stop.is_set():
            raise _stopped(task, done)
        done = {number: digest for number, digest in done.items() if number not in wrong}
    if not done:
        task.journal.unlink(missing_ok=True)  # first: a journal speaks for the part that is there
        task.part.unlink(missing_ok=True)
    return done


def _stopped(task: Task, done: dict[int, int]) -> EngramError:
    found = f"{len(done)} of {task.file.chunks} chunks: it was stopped"
    return EngramError(task.path, found, "all of them", "run again to go on from there")


def _wrong_chunks(
    path: Path, file: EngramFile, digests: dict[int, int], workers: int, stop: threading.Event
) -> set[int]:
    """Chunks of the file at `path` that have another hash than they should."""
    wrong: set[int] = set()
    input = _Input(path)

    def start() -> Callable[[int], None]:
        memory = _memory(file.span(file.chunk_rows))

        def hash(number: int) -> None:
            data = input.read(memory, *_place(file, number))
            if native.library().engram_xxh64(data.ctypes.data, data.nbytes) != digests[number]:
                wrong.add(number)

        return hash

    try:
        _for_each(digests, workers, stop, start)
    finally:
        input.close()
    return wrong


def _whole_pages(bytes: int) -> int:
    return -(-bytes // PAGE) * PAGE


def _place(file: EngramFile, number: int) -> tuple[int, int]:
    first, count = file.chunk(number)
    return file.offset(first), file.span(count)


def _take_room(fd: int, size: int) -> None:
    """Make a file this large, its room taken where the filesystem can: in one stretch, and no write has to grow it."""
    if _libc.fallocate(fd, 0, 0, size) != 0:
        reason = ctypes.get_errno()
        if reason not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(reason, os.strerror(reason))
        os.truncate(fd, size)


class _Output:
    """The part file and its journal."""

    def __init__(self, task: Task, done: dict[int, int]) -> None:
        self.task, self.done = task, done
        self.bytes = sum(_place(task.file, number)[1] for number in done)
        self.lock = threading.Lock()
        self.fd, self.direct = _open_direct(task.part, os.O_RDWR | os.O_CREAT)
        self.journal = -1
        try:
            _take_room(self.fd, _whole_pages(task.file.file_bytes))  # direct writes are of whole pages
            self.journal = os.open(task.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            # A line that was cut short ends here.
            os.write(self.journal, b"\n" if done else task.identity())
        except OSError:
            self.close()
            raise

    def write(self, data: Bytes, offset: int) -> None:
        view = data.data
        while view:
            written = os.pwrite(self.fd, view, offset)
            view, offset = view[written:], offset + written

    def add(self, number: int, size: int, digest: int) -> int:
        """Note a chunk that is written; returns the bytes that now are."""
        with self.lock:
            os.write(self.journal, b"%d %016x\n" % (number, digest))
            self.done[number] = digest
            self.bytes += size
            if not self.direct and len(self.done) % _FLUSH_CHUNKS == 0:
                os.fdatasync(self.fd)
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return self.bytes

    def finish(self) -> None:
        """Table and header last, and the name when everything is on the disk."""
        file, path = self.task.file, self.task.path
        if file.table_bytes:
            table = b"".join(self.done[number].to_bytes(8, "little") for number in range(file.chunks))
            file = replace(file, table_digest=hashlib.sha256(table).digest())
            self.write(_padded(table), PAGE + file.payload_bytes)
        self.write(_padded(file.header()), 0)
        os.truncate(self.fd, file.file_bytes)
        os.fsync(self.fd)
        if not self.direct:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.task.part.rename(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        for handle in (self.fd, self.journal):
            if handle >= 0:
                os.close(handle)


def _padded(data: bytes) -> Bytes:
    memory = _memory(len(data))
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    return memory[: _whole_pages(len(data))]


def _pack_file(task: Task, done: dict[int, int], workers: int, progress: Progress, stop: threading.Event) -> None:
    file = task.file
    left = [number for number in range(file.chunks) if number not in done]
    try:
        with _inputs(task.source) as inputs:
            output = _Output(task, done)
            progress(task.path.name, output.bytes, file.payload_bytes)

            def start() -> Callable[[int], None]:
                chunks = _Chunks(task, inputs)

                def do(number: int) -> None:
                    size, digest = chunks.make(number)
                    whole = _whole_pages(size)
                    chunks.out[size:whole] = 0
                    output.write(chunks.out[:whole], _place(file, number)[0])
                    progress(task.path.name, output.add(number, size, digest), file.payload_bytes)

                return do

            try:
                _for_each(left, min(workers, max(1, len(left))), stop, start)
                if len(output.done) < file.chunks:
                    raise _stopped(task, output.done)
                output.finish()
            finally:
                output.close()
    except OSError as reason:
        if not done:  # room that was taken for nothing
            task.journal.unlink(missing_ok=True)
            task.part.unlink(missing_ok=True)
        if reason.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(task) from None
        raise EngramError(task.part, reason.strerror or str(reason), "a file that can be written") from None


def _full(task: Task) -> EngramError:
    file_system = os.statvfs(task.path.parent)
    free = file_system.f_bavail * file_system.f_frsize
    there = min(task.part.stat().st_blocks * 512, task.file.file_bytes) if task.part.exists() else 0
    needed = f"{task.file.file_bytes} - {there} there = {task.file.file_bytes - there} bytes"
    return EngramError(task.part, f"a full file system, {free} bytes free", needed, "make room and run again to go on")


# ---------------------------------------------------------------------------------------------------------- verify


def verify(
    task: Task,
    rows: int | None,
    layout: EngramLayout | None = None,
    workers: int = WORKERS,
    progress: Progress = lambda name, done, total: None,
    seed: int | None = None,
) -> int:
    """Compare a file with its source: so many random rows besides the first and the last, or all of it (None).

    Returns the number of rows compared; raises EngramError for those that differ.
    """
    found = check_file(task.path, task.file, layout)
    table = read_table(task.path, found)
    with _inputs(task.source, task.path) as inputs:
        if rows is None:
            wrong = _compare_chunks(task, inputs, table, workers, progress)
            compared = found.rows.rows
        else:
            drawn = np.random.default_rng(seed).integers(0, found.rows.rows, rows).tolist()
            picked = sorted({0, found.rows.rows - 1, *drawn})
            wrong, compared = _compare_rows(task, inputs, picked), len(picked)
    if wrong:
        told = ", ".join(str(row + found.rows.lo) for row in sorted(wrong)[:_MAX_TOLD])
        more = f" and {len(wrong) - _MAX_TOLD} more" if len(wrong) > _MAX_TOLD else ""
        raise EngramError(task.path, f"other bytes in row {told}{more}", "the source's", "delete it and pack it again")
    return compared


def verify_checksums(
    path: Path, expected: EngramFile | None = None, layout: EngramLayout | None = None, workers: int = WORKERS
) -> int:
    """Compare a `pages` file with its own table of checksums, for which no source is needed; returns the chunks."""
    found = check_file(path, expected, layout) if expected else read_file(path)
    if found.format != "pages":
        raise EngramError(path, f"format {found.format}", "pages", "only that has checksums: verify against the source")
    table = read_table(path, found)
    wrong = sorted(_wrong_chunks(path, found, dict(enumerate(table)), workers, threading.Event()))
    if wrong:
        told = ", ".join(f"{found.chunk(number)[0] + found.rows.lo}" for number in wrong[:_MAX_TOLD])
        told = f"other checksums in {len(wrong)} of {len(table)} chunks (from row {told} on)"
        raise EngramError(path, told, "those of its table", "delete it and pack it again")
    return len(table)


def _compare_rows(task: Task, inputs: dict[Path, _Input], rows: list[int]) -> list[int]:
    file, wrong = task.file, []
    weight, scale = task.source.weight, task.source.scale

    def start() -> Callable[[int], None]:
        memories = [_memory(file.row_bytes) for _ in range(3)]

        def read(memory: Bytes, path: Path, offset: int, size: int) -> bytes:
            return inputs[path].read(memory, offset, size).tobytes()

        def compare(row: int) -> None:
            there = read(memories[0], task.path, file.offset(row), file.row_bytes)
            source = b"".join(
                read(memory, plane.path, plane.offset + (file.rows.lo + row) * plane.row_bytes, plane.row_bytes)
                for memory, plane in zip(memories[1:], (weight, scale), strict=True)
            )
            if there != source:
                wrong.append(row)

        return compare

    _for_each(rows, _SAMPLERS, threading.Event(), start)
    return wrong


def _compare_chunks(
    task: Task, inputs: dict[Path, _Input], table: list[int], workers: int, progress: Progress
) -> list[int]:
    file, wrong, lock = task.file, [], threading.Lock()
    done = 0

    def start() -> Callable[[int], None]:
        chunks, memory = _Chunks(task, inputs), _memory(file.span(file.chunk_rows))

        def compare(number: int) -> None:
            nonlocal done
            size, digest = chunks.make(number)
            there = inputs[task.path].read(memory, *_place(file, number))
            first, count = file.chunk(number)
            differing: list[int] = []
            if not np.array_equal(there, chunks.out[:size]):
                starts = np.array([file.offset(row) for row in range(first, first + count)]) - file.offset(first)
                places = np.flatnonzero(there != chunks.out[:size])
                # Bytes between a page's last row and its end are told as that row's.
                rows = np.unique(np.searchsorted(starts, places, "right") - 1) + first
                differing = rows.tolist()
            elif table and table[number] != digest:
                differing = [first]
            with lock:
                wrong.extend(differing)
                done += size
                progress(task.path.name, done, file.payload_bytes)

        return compare

    _for_each(range(file.chunks), workers, threading.Event(), start)
    return wrong
