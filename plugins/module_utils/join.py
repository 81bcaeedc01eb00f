# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""One file out of the parts that a repository stores it in (``X.part01``, ``X.part02``, ...).

Private to this collection. How ``X`` comes to be, all in its own directory (sizes and offsets are in bytes):

- ``.X.joining`` is the file while it grows. The first part becomes it by rename, so that its bytes are never copied;
  with ``keep_parts`` it starts empty instead. The other parts are appended. Every byte is read once, for the hash and
  the copy together, and written at most once.
- ``.X.joining.json`` is the journal: the parts, the digest and ``joined``, up to where ``.X.joining`` is safely on the
  disk. It is replaced in one step, and is on the disk before what it speaks of happens:

  1. the journal is written, then the first part renamed: a journal without ``.X.joining`` means nothing happened;
  2. data is appended and flushed, then ``joined`` moves on, then what lies below ``joined`` is taken from the parts: a
     part that is wholly below is removed, from the one that is half below the disk blocks are (a hole is punched);
  3. when all is joined and the digest is right, ``.X.joining`` is renamed to ``X``, then the journal is removed.

So a crash at any byte leaves ``[0, joined)`` in ``.X.joining`` and the rest in the parts. The next call cuts off what
is beyond ``joined``, reads what is below again for the hash, and goes on with the part from there.

Extra disk: what is appended and not yet taken from the parts, at most the smaller of ``LIMIT`` and the largest part
after the first (where the file system punches no holes: that part), plus the journal. With ``keep_parts`` nothing of
the parts is touched and the extra disk is the whole file.

The caller keeps other runs out of the directory. Nothing here talks to a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.sparkwright.dsv41.plugins.module_utils.weights import (
    FileEntry,
    FileFinding,
    file_digest,
    flush,
    is_full,
)

JOURNAL_FORMAT = 1

# What is read, hashed and written at a time, and how many of these are on their way.
CHUNK = 4 * 1024 * 1024
CHUNKS = 8
# Appended bytes after which the data is flushed and taken from the parts, and how many may wait for that.
WINDOW = 128 * 1024 * 1024
LIMIT = 2 * WINDOW
# The journal and what a file system adds to a file.
_OVERHEAD = 256 * 1024

_SUFFIX = re.compile(r"(?P<target>.*)\.part(?P<number>[^./]*)", re.DOTALL)
_SUM = re.compile(r"(?P<digest>[0-9A-Fa-f]{64}) [ *](?P<path>.+)")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Linux: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE.
_PUNCH = 0x01 | 0x02


class JoinError(Exception):
    """The file cannot be joined; ``findings`` has each reason. What is on the disk can be taken up by a later call."""

    def __init__(self, message: str, findings: Sequence[FileFinding] = ()) -> None:
        super().__init__(message + "".join(f"\n  {finding}" for finding in findings))
        self.findings = tuple(findings)


class NoRoom(JoinError):
    """The file system is full. Nothing is lost: with more room the next call goes on."""


class DigestMismatch(JoinError):
    """All is joined and is not the file; ``found`` and ``needed`` are digests.

    With ``keep_parts`` the copy is gone and the parts are as they were. Without, the joined bytes stay in
    ``.X.joining``, and ``discard`` removes them.
    """

    def __init__(self, message: str, path: str, found: str, needed: str) -> None:
        super().__init__(message, [FileFinding(path, found, needed)])
        self.found = found
        self.needed = needed


@dataclass(frozen=True)
class Pending:
    """What an earlier call left of the work for one target. Nothing was read but names, sizes and the journal.

    ``complete``: the target is there and has the size of all parts; its digest was not looked at.
    ``consumed``: parts that are in ``.X.joining`` already; they need not be there and must not be fetched again.
    ``partial``: the part that is appended half, or None. Its first bytes may be gone, so its digest says nothing; when
    it is missing, it can be fetched again.
    ``needed``: parts that must be there for ``join``, ``partial`` among them. Empty when the target is complete.
    ``joined``: bytes of ``.X.joining`` that are safe.
    ``problem``: why the next call of ``join`` refuses what was left (of other parts, of another digest, damaged), or
    None. Then ``discard`` is the repair, and all parts are in ``needed``.
    """

    complete: bool
    consumed: tuple[str, ...]
    partial: str | None
    needed: tuple[str, ...]
    joined: int
    problem: str | None


@dataclass(frozen=True)
class Joined:
    """What ``join`` did. ``resumed_at`` is the offset at which an interrupted join went on, 0 for a fresh one."""

    size: int
    digest: str
    resumed_at: int


@dataclass(frozen=True)
class _Journal:
    """``consumes``: parts may have been changed or removed since it was begun."""

    digest: str
    parts: tuple[tuple[str, int], ...]
    joined: int
    consumes: bool


@dataclass(frozen=True)
class _Paths:
    """Where the target and what belongs to it are."""

    folder: str
    target: str
    growing: str
    journal: str

    @classmethod
    def of(cls, root: str, target: str) -> _Paths:
        path = os.path.join(root, target)
        folder, name = os.path.split(path)
        return cls(folder, path, *(os.path.join(folder, other) for other in _working_names(name)))


def _working_names(name: str) -> tuple[str, str]:
    return f".{name}.joining", f".{name}.joining.json"


# Names and lists


def group_parts(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The files that ``names`` hold in parts, each with its parts in numeric order. Other names are left out.

    The numbers are decimal, padded or not, without gaps, from 0 or 1. Raises JoinError naming every file that breaks
    this, that is there both whole and in parts, or that has the name of something ``join`` makes.
    """
    names = list(names)
    there = set(names)
    groups: dict[str, dict[int, str]] = {}
    findings = []
    for name in sorted(there):
        match = _SUFFIX.fullmatch(name)
        if match is None:
            continue
        target, number = match["target"], match["number"]
        if not re.fullmatch(r"[0-9]{1,9}", number, re.ASCII) or target.endswith("/") or not target:
            findings.append(FileFinding(name, f"the suffix .part{number}", "a file name, .part and a decimal number"))
            continue
        same = groups.setdefault(target, {}).setdefault(int(number), name)
        if same != name:
            findings.append(FileFinding(name, f"the same number as {same}", "each number once"))
    for target, parts in groups.items():
        first = min(min(parts), 1)
        gap = next(number for number in range(first, first + len(parts) + 1) if number not in parts)
        if gap < max(parts):
            known = parts[min(parts)]
            findings.append(FileFinding(target, f"{len(parts)} part(s) from {known} on, none numbered {gap}", "no gap"))
        folder, name = os.path.split(target)
        if target in there:
            findings.append(FileFinding(target, "both the file and parts of it", "one of them"))
        for other in _working_names(name):
            other = os.path.join(folder, other)
            if other in there:
                findings.append(FileFinding(other, "a file of the repository", "a name that joining does not use"))
    if findings:
        raise JoinError("Parts of files that cannot be told apart or put in order:", findings)
    return {target: tuple(parts[number] for number in sorted(parts)) for target, parts in groups.items()}


def parse_sha256_manifest(text: str) -> dict[str, str]:
    """The digests (64 lower-case hexadecimal digits) by path of a list in the format of ``sha256sum``.

    Empty lines and those that begin with ``#`` are left out, a leading ``./`` of a path too. Raises JoinError naming
    every line that is no such line, has an escaped or unsafe path, or a second digest for a path.
    """
    digests: dict[str, str] = {}
    findings = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"line {number}"
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("\\"):
            findings.append(FileFinding(where, "an escaped file name", "a name without line breaks and backslashes"))
            continue
        match = _SUM.fullmatch(line)
        if match is None:
            findings.append(FileFinding(where, repr(line[:100]), "64 hexadecimal digits, two characters, a path"))
            continue
        digest, path = match["digest"].lower(), match["path"]
        path = path[2:] if path.startswith("./") else path
        try:
            if not path.isprintable():
                raise ValueError(f"unsafe file name {path!r}")
            FileEntry(path, 0, f"sha256:{digest}")
        except ValueError as error:
            findings.append(FileFinding(where, str(error), "a path below the directory of the list"))
            continue
        if digests.setdefault(path, digest) != digest:
            findings.append(FileFinding(where, f"{digest} for {path}", f"{digests[path]}, which it has already"))
    if findings:
        raise JoinError("The list of SHA-256 digests cannot be used:", findings)
    return digests


# Room and state


def room_needed(
    parts: Sequence[tuple[str, int]], keep_parts: bool = False, joined: int = 0, punches: bool = False
) -> int:
    """Free bytes that ``join`` needs for these (path, size): the most that it has on the disk twice, and its journal.

    ``joined`` is that of ``pending``; ``punches`` that of ``punches_holes``: false is right everywhere, and more.
    """
    total = sum(size for _, size in parts)
    if keep_parts:
        return total - joined + _OVERHEAD
    left, end = [0], 0
    for index, (_, size) in enumerate(parts):
        end += size
        if index and end > joined:
            left.append(size)
    return (min(max(left), LIMIT) if punches else max(left)) + _OVERHEAD


def punches_holes(folder: str) -> bool:
    """Whether the file system of ``folder`` can give back the front of a file; tried on a file without a name."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except (OSError, AttributeError):
        return False
    try:
        os.pwrite(descriptor, b"\1" * 8192, 0)
        return _punch(descriptor, 0, 4096)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def pending(root: str, target: str, parts: Sequence[tuple[str, int]], digest: str) -> Pending:
    """What was left of joining these parts (path below ``root``, size) into ``target``. Changes nothing.

    Raises JoinError for arguments that make no sense, OSError when the directory cannot be read.
    """
    _refuse_bad_arguments(target, parts, digest)
    paths = _Paths.of(root, target)
    names = tuple(path for path, _ in parts)
    total = sum(size for _, size in parts)
    if _regular_size(paths.target) == total:
        return Pending(True, (), None, (), total, None)
    journal, problem = _left(paths, tuple(parts), digest)
    if problem is not None or journal is None:
        return Pending(False, (), None, names, 0, problem)
    consumed, needed, end = [], [], 0
    partial = None
    for path, size in parts:
        start, end = end, end + size
        if end <= journal.joined:
            consumed.append(path)
            continue
        needed.append(path)
        if start < journal.joined:
            partial = path
    return Pending(False, tuple(consumed), partial, tuple(needed), journal.joined, None)


def discard(root: str, target: str) -> tuple[str, ...]:
    """Remove what an interrupted or failed join of ``target`` left, so that its parts can be fetched anew.

    Removes ``.X.joining``, the journal and the parts whose bytes may be gone; returns what was removed, as paths of the
    file system. The target and whole parts stay. Raises OSError.
    """
    paths = _Paths.of(root, target)
    journal: _Journal | None = None
    with suppress(ValueError):
        journal = _read_journal(paths)
    doomed = []
    if journal is not None and journal.consumes and os.path.lexists(paths.growing):
        start = 0
        for path, size in journal.parts:
            if start < journal.joined:
                # By its name only: whatever the journal says, no other folder is touched.
                doomed.append(os.path.join(paths.folder, os.path.basename(path)))
            start += size
    doomed += [paths.growing, f"{paths.journal}.tmp", paths.journal]
    removed = tuple(path for path in doomed if _remove(path))
    if removed:
        flush(paths.folder)
    return removed


# Joining


def join(
    root: str,
    target: str,
    parts: Sequence[tuple[str, int]],
    digest: str,
    keep_parts: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> Joined:
    """Make ``target`` below ``root`` out of its parts, given in order as (path below ``root``, size in bytes).

    ``digest`` is that of the whole file, ``sha256:`` and 64 hexadecimal digits. Parts are removed as they are appended
    unless ``keep_parts`` is set; parts that an earlier call consumed need not be there. A target that is there and
    right is left as it is (its parts are removed all the same), a wrong one is replaced when all parts are there.
    ``on_bytes`` is called, in this thread, with the number of bytes hashed since its last call; they add up to the size
    (to twice the size when a wrong target of the right size was there).

    Raises JoinError before anything is changed when parts are missing, have another size or are not regular files with
    one name; NoRoom when the disk is full; DigestMismatch when the result is not the file, which then never has the
    name of the target; OSError. After each of these, and after a crash, the same call can be made again.
    """
    _refuse_bad_arguments(target, parts, digest)
    parts = tuple(parts)
    paths = _Paths.of(root, target)
    tell = on_bytes or (lambda count: None)
    try:
        there = _regular_size(paths.target)
        total = sum(size for _, size in parts)
        wrong = f"{there} bytes" if there is not None else None
        if there == total:
            wrong = file_digest(paths.target, "sha256", total)
            tell(total)
        if wrong == digest:
            if not keep_parts:
                for path, _ in parts:
                    _remove(os.path.join(root, path))
            _remove(paths.growing)
            _finish(paths)
            return Joined(total, digest, 0)
        journal, problem = _left(paths, parts, digest)
        if problem is not None:
            raise JoinError(f"{target} cannot be joined: {problem}")
        _refuse_bad_parts(root, FileFinding(target, wrong or "nothing", digest), parts, journal, keep_parts)
        if there is not None:
            # Known to be wrong, and all that is needed to make it is there.
            _remove(paths.target)
        resumed_at = journal.joined if journal is not None else 0
        journal = _begin(root, paths, journal, parts, digest, keep_parts)
        found = _Work(root, paths, journal, keep_parts, tell).run()
        if found != digest:
            kept = not journal.consumes
            if kept:
                discard(root, target)
            raise DigestMismatch(
                f"{target}, joined from {len(parts)} part(s), is not the file, and does not get its name. "
                + (
                    "The parts are as they were: verify them, or the digest."
                    if kept
                    else f"Its bytes are in {os.path.basename(paths.growing)}: correct the digest and run again, or "
                    "remove that file and fetch the parts again."
                ),
                target,
                found,
                digest,
            )
        os.rename(paths.growing, paths.target)
        flush(paths.folder)
        _finish(paths)
        return Joined(total, digest, resumed_at)
    except OSError as error:
        if not is_full(error):
            raise
        free = os.statvfs(paths.folder)
        raise NoRoom(
            f"The file system of {paths.folder} is full while {target} is joined from its parts ({error.strerror}): "
            f"found {free.f_bavail * free.f_frsize} bytes free, needed up to "
            f"{room_needed(parts, keep_parts)}. Nothing is lost: make room and run again, joining goes on."
        ) from error


def _refuse_bad_arguments(target: str, parts: Sequence[tuple[str, int]], digest: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise JoinError(f"{target}: no usable digest ({digest!r}), needed sha256: and 64 hexadecimal digits")
    if not parts:
        raise JoinError(f"{target}: no parts to join")
    findings = []
    for path, size in [(target, 0), *parts]:
        try:
            FileEntry(path, size, digest)
        except ValueError as error:
            findings.append(FileFinding(path, str(error), "a path below the directory"))
        else:
            if os.path.dirname(path) != os.path.dirname(target):
                findings.append(FileFinding(path, "another folder", f"the folder of {target}"))
    if len({target, *(path for path, _ in parts)}) != len(parts) + 1:
        findings.append(FileFinding(target, "one path twice", "each path once"))
    if findings:
        raise JoinError(f"{target} cannot be joined:", findings)


def _left(paths: _Paths, parts: tuple[tuple[str, int], ...], digest: str) -> tuple[_Journal | None, str | None]:
    """The journal of an interrupted join that can go on, and why one cannot; neither when there is nothing to go on."""
    growing = os.path.basename(paths.growing)
    if not os.path.lexists(paths.growing):
        return None, None
    repair = "remove what is left of it (and fetch the parts again)"
    size = _regular_size(paths.growing)
    if size is None:
        return None, f"found {growing}, which is not a regular file: {repair}"
    try:
        journal = _read_journal(paths)
    except ValueError as error:
        return None, f"found {growing} of an interrupted join with a journal that cannot be used ({error}): {repair}"
    if journal is None:
        return None, f"found {growing} of an interrupted join without its journal: {repair}"
    if journal.parts != parts:
        return None, f"found {growing}, an interrupted join of other parts: {repair}"
    total = sum(size for _, size in parts)
    # With all of it there, the digest is to be found out, whatever was asked for then.
    if journal.digest != digest and journal.joined != total:
        return None, f"found {growing}, an interrupted join of {journal.digest}, needed {digest}: {repair}"
    if not journal.joined <= size <= total:
        return None, f"found {growing} with {size} bytes, needed {journal.joined} to {total}: {repair}"
    return journal, None


def _refuse_bad_parts(
    root: str, whole: FileFinding, parts: Sequence[tuple[str, int]], journal: _Journal | None, keep_parts: bool
) -> None:
    findings = []
    joined = journal.joined if journal is not None else 0
    end = 0
    for path, size in parts:
        end += size
        try:
            status = os.lstat(os.path.join(root, path))
        except (FileNotFoundError, NotADirectoryError):
            if journal is None or end > joined:
                findings.append(FileFinding(path, "nothing", f"{size} bytes"))
            continue
        found = None
        if stat.S_ISLNK(status.st_mode):
            found = "a symbolic link"
        elif stat.S_ISDIR(status.st_mode):
            found = "a directory"
        elif not stat.S_ISREG(status.st_mode):
            found = "something that is not a regular file"
        elif status.st_size != size:
            found = f"{status.st_size} bytes"
        elif status.st_nlink != 1 and not keep_parts:
            # Appending to it, or punching holes, would change the file under its other names.
            needed = "one name (a copy), or the parts to be kept"
            findings.append(FileFinding(path, f"a file with {status.st_nlink} names (hard links)", needed))
        if found is not None:
            findings.append(FileFinding(path, found, f"a regular file of {size} bytes"))
    target = os.path.join(root, whole.path)
    if os.path.lexists(target) and _regular_size(target) is None:
        findings.append(FileFinding(whole.path, "something that is not a regular file", "a regular file, or nothing"))
    elif findings and os.path.lexists(target):
        findings.append(whole)
    if findings:
        raise JoinError(f"{whole.path} cannot be joined, nothing was changed:", findings)


def _begin(
    root: str,
    paths: _Paths,
    journal: _Journal | None,
    parts: tuple[tuple[str, int], ...],
    digest: str,
    keep_parts: bool,
) -> _Journal:
    """Have ``.X.joining`` and a journal that is true of it."""
    if journal is not None:
        fresh = replace(journal, digest=digest, consumes=journal.consumes or not keep_parts)
        if fresh != journal:
            _write_journal(paths, fresh)
        return fresh
    journal = _Journal(digest, parts, 0 if keep_parts else parts[0][1], not keep_parts)
    if keep_parts:
        _write_journal(paths, journal)
        os.close(os.open(paths.growing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    else:
        first = os.path.join(root, parts[0][0])
        flush(first)
        _write_journal(paths, journal)
        os.rename(first, paths.growing)
    flush(paths.folder)
    return journal


class _Work:
    """The appending itself: this thread reads, one hashes, one writes, one flushes and frees behind the writer."""

    def __init__(
        self, root: str, paths: _Paths, journal: _Journal, keep_parts: bool, tell: Callable[[int], None]
    ) -> None:
        self.paths = paths
        self.journal = journal
        self.keep_parts = keep_parts
        self.tell = tell
        self.files = [os.path.join(root, path) for path, _ in journal.parts]
        self.sizes = [size for _, size in journal.parts]
        self.largest = max(self.sizes[1:], default=0)
        self.limit = LIMIT if keep_parts else min(LIMIT, self.largest)
        self.hash = hashlib.sha256()
        self.growing = -1
        # Set by the writing thread only, then by the flushing one only.
        self.written = self.asked = journal.joined
        self.settled = self.freed = journal.joined
        self.next_part = self.next_start = self.punched = 0
        self.punches = True
        self.settling: Future[None] | None = None
        self.broken = threading.Event()
        size = max(1, min(CHUNK, max(self.sizes)))
        self.spare = [memoryview(bytearray(size)) for _ in range(CHUNKS)]
        self.busy: deque[tuple[memoryview, int, list[Future[None]]]] = deque()

    def run(self) -> str:
        """Append what is missing; the digest of all of it, which then is on the disk."""
        joined = self.journal.joined
        with ExitStack() as stack:
            self.growing = os.open(self.paths.growing, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, self.growing)
            if os.fstat(self.growing).st_size != joined:
                os.ftruncate(self.growing, joined)
            self._free(joined)
            # Left in the other order: no thread waits for one that has ended.
            self.flusher = stack.enter_context(ThreadPoolExecutor(1))
            self.writer = stack.enter_context(ThreadPoolExecutor(1))
            self.hasher = stack.enter_context(ThreadPoolExecutor(1))
            stack.callback(self.broken.set)
            self._read(self.growing, self.paths.growing, 0, joined)
            start = 0
            for file, size in zip(self.files, self.sizes):
                if start + size > joined:
                    self._append(file, max(0, joined - start), size)
                start += size
            while self.busy:
                self._recycle()
            self.writer.submit(self._settle_all).result()
            if self.settled != start:
                raise JoinError(f"{self.paths.target}: {self.settled} bytes were joined, needed {start}")
        return f"sha256:{self.hash.hexdigest()}"

    # The reading thread

    def _append(self, file: str, start: int, size: int) -> None:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                raise JoinError(f"{file} changed while it was joined: found {status.st_size} bytes, needed {size}")
            self._read(descriptor, file, start, size, append=True)
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, file: str, start: int, end: int, append: bool = False) -> None:
        _advise(descriptor, "POSIX_FADV_SEQUENTIAL", 0, 0)
        position = dropped = start
        while position < end:
            if not self.spare:
                self._recycle()
            buffer = self.spare.pop()
            count = os.preadv(descriptor, [buffer[: end - position]], position)
            if count == 0:
                raise JoinError(f"{file} changed while it was joined: it ends at {position}, needed {end} bytes")
            data = buffer[:count]
            work = [self.hasher.submit(self.hash.update, data)]
            if append:
                work.append(self.writer.submit(self._put, data))
            self.busy.append((buffer, count, work))
            position += count
            if position - dropped >= WINDOW or position == end:
                _advise(descriptor, "POSIX_FADV_DONTNEED", dropped, position - dropped)
                dropped = position

    def _recycle(self) -> None:
        buffer, count, work = self.busy.popleft()
        for future in work:
            future.result()
        self.spare.append(buffer)
        self.tell(count)

    # The writing thread

    def _put(self, data: memoryview) -> None:
        if self.broken.is_set():
            return
        try:
            if self.written - self.freed + len(data) > self.limit:
                self._settle_all()
            while data:
                data = data[self._write(data) :]
            if self.written - self.asked >= min(WINDOW, max(1, self.limit // 2)):
                self._ask()
        except BaseException:
            # What comes after must not be written where this should be.
            self.broken.set()
            raise

    def _write(self, data: memoryview) -> int:
        try:
            count = os.pwrite(self.growing, data, self.written)
        except OSError as error:
            if not is_full(error) or self.settled == self.written:
                raise
            # What can be taken from the parts may be room enough.
            self._settle_all()
            count = os.pwrite(self.growing, data, self.written)
        self.written += count
        return count

    def _settle_all(self) -> None:
        self._wait()
        if self.settled != self.written:
            self._ask()
            self._wait()

    def _ask(self) -> None:
        self._wait()
        self.asked = self.written
        self.settling = self.flusher.submit(self._settle, self.written)

    def _wait(self) -> None:
        if self.settling is not None:
            self.settling.result()

    # The flushing thread

    def _settle(self, offset: int) -> None:
        os.fdatasync(self.growing)
        self.journal = replace(self.journal, joined=offset)
        _write_journal(self.paths, self.journal)
        _advise(self.growing, "POSIX_FADV_DONTNEED", self.settled, offset - self.settled)
        self.settled = offset
        self._free(offset)

    def _free(self, offset: int) -> None:
        """Take from the parts what is joined, and says the journal on the disk."""
        if self.keep_parts:
            self.freed = offset
            return
        while self.next_part < len(self.sizes) and self.next_start + self.sizes[self.next_part] <= offset:
            _remove(self.files[self.next_part])
            self.next_start += self.sizes[self.next_part]
            self.next_part += 1
            self.punched = 0
        freed = self.next_start
        inside = offset - self.next_start
        if self.punches and inside > self.punched:
            descriptor = os.open(self.files[self.next_part], os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self.punches = _punch(descriptor, self.punched, inside - self.punched)
            finally:
                os.close(descriptor)
            if self.punches:
                self.punched = inside
            else:
                self.limit = self.largest
        self.freed = freed + self.punched


# Files


def _regular_size(path: str) -> int | None:
    """The size of a regular file, None where there is none; links are not followed."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _finish(paths: _Paths) -> None:
    _remove(f"{paths.journal}.tmp")
    _remove(paths.journal)


def _read_journal(paths: _Paths) -> _Journal | None:
    """None when there is none. Raises ValueError when it cannot be used, OSError."""
    try:
        with open(paths.journal, encoding="utf-8") as stream:
            data: Any = json.load(stream)
        if data["format"] != JOURNAL_FORMAT:
            raise ValueError(f"format {data['format']!r}, this version reads {JOURNAL_FORMAT}")
        parts = tuple((str(part["path"]), int(part["size"])) for part in data["parts"])
        return _Journal(str(data["digest"]), parts, int(data["joined"]), bool(data["consumes"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _write_journal(paths: _Paths, journal: _Journal) -> None:
    """Put it in place in one step, and on the disk before anything else is done."""
    data = {
        "format": JOURNAL_FORMAT,
        "digest": journal.digest,
        "joined": journal.joined,
        "consumes": journal.consumes,
        "parts": [{"path": path, "size": size} for path, size in journal.parts],
    }
    temporary = f"{paths.journal}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        text = memoryview(json.dumps(data).encode())
        while text:
            text = text[os.write(descriptor, text) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, paths.journal)
    flush(paths.folder)


def _advise(descriptor: int, advice: str, start: int, length: int) -> None:
    """Tell the page cache; a platform or a file system that takes no advice is no error."""
    value = getattr(os, advice, None)
    if value is not None:
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, length, value)


def _punch(descriptor: int, start: int, length: int) -> bool:
    """Give back the disk blocks of a range, which then reads as zeros; False where that cannot be done."""
    try:
        import ctypes

        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (ImportError, OSError, AttributeError):
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(fallocate(descriptor, _PUNCH, start, length) == 0)
