# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What a weights directory must hold, and whether it does. Private to this collection.

Nothing here talks to a network. A directory is described by a manifest (what the hub lists for one commit) and, once
every file was verified, by a receipt (the manifest plus the modification times seen while verifying). As long as size
and modification time are those of the receipt, a file counts as unchanged and is not read again.

Sizes are in bytes, times in nanoseconds since the epoch. A digest is ``sha256:`` and 64 hexadecimal digits for an LFS
file, ``git-sha1:`` and 40 for a small one: these are the two that the hub states.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
import re
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

RECEIPT_NAME = ".sparkwright-weights.json"
RECEIPT_FORMAT = 1

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|git-sha1:[0-9a-f]{40}")
_READ_BYTES = 8 * 1024 * 1024
# Seconds until a file that grows is looked at again.
_GROW_S = 0.02
# The format's own limit is 100 MB; a longer header is not one.
_SAFETENSORS_HEADER_BYTES = 100_000_000


class ReceiptError(ValueError):
    """The receipt is there and cannot be used."""


@dataclass(frozen=True)
class FileFinding:
    """One thing that is not as it must be: where, what was found, what is needed."""

    path: str
    found: str
    needed: str

    def __str__(self) -> str:
        return f"{self.path}: found {self.found}, needed {self.needed}"

    def as_dict(self) -> dict[str, str]:
        return {"path": self.path, "found": self.found, "needed": self.needed}


@dataclass(frozen=True)
class FileEntry:
    """One file as the hub lists it; ``path`` is relative, with ``/``."""

    path: str
    size: int
    digest: str
    # The repository's files that make this one when they are joined, in order. Empty: it is a file there itself.
    parts: tuple[FileEntry, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for a path that could leave the directory or meet our own files, or a malformed digest."""
        parts = self.path.split("/")
        if (
            any(part in ("", ".", "..") for part in parts)
            or "\\" in self.path
            or "\0" in self.path
            or parts[0] == ".cache"
            or self.path.startswith(RECEIPT_NAME)
        ):
            raise ValueError(f"unsafe file name {self.path!r}")
        if self.size < 0:
            raise ValueError(f"{self.path}: impossible size {self.size}")
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"{self.path}: no usable digest ({self.digest!r})")


@dataclass(frozen=True)
class Manifest:
    """The files of ``repo`` at ``revision`` that match ``include`` (empty: all of them)."""

    repo: str
    revision: str
    include: tuple[str, ...]
    files: tuple[FileEntry, ...]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)

    def answers(self, repo: str, revision: str, include: Iterable[str]) -> bool:
        """Whether this is the manifest of that request, whatever the order of the patterns."""
        return (self.repo, self.revision, set(self.include)) == (repo, revision, set(include))


@dataclass(frozen=True)
class Receipt:
    """A manifest whose files were all verified, with each file's modification time at that moment."""

    manifest: Manifest
    mtimes: dict[FileEntry, int]

    def vouches_for(self, entry: FileEntry, size: int, mtime_ns: int) -> bool:
        """Whether a file of this size and time is the one verified, and was verified to be ``entry``."""
        return size == entry.size and self.mtimes.get(entry) == mtime_ns


@dataclass(frozen=True)
class Checked:
    """What looking at one file gave. ``size`` is 0 and ``mtime_ns`` None where there is no file."""

    entry: FileEntry
    finding: FileFinding | None
    size: int = 0
    mtime_ns: int | None = None


def is_commit(revision: str) -> bool:
    """Whether this is a full commit id, which, unlike a branch or tag, cannot come to mean something else."""
    return _COMMIT.fullmatch(revision) is not None


def is_repo(repo: str) -> bool:
    """Whether this is ``organisation/name``."""
    return _REPO.fullmatch(repo) is not None and ".." not in repo


def select(files: Iterable[FileEntry], include: Sequence[str]) -> tuple[tuple[FileEntry, ...], tuple[str, ...]]:
    """The files that match one of the shell patterns, sorted by path, and the patterns that match none.

    ``*`` also matches ``/``, and ``folder/`` means all below it, as the hub's own client has it. No pattern: all files.
    """
    files = sorted(files, key=lambda entry: entry.path)
    if not include:
        return tuple(files), ()
    matches: dict[str, set[str]] = {}
    for pattern in include:
        glob = f"{pattern}*" if pattern.endswith("/") else pattern
        matches[pattern] = {entry.path for entry in files if fnmatch.fnmatchcase(entry.path, glob)}
    wanted = set().union(*matches.values())
    return (
        tuple(entry for entry in files if entry.path in wanted),
        tuple(pattern for pattern, paths in matches.items() if not paths),
    )


def absent_names(must_exist: Iterable[str], manifest: Manifest, excluded: Iterable[str] = ()) -> list[FileFinding]:
    """A finding for each name in ``must_exist`` that is not among the manifest's files.

    ``excluded`` is what the commit also holds, as far as known: it tells a wrong pattern from a wrong name.
    """
    selected = {entry.path for entry in manifest.files}
    excluded = set(excluded)
    return [
        FileFinding(name, "a file that include leaves out", "a pattern that selects it")
        if name in excluded
        else FileFinding(name, f"no such file in {manifest.repo} at {manifest.revision}", "it, as must_exist names it")
        for name in must_exist
        if name not in selected
    ]


def assemble(files: Iterable[FileEntry], parts: Mapping[str, Sequence[str]], digests: Mapping[str, str]) -> list[Any]:
    """The files as they are after joining: each name in ``parts`` takes the place of the files that make it.

    ``digests`` has the SHA-256 of the joined files, as the repository states it. A file without one is a FileFinding in
    the list.
    """
    by_path = {entry.path: entry for entry in files}
    joined: list[Any] = []
    for target, names in parts.items():
        pieces = tuple(by_path.pop(name) for name in names)
        if target not in digests:
            joined.append(
                FileFinding(target, "no digest in the repository's manifest", "one, to verify the joined file")
            )
            continue
        joined.append(FileEntry(target, sum(piece.size for piece in pieces), f"sha256:{digests[target]}", pieces))
    return sorted([*by_path.values(), *joined], key=lambda item: str(item.path))


def file_digest(
    path: str,
    kind: str,
    size: int,
    on_bytes: Callable[[int], None] | None = None,
    whole: threading.Event | None = None,
) -> str:
    """The digest of a file; ``kind`` is ``sha256`` or ``git-sha1``, ``size`` its bytes. Raises OSError.

    ``on_bytes`` is told how many bytes were read since the last time. What was read leaves the page cache, which on a
    node with one memory for all is the engine's. A file that somebody else appends to is read as it grows until
    ``whole`` is set.
    """
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    buffer = memoryview(bytearray(_READ_BYTES))
    offset = 0
    with open(path, "rb", buffering=0) as stream:
        while True:
            # Before reading: what came until then is read.
            last = whole is None or whole.is_set()
            count = stream.readinto(buffer)
            if not count and whole is not None and not last:
                whole.wait(_GROW_S)
                continue
            if not count:
                return f"{kind}:{digest.hexdigest()}"
            digest.update(buffer[:count])
            if count == _READ_BYTES or offset:  # small files are read again soon, and cost nothing
                release(stream.fileno(), offset, count)
            offset += count
            if on_bytes:
                on_bytes(count)


def release(descriptor: int, offset: int = 0, count: int = 0) -> None:
    """Tell the system that this range of a file (0: to its end) is not needed in memory. Never fails."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)


def leave_memory(path: str) -> None:
    """Tell the system that a file, which is on the disk by now, is not needed in memory. Never fails."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            release(descriptor)
        finally:
            os.close(descriptor)


def safetensors_size(path: str) -> int:
    """The size in bytes that a safetensors file must have by its own header.

    The file is an 8-byte little-endian length, a JSON header of that length, then the tensors, whose last offset the
    header states. Raises ValueError when there is no whole header, OSError when the file cannot be read.
    """
    with open(path, "rb") as stream:
        head = stream.read(8)
        if len(head) < 8:
            raise ValueError(f"{len(head)} bytes, too few for a safetensors header")
        (length,) = struct.unpack("<Q", head)
        if length > _SAFETENSORS_HEADER_BYTES:
            raise ValueError(f"a safetensors header of {length} bytes, more than the format allows")
        header = stream.read(length)
    if len(header) < length:
        raise ValueError(f"{len(header)} of the {length} bytes of the safetensors header")
    try:
        tensors = json.loads(header)
        ends = [int(tensor["data_offsets"][1]) for name, tensor in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError("a safetensors header that cannot be read") from error
    return 8 + int(length) + max(ends, default=0)


def check_file(
    root: str,
    entry: FileEntry,
    receipt: Receipt | None = None,
    rehash: bool = False,
    size_only: bool = False,
    on_bytes: Callable[[int], None] | None = None,
    digest: str | None = None,
) -> Checked:
    """Compare one file below ``root`` with its manifest entry.

    Size first, then the digest, which is left out when the receipt vouches for the file and ``rehash`` is false, or
    when ``size_only`` asks for no more. ``on_bytes`` counts the bytes dealt with. ``digest`` is that of the bytes that
    the file was just written with, where somebody read them meanwhile: then it is not read again.
    A file whose digest is right is still a finding when it is a safetensors file shorter or longer than its header
    says: then the repository itself holds half a file. Raises OSError when an existing file cannot be read.
    """
    path = os.path.join(root, entry.path)
    try:
        # Taken before hashing: a write during hashing leaves a later time, so the next run looks again.
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return Checked(entry, FileFinding(entry.path, "nothing", _amount(entry.size)))
    if not stat.S_ISREG(status.st_mode):
        return Checked(entry, FileFinding(entry.path, "something that is not a regular file", _amount(entry.size)))
    vouched = receipt is not None and receipt.vouches_for(entry, status.st_size, status.st_mtime_ns)
    if (vouched and not rehash) or (size_only and status.st_size == entry.size):
        if on_bytes:
            on_bytes(entry.size)
        return Checked(entry, None, status.st_size, status.st_mtime_ns)

    finding: FileFinding | None = None
    if status.st_size != entry.size:
        found = "a web page of " if _is_web_page(path) else ""
        finding = FileFinding(entry.path, found + _amount(status.st_size), _amount(entry.size))
    else:
        found = digest or file_digest(path, entry.digest.split(":")[0], entry.size, on_bytes)
        if found != entry.digest:
            found += " (a web page)" if _is_web_page(path) else ""
            finding = FileFinding(entry.path, found, entry.digest)
        elif entry.path.endswith(".safetensors"):
            finding = _half_a_file(path, entry)
    return Checked(entry, finding, status.st_size, status.st_mtime_ns)


def _half_a_file(path: str, entry: FileEntry) -> FileFinding | None:
    needed = "a whole safetensors file: the repository's own copy is damaged"
    try:
        promised = safetensors_size(path)
    except ValueError as error:
        return FileFinding(entry.path, str(error), needed)
    if promised == entry.size:
        return None
    return FileFinding(entry.path, f"{_amount(entry.size)} where its header promises {promised}", needed)


def _is_web_page(path: str) -> bool:
    if path.endswith((".html", ".htm")):
        return False
    with open(path, "rb") as stream:
        return stream.read(512).lstrip().lower().startswith((b"<!doctype html", b"<html"))


def _amount(size: int) -> str:
    return "1 byte" if size == 1 else f"{size} bytes"


def parse_receipt(text: str, where: str) -> Receipt:
    """The receipt that this text is. Raises ReceiptError, which names ``where`` it came from."""
    try:
        data: Any = json.loads(text)
        if data["format"] != RECEIPT_FORMAT:
            raise ReceiptError(f"{where} has format {data['format']!r}, this version reads {RECEIPT_FORMAT}")
        manifest = Manifest(
            repo=str(data["repo"]),
            revision=str(data["revision"]),
            include=tuple(str(pattern) for pattern in data["include"]),
            files=tuple(
                FileEntry(
                    str(f["path"]),
                    int(f["size"]),
                    str(f["digest"]),
                    tuple(FileEntry(str(p["path"]), int(p["size"]), str(p["digest"])) for p in f.get("parts", ())),
                )
                for f in data["files"]
            ),
        )
        return Receipt(manifest, {e: int(f["mtime_ns"]) for e, f in zip(manifest.files, data["files"])})
    except ReceiptError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReceiptError(f"{where} cannot be read: {type(error).__name__}: {error}") from error


def read_receipt(root: str) -> Receipt | None:
    """The receipt of this directory, None when there is none. Raises ReceiptError when it cannot be used."""
    path = os.path.join(root, RECEIPT_NAME)
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ReceiptError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return parse_receipt(text, path)


def write_receipt(root: str, receipt: Receipt) -> None:
    """Put the receipt in place in one step, after it is on the disk: a crash leaves the old one or none, never half.

    Raises OSError.
    """
    path = os.path.join(root, RECEIPT_NAME)
    temporary = f"{path}.tmp"
    with suppress(FileNotFoundError):
        # Were it a link, the receipt would be written somewhere else.
        os.unlink(temporary)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(_receipt_text(receipt))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    flush(root)


def receipt_size(receipt: Receipt) -> int:
    """Bytes that the receipt takes."""
    return len(_receipt_text(receipt).encode())


def _receipt_text(receipt: Receipt) -> str:
    manifest = receipt.manifest
    data = {
        "format": RECEIPT_FORMAT,
        "repo": manifest.repo,
        "revision": manifest.revision,
        "include": sorted(manifest.include),
        "files": [
            {
                "path": e.path,
                "size": e.size,
                "digest": e.digest,
                "mtime_ns": receipt.mtimes[e],
                **(
                    {"parts": [{"path": p.path, "size": p.size, "digest": p.digest} for p in e.parts]}
                    if e.parts
                    else {}
                ),
            }
            for e in manifest.files
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def flush(path: str) -> None:
    """Have the operating system write a file's data, or a directory's names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def links_in_the_way(root: str, paths: Iterable[str]) -> list[FileFinding]:
    """A finding for each link by which writing these files below ``root`` would write somewhere else.

    These are links among the folders that lead to a file, and any below ``.cache``, where the client and we keep what
    is on its way. A link in the place of a file itself is harmless: it is replaced.
    """
    cache = os.path.join(root, ".cache")
    suspects = {cache}
    for folder, folders, names in () if os.path.islink(cache) else os.walk(cache):
        suspects.update(os.path.join(folder, name) for name in folders + names)
    for path in paths:
        parts = path.split("/")[:-1]
        suspects.update(os.path.join(root, *parts[: count + 1]) for count in range(len(parts)))
    return [
        FileFinding(
            os.path.relpath(path, root), f"a link to {os.readlink(path)}", "none, so that nothing is written elsewhere"
        )
        for path in sorted(suspects)
        if os.path.islink(path)
    ]


def is_full(error: BaseException) -> bool:
    """Whether this is the error of a file system, or of a quota, that takes no more."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def filled_up(left: int, count: int, free: int, where: str) -> str:
    """The message for a file system that took no more while ``count`` files, ``left`` bytes, were still to come."""
    short = left - free
    amounts = f"{count} file(s) still need {left} bytes, {free} are free now"
    missing = f"; {left} - {free} = {short} bytes ({short / 2**30:.1f} GiB) are missing" if short > 0 else ""
    return f"The file system of {where} is full: {amounts}{missing}. Make room and run again."


def too_small(need: int, freed: int, free: int, where: str, count: int) -> str | None:
    """The message for a file system that cannot take ``count`` files of ``need`` bytes in all, or None.

    ``freed`` is what the files they replace give back, less what joining needs, ``free`` what the file system has (all
    in bytes).
    """
    short = need - freed - free
    if short <= 0:
        return None
    gives, sign = (
        (f"files they replace give back {freed}", "-") if freed >= 0 else (f"joining needs {-freed} more", "+")
    )
    return (
        f"The file system of {where} is too small: {count} file(s) to fetch need {need} bytes, "
        f"{gives}, {free} are free; {need} {sign} {abs(freed)} - {free} = {short} bytes "
        f"({short / 2**30:.1f} GiB) are missing. Nothing was fetched."
    )


def room(runs: Sequence[Mapping[str, Any]], host: str) -> dict[str, list[str]]:
    """What several runs on a host, each as weights_fetch returns it in check mode, ask of the file systems together.

    ``lines`` says for each file system what is to be fetched and what is free, ``problems`` which cannot take it.
    """
    lines, problems = [], []
    for mount in sorted({str(run["filesystem"]) for run in runs}):
        here = [run for run in runs if run["filesystem"] == mount]
        files, size = sum(len(run["fetched"]) for run in here), sum(int(run["fetch_bytes"]) for run in here)
        needs, free = [int(run["need_bytes"]) for run in here], int(here[0]["free_bytes"])
        lines.append(
            f"{host}: {mount}: {files} file(s) to fetch, {size} bytes ({size / 2**30:.1f} GiB); at most {sum(needs)} "
            f"bytes more are needed, {free} ({free / 2**30:.1f} GiB) are free"
        )
        short = sum(needs) - free
        if short > 0:
            names = ", ".join(str(run["path"]) for run in here)
            problems.append(
                f"{host}: the file system {mount} is too small for {names}: {' + '.join(map(str, needs))} - {free} = "
                f"{short} bytes ({short / 2**30:.1f} GiB) are missing"
            )
    return {"lines": lines, "problems": problems}


def explain_status(
    status: int, code: str, said: str, *, repo: str, revision: str, endpoint: str, path: str, has_token: bool
) -> tuple[str, bool]:
    """What an error answer of the hub means and what to do, and whether it concerns the whole repository.

    ``code`` and ``said`` are the hub's X-Error-Code and X-Error-Message headers, which may be empty.
    """
    page = f"{endpoint}/{repo}"
    quoted = f" (the hub says: {said[:200]})" if said else ""
    if code == "RevisionNotFound":
        return f"{repo} has no commit {revision} at {endpoint}: correct the revision{quoted}", True
    if code == "EntryNotFound":
        return f"no such file at {endpoint}{quoted}", False
    if code == "GatedRepo" and status == 401 and not has_token:
        return f"{repo} is gated and no token was given: accept its terms at {page}, then set token{quoted}", True
    if code == "GatedRepo" and status == 403:
        return (
            f"The token is valid but its account has no access to {repo}: accept the terms at {page} "
            f"with that account, and let a fine-grained token read gated repositories{quoted}",
            True,
        )
    if status == 401 and has_token and code != "RepoNotFound":
        return f"The hub refuses the token (401): it is wrong, expired or revoked; create a new one{quoted}", True
    if code == "RepoNotFound" or status == 401 or (status == 404 and not path):
        hint = "or the token's account may not see it" if has_token else "or it is private and needs a token"
        return f"There is no repository {repo} at {endpoint}, {hint}{quoted}", True
    if status == 403:
        return f"The hub forbids access to {repo} (403){quoted}", True
    if status == 429:
        return f"The hub allows no more requests for now (429): wait, or lower workers, and run again{quoted}", True
    return f"The hub answers {status}{quoted}", False
