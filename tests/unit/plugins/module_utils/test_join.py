# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Joining parts: names, lists, hostile directories, and above all a death or a full disk at every step."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import join as joining
from ansible_collections.sparkwright.dsv41.plugins.module_utils import weights
from ansible_collections.sparkwright.dsv41.plugins.module_utils.join import (
    DigestMismatch,
    Joined,
    JoinError,
    NoRoom,
    Pending,
    group_parts,
    join,
    parse_sha256_manifest,
    pending,
)

KIB = 1024
BLOCK = 4 * KIB
DIGEST = "a" * 64
GROWING = ".X.joining"
JOURNAL = ".X.joining.json"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """An empty directory, in memory where there is some for files: these tests flush thousands of times."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows so small that files of some kilobytes have many."""
    monkeypatch.setattr(joining, "CHUNK", 8 * KIB)
    monkeypatch.setattr(joining, "CHUNKS", 3)
    monkeypatch.setattr(joining, "WINDOW", 12 * KIB)
    monkeypatch.setattr(joining, "LIMIT", 24 * KIB)


@dataclass
class Case:
    """A file in parts, as lists for join."""

    root: Path
    data: bytes
    parts: list[tuple[str, int]]
    digest: str

    @classmethod
    def make(cls, root: Path, *sizes: int, seed: int = 1) -> Case:
        data = random.Random(seed).randbytes(sum(sizes))
        parts = [(f"X.part{number:02}", size) for number, size in enumerate(sizes, 1)]
        case = cls(root, data, parts, "sha256:" + hashlib.sha256(data).hexdigest())
        case.write()
        return case

    def write(self) -> None:
        start = 0
        for path, size in self.parts:
            (self.root / path).write_bytes(self.data[start : start + size])
            start += size

    def join(self, **options: Any) -> Joined:
        return join(str(self.root), "X", self.parts, self.digest, **options)

    def pending(self) -> Pending:
        return pending(str(self.root), "X", self.parts, self.digest)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.root))

    def assert_joined(self, keep_parts: bool = False) -> None:
        assert (self.root / "X").read_bytes() == self.data
        assert self.names() == sorted(["X", *([path for path, _ in self.parts] if keep_parts else [])])
        if keep_parts:
            start = 0
            for path, size in self.parts:
                assert (self.root / path).read_bytes() == self.data[start : start + size]
                start += size

    def state(self) -> dict[str, tuple[int, int, bytes]]:
        return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in self.root.iterdir()}


# --- names and lists --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], {}),
        (["config.json", "L00.part.safetensors", "part01"], {}),
        (["X.part01"], {"X": ("X.part01",)}),
        (["X.part02", "X.part01"], {"X": ("X.part01", "X.part02")}),
        (["X.part00", "X.part01"], {"X": ("X.part00", "X.part01")}),
        ([f"X.part{n}" for n in range(1, 12)], {"X": tuple(f"X.part{n}" for n in range(1, 12))}),
        (["d/X.part1", "Y.part01", "d/X.part2"], {"Y": ("Y.part01",), "d/X": ("d/X.part1", "d/X.part2")}),
        (["X.part01.part01"], {"X.part01": ("X.part01.part01",)}),
        (["X.part01", "X.part01"], {"X": ("X.part01",)}),
    ],
)
def test_group_parts(names: list[str], expected: dict[str, tuple[str, ...]]) -> None:
    assert group_parts(names) == expected


@pytest.mark.parametrize(
    ("names", "messages"),
    [
        (["X.part01", "X.part03"], ["X: found 2 part(s) from X.part01 on, none numbered 2, needed no gap"]),
        (["X.part02", "X.part03"], ["X: found 2 part(s) from X.part02 on, none numbered 1"]),
        (["X.part07"], ["X: found 1 part(s) from X.part07 on, none numbered 1"]),
        (["X.part999999999", "X.part01"], ["none numbered 2"]),
        (["X.part00", "X.part02"], ["none numbered 1"]),
        (["X.part1", "X.part01"], ["X.part1: found the same number as X.part01"]),
        (["X.part"], ["X.part: found the suffix .part, needed"]),
        (["X.partab", "X.part01"], ["X.partab: found the suffix .partab"]),
        (["X.part-1"], ["X.part-1: found the suffix"]),
        (["X.part\u0661"], ["X.part\u0661: found the suffix"]),
        ([".part01"], [".part01: found the suffix"]),
        (["d/.part01"], ["d/.part01: found the suffix"]),
        (["X", "X.part01"], ["X: found both the file and parts of it"]),
        (["d/X.part01", "d/.X.joining"], ["d/.X.joining: found a file of the repository"]),
        (["X.part01", ".X.joining.json"], [".X.joining.json: found a file of the repository"]),
        (["X.part01", "X.part03", "Y.partzz", "Z.part1", "Z.part01"], ["X: ", "Y.partzz: ", "Z.part1: "]),
    ],
)
def test_parts_that_are_no_whole_file_are_named(names: list[str], messages: list[str]) -> None:
    with pytest.raises(JoinError) as raised:
        group_parts(names)
    for message in messages:
        assert message in str(raised.value)
    assert len(raised.value.findings) == len(messages)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (f"{DIGEST}  a\n", {"a": DIGEST}),
        (f"{DIGEST} *d/a b.bin\n\n# made by hand\n{'B' * 64}  c", {"d/a b.bin": DIGEST, "c": "b" * 64}),
        (f"{DIGEST}  ./a\n", {"a": DIGEST}),
        (f"{DIGEST}  a\n{DIGEST}  a\n", {"a": DIGEST}),
        (f"{DIGEST}   a", {" a": DIGEST}),
    ],
)
def test_parse_sha256_manifest(text: str, expected: dict[str, str]) -> None:
    assert parse_sha256_manifest(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"\\{DIGEST}  a\\nb", "line 1: found an escaped file name"),
        (f"{DIGEST}  ../a", "line 1: found unsafe file name '../a'"),
        (f"{DIGEST}  /etc/passwd", "unsafe file name '/etc/passwd'"),
        (f"{DIGEST}  ./../a", "unsafe file name '../a'"),
        (f"{DIGEST}  a\\b", "unsafe file name"),
        (f"{DIGEST}  a\r\n", "unsafe file name 'a\\r'"),
        (f"{DIGEST}  a\x1b[2J", "unsafe file name"),
        (f"{DIGEST[1:]}  a", "line 1: found 'aaa"),
        (f"{DIGEST}\ta", "line 1: found"),
        (f"{DIGEST} a", "line 1: found"),
        (f"SHA256 (a) = {DIGEST}", "line 1: found 'SHA256 (a)"),
        ("<!doctype html>", "line 1: found '<!doctype html>'"),
        (f"{DIGEST}  a\n{'b' * 64}  a", f"line 2: found {'b' * 64} for a, needed {DIGEST}"),
    ],
)
def test_lists_of_digests_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(JoinError) as raised:
        parse_sha256_manifest(text)
    assert message in str(raised.value)


def test_the_list_is_that_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "a b").write_bytes(b"1")
    (tmp_path / "c").write_bytes(b"2")
    for mode in "--text", "--binary":
        done = subprocess.run(
            ["sha256sum", mode, "a b", "c", "./c"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert parse_sha256_manifest(done.stdout) == {
            "a b": hashlib.sha256(b"1").hexdigest(),
            "c": hashlib.sha256(b"2").hexdigest(),
        }


def test_every_bad_line_is_named() -> None:
    with pytest.raises(JoinError) as raised:
        parse_sha256_manifest(f"x\n{DIGEST}  good\n{DIGEST}  ../bad\n")
    assert [finding.path for finding in raised.value.findings] == ["line 1", "line 3"]


# --- the whole way ----------------------------------------------------------------------------------------------------

SIZES = [
    (1,),
    (0,),
    (0, 0),
    (5, 0, 7),
    (0, 9),
    (40 * KIB, 48 * KIB, 48 * KIB, 10 * KIB + 1),
    (1, 100 * KIB, 1),
    (30_001, 2, 30_003, 99, 8 * KIB, 24 * KIB),
]


@pytest.mark.parametrize("keep_parts", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_joins(root: Path, small: None, sizes: tuple[int, ...], keep_parts: bool) -> None:
    case = Case.make(root, *sizes)
    told: list[int] = []
    assert case.join(keep_parts=keep_parts, on_bytes=told.append) == Joined(sum(sizes), case.digest, 0)
    case.assert_joined(keep_parts)
    assert sum(told) == sum(sizes)
    # Again: nothing to do.
    before = case.state()
    case.join(keep_parts=keep_parts)
    assert case.state() == before


def test_joins_at_the_real_sizes_of_windows(tmp_path: Path) -> None:
    case = Case.make(tmp_path, 1_000_000, 5_000_001, 5)
    case.join()
    case.assert_joined()


def test_joins_below_a_folder_and_from_part_00(root: Path) -> None:
    (root / "d").mkdir()
    for number, data in enumerate([b"one", b"two"]):
        (root / f"d/X.part{number:02}").write_bytes(data)
    digest = "sha256:" + hashlib.sha256(b"onetwo").hexdigest()
    join(str(root), "d/X", [("d/X.part00", 3), ("d/X.part01", 3)], digest)
    assert [path.relative_to(root).as_posix() for path in root.rglob("*")] == ["d", "d/X"]
    assert (root / "d/X").read_bytes() == b"onetwo"


def test_the_first_part_is_not_copied_and_nothing_is_read_or_written_twice(
    root: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(root, *SIZES[5])
    inode = (root / "X.part01").stat().st_ino
    counts = {"read": 0, "written": 0}

    def count(kind: str, real: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            done = real(*args)
            counts[kind] += done
            return done

        return call

    monkeypatch.setattr(os, "preadv", count("read", os.preadv))
    monkeypatch.setattr(os, "pwrite", count("written", os.pwrite))
    case.join()
    case.assert_joined()
    assert (root / "X").stat().st_ino == inode
    assert counts == {"read": len(case.data), "written": len(case.data) - case.parts[0][1]}


def test_where_no_holes_can_be_punched(root: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_punch", lambda *args: False)
    case = Case.make(root, *SIZES[5])
    case.join()
    case.assert_joined()


def test_a_target_that_is_right_is_kept_and_the_parts_go(root: Path) -> None:
    case = Case.make(root, 10, 10)
    (root / "X").write_bytes(case.data)
    inode = (root / "X").stat().st_ino
    case.join(keep_parts=True)
    case.assert_joined(keep_parts=True)
    case.join()
    case.assert_joined()
    assert (root / "X").stat().st_ino == inode


@pytest.mark.parametrize("wrong", [b"short", b"x" * 20])
def test_a_target_that_is_wrong_is_replaced(root: Path, wrong: bytes) -> None:
    case = Case.make(root, 10, 10)
    (root / "X").write_bytes(wrong)
    case.join()
    case.assert_joined()


def test_a_target_that_is_wrong_stays_when_parts_are_missing(root: Path) -> None:
    case = Case.make(root, 10, 10)
    (root / "X").write_bytes(b"x" * 20)
    (root / "X.part02").unlink()
    before = case.state()
    with pytest.raises(JoinError) as raised:
        case.join()
    wrong = "sha256:" + hashlib.sha256(b"x" * 20).hexdigest()
    assert [str(finding) for finding in raised.value.findings] == [
        "X.part02: found nothing, needed 10 bytes",
        f"X: found {wrong}, needed {case.digest}",
    ]
    assert case.state() == before


# --- refused before anything changes ----------------------------------------------------------------------------------


def links(path: Path) -> None:
    os.rename(path, path.with_suffix(".else"))
    path.symlink_to(path.with_suffix(".else"))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BREAKAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "symlink": (links, "found a symbolic link, needed a regular file of 30 bytes"),
    "directory": (folder, "found a directory"),
    "pipe": (pipe, "found something that is not a regular file"),
    "short": (lambda path: path.write_bytes(b"1"), "found 1 bytes, needed a regular file of 30 bytes"),
    "long": (lambda path: path.write_bytes(b"1" * 31), "found 31 bytes"),
    "missing": (lambda path: path.unlink(), "found nothing, needed 30 bytes"),
    "hard link": (lambda path: os.link(path, path.with_suffix(".else")), "found a file with 2 names (hard links)"),
}


@pytest.mark.parametrize("part", ["X.part01", "X.part02", "X.part03"])
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_hostile_parts_are_refused(root: Path, breakage: str, part: str) -> None:
    case = Case.make(root, 30, 30, 30)
    spoil, message = BREAKAGES[breakage]
    spoil(root / part)
    before = {path.name: path.lstat() for path in root.iterdir()}
    with pytest.raises(JoinError) as raised:
        case.join()
    assert f"{part}: {message}" in str(raised.value)
    assert "nothing was changed" in str(raised.value)
    after = {path.name: path.lstat() for path in root.iterdir()}
    assert {n: (s.st_ino, s.st_size, s.st_mtime_ns) for n, s in after.items()} == {
        n: (s.st_ino, s.st_size, s.st_mtime_ns) for n, s in before.items()
    }


def test_all_hostile_parts_are_named_at_once(root: Path) -> None:
    case = Case.make(root, 30, 30, 30)
    links(root / "X.part01")
    (root / "X.part02").write_bytes(b"")
    (root / "X").mkdir()
    with pytest.raises(JoinError) as raised:
        case.join()
    assert [finding.path for finding in raised.value.findings] == ["X.part01", "X.part02", "X"]


def test_parts_with_hard_links_can_be_joined_when_they_are_kept(root: Path) -> None:
    case = Case.make(root, 30, 30)
    os.link(root / "X.part01", root / "other")
    case.join(keep_parts=True)
    (root / "other").unlink()
    case.assert_joined(keep_parts=True)


def test_a_target_that_is_a_link_is_refused(root: Path) -> None:
    case = Case.make(root, 30, 30)
    (root / "X").symlink_to("elsewhere")
    with pytest.raises(JoinError, match="X: found something that is not a regular file"):
        case.join()
    assert case.names() == ["X", "X.part01", "X.part02"]


@pytest.mark.parametrize(
    ("target", "parts", "digest", "message"),
    [
        ("X", [], "sha256:" + DIGEST, "no parts"),
        ("X", [("X.part01", 1)], DIGEST, "no usable digest"),
        ("X", [("X.part01", 1)], "git-sha1:" + "0" * 40, "no usable digest"),
        ("../X", [("../X.part01", 1)], "sha256:" + DIGEST, "unsafe file name"),
        ("X", [("/X.part01", 1)], "sha256:" + DIGEST, "unsafe file name"),
        ("X", [("X.part01", -1)], "sha256:" + DIGEST, "impossible size"),
        ("X", [("d/X.part01", 1)], "sha256:" + DIGEST, "found another folder"),
        ("X", [("X", 1)], "sha256:" + DIGEST, "one path twice"),
        ("X", [("a", 1), ("a", 1)], "sha256:" + DIGEST, "one path twice"),
    ],
)
def test_arguments_that_make_no_sense(
    root: Path, target: str, parts: list[tuple[str, int]], digest: str, message: str
) -> None:
    for call in join, pending:
        with pytest.raises(JoinError, match=message):
            call(str(root), target, parts, digest)


# --- the digest is wrong ----------------------------------------------------------------------------------------------


def test_a_wrong_digest_never_gives_the_file_its_name_and_loses_nothing(root: Path, small: None) -> None:
    case = Case.make(root, 40 * KIB, 40 * KIB)
    right, case.digest = case.digest, "sha256:" + DIGEST
    with pytest.raises(DigestMismatch) as raised:
        case.join()
    assert (raised.value.found, raised.value.needed) == (right, case.digest)
    assert f"X: found {right}, needed {case.digest}" in str(raised.value)
    assert case.names() == [GROWING, JOURNAL]
    with pytest.raises(DigestMismatch):
        case.join()
    # The digest was what was wrong.
    case.digest = right
    assert case.pending() == Pending(False, ("X.part01", "X.part02"), None, (), len(case.data), None)
    case.join()
    case.assert_joined()


def test_after_a_wrong_digest_the_parts_can_be_fetched_anew(root: Path) -> None:
    case = Case.make(root, 40, 40)
    (root / "X.part02").write_bytes(b"x" * 40)
    with pytest.raises(DigestMismatch):
        case.join()
    removed = joining.discard(str(root), "X")
    assert [os.path.basename(path) for path in removed] == [GROWING, JOURNAL]
    assert case.names() == []
    assert case.pending().needed == ("X.part01", "X.part02")
    case.write()
    case.join()
    case.assert_joined()


def test_a_wrong_digest_leaves_kept_parts_alone(root: Path) -> None:
    case = Case.make(root, 40, 40)
    before = case.state()
    right, case.digest = case.digest, "sha256:" + DIGEST
    with pytest.raises(DigestMismatch, match="The parts are as they were"):
        case.join(keep_parts=True)
    assert case.state() == before
    case.digest = right
    case.join(keep_parts=True)
    case.assert_joined(keep_parts=True)


# --- dying at every step ----------------------------------------------------------------------------------------------

CHANGES = ("write", "pwrite", "rename", "unlink", "ftruncate", "fsync", "fdatasync")
FINISHED, TOO_MUCH, UNSAFE = 0, 3, 4
real_punch = joining._punch


@dataclass
class Doom:
    """Counts the calls that change the disk, and ends the process at one of them. For a child process only.

    ``mode`` says how: ``before`` the call; ``half`` after it, a write half done; ``power`` as ``half``, and everything
    is lost that was not flushed: bytes beyond the last flush of ``.X.joining`` become rubbish, names are those of the
    last flush of the directory, and what was removed since is there again, with its size and no content.

    On the way it sees to it that no more disk is used than one part, that parts change only for what is safe in
    ``.X.joining`` by a journal that is safe itself.
    """

    case: Case
    at: int
    mode: str
    keep_parts: bool
    allowed: int
    count: int = 0
    real: dict[str, Any] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)
    safe_bytes: int = 0
    safe_names: dict[str, int] = field(default_factory=dict)
    safe_journal: bytes | None = None
    flushed_journal: bytes | None = None
    removed: dict[str, int] = field(default_factory=dict)

    def arm(self) -> None:
        self.real = {name: getattr(os, name) for name in CHANGES}
        self.real["open"], self.real["punch"] = os.open, joining._punch
        for name in (*CHANGES, "open"):
            setattr(os, name, self.wrap(name))
        joining._punch = self.wrap("punch")
        growing = self.case.root / GROWING
        self.safe_bytes = growing.stat().st_size if growing.exists() else 0
        self.directory_flushed()

    def directory_flushed(self) -> None:
        self.safe_names = {entry.name: entry.inode() for entry in os.scandir(self.case.root)}
        journal = self.case.root / JOURNAL
        self.safe_journal = journal.read_bytes() if journal.exists() else None
        self.removed = {}

    def wrap(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not (len(args) > 1 and args[1] & os.O_CREAT):
                return self.real["open"](*args, **options)
            with self.lock:
                self.count += 1
                last = self.count == self.at
                if last and self.mode == "before":
                    self.die()
                if last and name in ("write", "pwrite"):
                    args = (args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                self.look(name, args)
                try:
                    result = self.real[name](*args, **options)
                    self.note(name, args)
                finally:
                    if last:
                        if self.mode == "power":
                            self.cut_power()
                        self.die()
                return result

        return call

    def look(self, name: str, args: tuple[Any, ...]) -> None:
        """What is about to happen must be safe even if all that was not flushed is lost the moment after."""
        taken = None
        start = 0
        for path, size in self.case.parts:
            if name == "unlink" and args[0] == str(self.case.root / path):
                taken, self.removed[path] = start + size, size
            if name == "punch" and os.fstat(args[0]).st_ino == _inode(self.case.root / path):
                taken = start + args[1] + args[2]
            start += size
        if taken is None:
            return
        if self.keep_parts:
            self.end(UNSAFE)
        if "X" in self.safe_names:
            return
        safe = json.loads(self.safe_journal or b'{"joined": -1}')["joined"]
        if not taken <= safe <= self.safe_bytes:
            self.end(UNSAFE)

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        root = self.case.root
        if name in ("fsync", "fdatasync"):
            status = os.fstat(args[0])
            if stat.S_ISDIR(status.st_mode):
                self.directory_flushed()
            elif status.st_ino == _inode(root / GROWING) or status.st_ino == _inode(root / self.case.parts[0][0]):
                self.safe_bytes = status.st_size
            elif status.st_ino == _inode(root / f"{JOURNAL}.tmp"):
                self.flushed_journal = (root / f"{JOURNAL}.tmp").read_bytes()
        if (
            name == "rename"
            and args[1] == str(root / JOURNAL)
            and (root / JOURNAL).read_bytes() != self.flushed_journal
        ):
            self.end(UNSAFE)
        used = disk(root)
        if used > self.allowed:
            self.end(TOO_MUCH)

    def cut_power(self) -> None:
        root = self.case.root
        growing, first = root / GROWING, root / self.case.parts[0][0]
        inodes = {inode: name for name, inode in self.safe_names.items()}
        for name in (GROWING, "X"):
            path = root / name
            known = inodes.get(_inode(path))
            if known is None:
                with suppress(FileNotFoundError):
                    self.real["unlink"](path)
            elif known != name:
                self.real["rename"](path, root / known)
        with suppress(FileNotFoundError), open(growing, "r+b") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(self.safe_bytes)
            stream.write(b"?" * (end - self.safe_bytes))
        for part, size in self.removed.items():
            if part in self.safe_names and not (part == first.name and growing.exists()):
                with open(root / part, "wb") as stream:
                    self.real["ftruncate"](stream.fileno(), size)
        if self.safe_journal is not None:
            (root / JOURNAL).write_bytes(self.safe_journal)
        elif (root / JOURNAL).exists():
            self.real["unlink"](root / JOURNAL)

    def die(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def end(self, status: int) -> NoReturn:
        os._exit(status)


def _inode(path: Path) -> int:
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return -1


def disk(root: Path) -> int:
    """The bytes that the files of a directory take on the disk, the journal left out."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(root) if not entry.name.startswith(JOURNAL))


def run_until(case: Case, at: int, mode: str, keep_parts: bool = False) -> bool:
    """Join in a process that dies at its call number ``at``; whether it came to its end before that."""
    extra = max(size for _, size in case.parts[1:])
    if joining._punch is real_punch:
        extra = min(extra, joining.LIMIT)
    if keep_parts or case.pending().joined > case.parts[0][1] and (case.root / case.parts[0][0]).exists():
        extra = len(case.data)
    whole = sum(-(-size // BLOCK) * BLOCK for _, size in case.parts)
    doom = Doom(case, at, mode, keep_parts, whole + extra + 2 * BLOCK)
    child = os.fork()
    if not child:
        status = 9
        try:
            doom.arm()
            case.join(keep_parts=keep_parts)
            status = FINISHED if "X" in doom.safe_names else UNSAFE
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if os.WIFEXITED(ended):
        assert os.WEXITSTATUS(ended) != TOO_MUCH, f"more than one part of extra disk at call {at}"
        assert os.WEXITSTATUS(ended) != UNSAFE, f"a part is touched before its bytes are safe, at call {at}"
        assert os.WEXITSTATUS(ended) == FINISHED
        return True
    assert os.WTERMSIG(ended) == signal.SIGKILL
    return False


def interrupted(root: Path, keep_parts: bool = False) -> Case:
    """A join that died with the second of three parts half appended."""
    for at in range(15, 1000):
        shutil.rmtree(root)
        root.mkdir()
        case = Case.make(root, 20 * KIB, 40 * KIB, 40 * KIB)
        assert not run_until(case, at, "before", keep_parts)
        if case.pending().partial == "X.part02":
            return case
    raise AssertionError


def assert_told_truly(case: Case) -> None:
    """What pending says can be relied on: with the parts it needs, and no others, the join ends well."""
    found = case.pending()
    assert found.problem is None
    for path in found.needed:
        if path != found.partial:
            start = sum(size for name, size in case.parts if name < path)
            size = dict(case.parts)[path]
            assert (case.root / path).read_bytes() == case.data[start : start + size]
    if not found.complete:
        for path in found.consumed:
            with suppress(FileNotFoundError):
                (case.root / path).unlink()


@pytest.mark.parametrize(
    ("mode", "keep_parts", "holes"),
    [
        ("before", False, True),
        ("half", False, True),
        ("power", False, True),
        ("power", False, False),
        ("power", True, True),
    ],
)
def test_dying_at_any_call_loses_nothing(
    root: Path, small: None, monkeypatch: pytest.MonkeyPatch, mode: str, keep_parts: bool, holes: bool
) -> None:
    if not holes:
        monkeypatch.setattr(joining, "_punch", lambda *args: False)
    for at in range(1, 1000):
        shutil.rmtree(root)
        root.mkdir()
        case = Case.make(root, 20 * KIB, 40 * KIB, 28 * KIB + 1, 5)
        if run_until(case, at, mode, keep_parts):
            case.assert_joined(keep_parts)
            break
        if not case.pending().complete:
            assert not (root / "X").exists()
        if not keep_parts:
            assert_told_truly(case)
        case.join(keep_parts=keep_parts)
        case.assert_joined(keep_parts)
    assert at > 40


@pytest.mark.parametrize("mode", ["before", "half", "power"])
@pytest.mark.parametrize("every", [19, 26, 33])
def test_dying_again_and_again_comes_to_an_end(root: Path, small: None, mode: str, every: int) -> None:
    case = Case.make(root, 20 * KIB, 84 * KIB, 64 * KIB + 1, 5)
    deaths = 0
    while not run_until(case, every, mode):
        deaths += 1
        assert deaths < 60
    assert deaths > 3
    case.assert_joined()


def test_an_interrupted_join_goes_on_where_it_was(root: Path, small: None) -> None:
    case = interrupted(root)
    found = case.pending()
    assert 20 * KIB < found.joined < 60 * KIB
    assert (found.consumed, found.needed) == (("X.part01",), ("X.part02", "X.part03"))
    told: list[int] = []
    assert case.join(on_bytes=told.append).resumed_at == found.joined
    assert sum(told) == len(case.data)
    case.assert_joined()


@pytest.mark.parametrize("first", [False, True])
def test_an_interrupted_join_can_go_on_with_the_other_keep_parts(root: Path, small: None, first: bool) -> None:
    case = interrupted(root, keep_parts=first)
    case.join(keep_parts=not first)
    assert (root / "X").read_bytes() == case.data
    if first:
        case.assert_joined()


def test_an_interrupted_join_can_be_discarded(root: Path, small: None) -> None:
    case = interrupted(root)
    assert {os.path.basename(path) for path in joining.discard(str(root), "X")} >= {"X.part02", GROWING, JOURNAL}
    # What is left is whole, the part that had holes is gone.
    assert case.names() == ["X.part03"]
    case.write()
    case.join()
    case.assert_joined()


def test_a_copy_that_went_on_without_keeping_is_discarded_with_its_parts(root: Path, small: None) -> None:
    case = interrupted(root, keep_parts=True)
    assert not run_until(case, 12, "before")
    assert (root / "X.part02").read_bytes() != case.data[20 * KIB : 60 * KIB]
    joining.discard(str(root), "X")
    assert case.names() == ["X.part03"]


def test_discarding_an_interrupted_copy_leaves_the_parts(root: Path, small: None) -> None:
    case = interrupted(root, keep_parts=True)
    joining.discard(str(root), "X")
    case.join()
    case.assert_joined()


def test_discarding_touches_no_other_folder_and_no_whole_part(root: Path) -> None:
    case = Case.make(root, 10, 10)
    assert joining.discard(str(root), "X") == ()
    (root / "away").mkdir()
    (root / "away/Y.part01").write_bytes(b"1")
    (root / GROWING).write_bytes(b"1234567890")
    parts = [{"path": "away/Y.part01", "size": 5}]
    (root / JOURNAL).write_text(json.dumps({"format": 1, "digest": "", "joined": 10, "consumes": True, "parts": parts}))
    joining.discard(str(root), "X")
    assert (root / "away/Y.part01").exists()
    case.join()


# --- what an interrupted join left is not what it was -----------------------------------------------------------------


def other_parts(case: Case) -> None:
    case.parts[-1] = ("X.part04", case.parts[-1][1])
    (case.root / "X.part03").rename(case.root / "X.part04")


def other_digest(case: Case) -> None:
    case.digest = "sha256:" + DIGEST


LEFT: dict[str, tuple[Callable[[Case], Any], str]] = {
    "other parts": (other_parts, "an interrupted join of other parts"),
    "other digest": (other_digest, "an interrupted join of sha256:"),
    "no journal": (lambda case: (case.root / JOURNAL).unlink(), "without its journal"),
    "half a journal": (lambda case: (case.root / JOURNAL).write_text('{"format'), "journal that cannot be used"),
    "a list": (lambda case: (case.root / JOURNAL).write_text("[]"), "journal that cannot be used"),
    "another format": (lambda case: (case.root / JOURNAL).write_text('{"format": 2}'), "format 2"),
    "cut": (lambda case: os.truncate(case.root / GROWING, 5), "with 5 bytes, needed"),
    "too long": (lambda case: os.truncate(case.root / GROWING, len(case.data) + 1), "bytes, needed"),
    "a link": (lambda case: links(case.root / GROWING), "not a regular file"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_of_something_else_is_refused_and_can_be_discarded(root: Path, small: None, kind: str) -> None:
    case = interrupted(root)
    change, message = LEFT[kind]
    change(case)
    found = case.pending()
    assert found.problem is not None and message in found.problem
    assert found.needed == tuple(path for path, _ in case.parts)
    before = {name: (root / name).lstat().st_mtime_ns for name in case.names()}
    with pytest.raises(JoinError) as raised:
        case.join()
    assert message in str(raised.value)
    assert before == {name: (root / name).lstat().st_mtime_ns for name in case.names()}
    joining.discard(str(root), "X")
    case.digest = "sha256:" + hashlib.sha256(case.data).hexdigest()
    case.write()
    case.join()
    assert (root / "X").read_bytes() == case.data


def test_a_journal_without_a_file_means_nothing_happened(root: Path) -> None:
    case = Case.make(root, 10, 10)
    (root / JOURNAL).write_text("rubbish")
    assert case.pending() == Pending(False, (), None, ("X.part01", "X.part02"), 0, None)
    case.join()
    case.assert_joined()


def test_the_half_part_can_be_fetched_again(root: Path, small: None) -> None:
    case = interrupted(root)
    (root / "X.part02").unlink()
    with pytest.raises(JoinError, match="X.part02: found nothing"):
        case.join()
    (root / "X.part02").write_bytes(case.data[20 * KIB : 60 * KIB])
    case.join()
    case.assert_joined()


def test_pending_of_a_target_that_is_there(root: Path) -> None:
    case = Case.make(root, 10, 10)
    assert case.pending() == Pending(False, (), None, ("X.part01", "X.part02"), 0, None)
    (root / "X").write_bytes(b"x" * 19)
    assert not case.pending().complete
    (root / "X").write_bytes(b"x" * 20)
    assert case.pending() == Pending(True, (), None, (), 20, None)


# --- no room ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ((10,), {}, 0),
        ((1000, 10, 30, 20), {}, 30),
        ((1000, 10, 30, 20), {"punches": True}, 30),
        ((1000, 2**40, 30), {"punches": True}, joining.LIMIT),
        ((1000, 2**40, 30), {}, 2**40),
        ((1000, 2**40, 30), {"joined": 1000 + 2**40}, 30),
        ((1000, 10, 30), {"keep_parts": True}, 1040),
        ((1000, 10, 30), {"keep_parts": True, "joined": 1000}, 40),
    ],
)
def test_room_needed(sizes: tuple[int, ...], options: dict[str, Any], expected: int) -> None:
    parts = [(f"X.part{number}", size) for number, size in enumerate(sizes)]
    assert 0 <= joining.room_needed(parts, **options) - expected <= 2**20


def test_punches_holes(root: Path, tmp_path: Path) -> None:
    assert joining.punches_holes(str(root)) in (True, False)
    assert list(root.iterdir()) == []
    assert joining.punches_holes(str(tmp_path / "none")) is False


@pytest.mark.parametrize("name", ["write", "pwrite", "fsync", "fdatasync", "rename"])
def test_a_full_disk_at_any_call_is_told_and_loses_nothing(
    root: Path, small: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = getattr(os, name)
    for at in range(1, 1000):
        shutil.rmtree(root)
        root.mkdir()
        case = Case.make(root, 20 * KIB, 40 * KIB, 20 * KIB, 5)
        calls = 0

        def fail(*args: Any, at: int = at) -> Any:
            nonlocal calls
            calls += 1
            if calls >= at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        monkeypatch.setattr(os, name, fail)
        try:
            case.join()
        except NoRoom as error:
            assert "is full while X is joined" in str(error) and "make room and run again" in str(error)
        else:
            break
        finally:
            monkeypatch.setattr(os, name, real)
        # A name that could not be flushed is there all the same, and of the right file.
        assert not (root / "X").exists() or (name == "fsync" and (root / "X").read_bytes() == case.data)
        assert_told_truly(case)
        case.join()
        case.assert_joined()
    case.assert_joined()
    assert at > 2


def test_room_is_made_of_the_parts_before_the_disk_counts_as_full(
    root: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.make(root, 20 * KIB, 80 * KIB, 20 * KIB)
    real, offsets = os.pwrite, []

    def fail(descriptor: int, data: bytes, offset: int) -> int:
        offsets.append(offset)
        if len(offsets) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    case.join()
    assert offsets[1] == offsets[2] == 28 * KIB
    case.assert_joined()


def test_other_errors_are_not_swallowed_and_stop_all_writing(
    root: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "CHUNKS", 8)
    case = Case.make(root, 8 * KIB, 80 * KIB, 20 * KIB)
    real, offsets = os.pwrite, []
    failed = threading.Event()

    def fail(descriptor: int, data: bytes, offset: int) -> int:
        offsets.append(offset)
        if len(offsets) == 3:
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, data, offset)

    def hold(count: int) -> None:
        # More is waiting to be written when the error comes, and goes on waiting for a while.
        failed.wait(5)
        time.sleep(0.05)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="Input/output error"):
        case.join(on_bytes=hold)
    assert len(offsets) == 3, "nothing is written where something else should be"
    case.join()
    case.assert_joined()


def test_an_exception_of_the_caller_leaves_a_join_that_can_go_on(root: Path, small: None) -> None:
    case = Case.make(root, 20 * KIB, 80 * KIB, 20 * KIB)
    told = 0

    def stop(count: int) -> None:
        nonlocal told
        told += count
        if told > 60 * KIB:
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        case.join(on_bytes=stop)
    assert threading.active_count() == before
    case.join()
    case.assert_joined()


def test_a_part_that_shrinks_meanwhile_is_told(root: Path, small: None) -> None:
    case = Case.make(root, 20 * KIB, 80 * KIB, 20 * KIB)

    def shrink(count: int) -> None:
        with suppress(FileNotFoundError):
            os.truncate(root / "X.part03", 3)

    with pytest.raises(JoinError, match="X.part03 changed while it was joined: found 3 bytes"):
        case.join(on_bytes=shrink)
    (root / "X.part03").write_bytes(case.data[100 * KIB :])
    case.join()
    case.assert_joined()


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of some megabytes."""
    where = tmp_path / "disk"
    where.mkdir()
    if request.param == "tmpfs":
        argv = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(where)]
    else:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("there is no mkfs.ext4")
        image = tmp_path / "image"
        with open(image, "wb") as stream:
            stream.truncate(8 * 1024 * KIB)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-b", "4096", image], check=True)
        argv = ["mount", "-o", "loop", str(image), str(where)]
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


@pytest.mark.parametrize("holes", [True, False], ids=["holes", "no holes"])
def test_a_disk_that_is_really_full(
    small_disk: Path, small: None, monkeypatch: pytest.MonkeyPatch, holes: bool
) -> None:
    if not holes:
        monkeypatch.setattr(joining, "_punch", lambda *args: False)
    root, filler = small_disk / "files", small_disk / "filler"
    refused = 0
    for blocks in (0, 1, 2, 3, 6, 12):
        root.mkdir()
        case = Case.make(root, 200 * KIB, 300 * KIB, 300 * KIB, 100 * KIB)
        (root / "spare").write_bytes(b"1" * (blocks * BLOCK))
        with suppress(OSError), open(filler, "wb", buffering=0) as stream:
            stream.write(b"1" * free_bytes(root))
            while True:
                stream.write(b"1" * BLOCK)
        for path in (*root.iterdir(), filler):
            weights.flush(str(path))
        (root / "spare").unlink()
        try:
            case.join()
        except NoRoom:
            refused += 1
            assert not (root / "X").exists()
            assert_told_truly(case)
            os.unlink(filler)
            case.join()
        case.assert_joined()
        shutil.rmtree(root)
        with suppress(FileNotFoundError):
            os.unlink(filler)
    assert refused


def test_the_room_that_is_said_to_be_needed_is_enough(small_disk: Path, small: None) -> None:
    root = small_disk / "files"
    root.mkdir()
    case = Case.make(root, 300 * KIB, 200 * KIB, 200 * KIB, 100 * KIB)
    room = joining.room_needed(case.parts, punches=joining.punches_holes(str(root)))
    (small_disk / "filler").write_bytes(b"1" * (free_bytes(root) - room - BLOCK))
    assert free_bytes(root) <= room + BLOCK
    case.join()
    case.assert_joined()
