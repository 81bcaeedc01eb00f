# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""A directory with only the Engram tensors of a checkpoint, made of hard links. Private to this collection.

Engines that read the Engram tables from the published safetensors files want a directory whose index names these
tables and nothing else. ``plan_slim`` finds out what such a directory takes and what is there already, ``apply`` does
it.

The directory holds hard links of the shards with the tensors, ``config.json``, and ``model.safetensors.index.json``,
whose ``metadata`` has a marker: ``{"sparkwright": {"slim": [suffixes], "source_revision": revision}}``. Each file is
built aside and put in place in one step, the index last and taken away first, so that an index is never there without
its shards. While something changes, ``.sparkwright-slim.json`` names the files that are ours, and a run that finds it
goes on with them. Files that neither it nor the marker of the index speaks for are never touched.

Sizes are in bytes. Nothing here talks to a network.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ansible_collections.sparkwright.dsv41.plugins.module_utils.weights import (
    FileEntry,
    FileFinding,
    flush,
    is_full,
    leave_memory,
)

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
STATE_NAME = ".sparkwright-slim.json"
SUFFIXES = (".engram.embed.weight", ".engram.embed.scale")

_STATE_FORMAT = 1
_NO_DIGEST = "sha256:" + "0" * 64
# The format's own limit is 100 MB; a longer header is not one.
_HEADER_BYTES = 100_000_000


class SlimError(Exception):
    """The directory cannot be made; ``findings`` has every reason."""

    def __init__(self, message: str, findings: Sequence[FileFinding] = ()) -> None:
        super().__init__(message + "".join(f"\n  {finding}" for finding in findings))
        self.findings = tuple(findings)


@dataclass(frozen=True)
class SlimPlan:
    """What ``dest`` must hold, and what of that is not there yet.

    ``shards`` are the names to have, ``size`` their bytes together and ``tensors`` what the index names. ``link``,
    ``write`` and ``remove`` are what ``apply`` has to do: shards to put in place, other files to write, files of ours
    that are no longer part of it. ``gone`` are the names of shards that are no longer part of it, also of those that an
    interrupted run removed. ``copy_bytes`` is the room that copies take. ``before`` and ``after`` are for people.
    """

    source: str
    dest: str
    copy: bool
    shards: tuple[str, ...]
    tensors: tuple[str, ...]
    size: int
    index: bytes
    config: bytes
    link: tuple[str, ...]
    write: tuple[str, ...]
    remove: tuple[str, ...]
    gone: tuple[str, ...]
    unfinished: bool
    copy_bytes: int
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def changed(self) -> bool:
        """Whether ``apply`` has something to do."""
        return bool(self.link or self.write or self.remove or self.unfinished)


@dataclass(frozen=True)
class _Wanted:
    """What the source says: the tensors by name with their shard, and the size of each shard."""

    weight_map: dict[str, str]
    shards: dict[str, os.stat_result]
    index: bytes
    config: bytes


def plan_slim(
    source: str,
    dest: str,
    suffixes: Sequence[str] = SUFFIXES,
    revision: str | None = None,
    copy: bool = False,
) -> SlimPlan:
    """Find out what it takes to have in ``dest`` the tensors of ``source`` whose names end with one of the suffixes.

    Every layer (what is before the suffix) must have a tensor for each suffix, and all of them in one shard.
    ``revision`` goes into the marker. With ``copy`` shards are copied, which takes their size again. Changes nothing.
    Raises SlimError with all that is wrong with source and destination, OSError when one cannot be read.
    """
    suffixes = tuple(suffixes)
    if not suffixes or not all(suffixes) or len(set(suffixes)) != len(suffixes):
        raise SlimError(f"suffixes must be different and not empty, not {list(suffixes)!r}")
    if os.path.realpath(source) == os.path.realpath(dest):
        raise SlimError(f"source and dest are the same directory, {source}: the index there would be lost")
    findings: list[FileFinding] = []
    wanted = _read_source(source, suffixes, revision, findings)
    if wanted is None:
        raise SlimError(f"{source} cannot be the source of Engram tables:", findings)

    ours, old_index, unfinished, problems = _read_dest(dest)
    findings += problems
    link = tuple(
        name for name, status in wanted.shards.items() if not _in_place(os.path.join(dest, name), status, copy)
    )
    content = {CONFIG_NAME: wanted.config, INDEX_NAME: wanted.index}
    write = tuple(name for name, data in content.items() if _content(os.path.join(dest, name)) != data)
    for name in [*link, *write]:
        path = os.path.join(dest, name)
        if not os.path.lexists(path) or any(finding.path == path for finding in problems):
            continue
        if not stat.S_ISREG(os.lstat(path).st_mode):
            findings.append(FileFinding(path, "something that is not a regular file", "nothing, or a file of ours"))
        elif name not in ours:
            needed = "nothing, or a directory that was made so before"
            findings.append(FileFinding(path, "a file that is not ours", needed))
    kept = {*wanted.shards, *content}
    gone = sorted(ours - kept)
    stale = gone + [_aside(name) for name in sorted(ours | kept | {STATE_NAME})]
    remove = tuple(name for name in stale if os.path.lexists(os.path.join(dest, name)))
    copy_bytes = sum(wanted.shards[name].st_size for name in link) if copy else 0
    findings += _where_to(source, dest, {name: wanted.shards[name] for name in link}, copy_bytes, copy)
    if findings:
        raise SlimError(f"{dest} cannot be made of {source}, nothing was changed:", findings)

    after = {"index": json.loads(wanted.index), "shards": {name: s.st_size for name, s in wanted.shards.items()}}
    there = {name: os.path.join(dest, name) for name in sorted(ours | set(wanted.shards)) if name not in content}
    sizes = {name: os.lstat(path).st_size for name, path in there.items() if os.path.lexists(path)}
    return SlimPlan(
        source=source,
        dest=dest,
        copy=copy,
        shards=tuple(wanted.shards),
        tensors=tuple(wanted.weight_map),
        size=sum(status.st_size for status in wanted.shards.values()),
        index=wanted.index,
        config=wanted.config,
        link=link,
        write=write,
        remove=remove,
        gone=tuple(gone),
        unfinished=unfinished,
        copy_bytes=copy_bytes,
        before={"index": old_index, "shards": sizes},
        after=after,
    )


def apply(plan: SlimPlan) -> None:
    """Do what the plan says. Killed at any point, a new plan and its ``apply`` come to the same end.

    Raises SlimError when a hard link is refused or the disk is full, OSError.
    """
    if not plan.changed:
        return
    os.makedirs(plan.dest, exist_ok=True)
    dest = plan.dest
    state = {
        "format": _STATE_FORMAT,
        "files": sorted({*plan.shards, *plan.remove, *plan.gone, CONFIG_NAME, INDEX_NAME}),
    }
    try:
        _put(dest, STATE_NAME, (json.dumps(state) + "\n").encode())
        if plan.link or plan.remove:
            _remove(os.path.join(dest, INDEX_NAME))
            flush(dest)
        for name in plan.remove:
            _remove(os.path.join(dest, name))
        _remove_empty_folders(dest, plan.gone)
        for name in plan.link:
            _put_shard(plan, name)
        # The index also when it was right: it may have been taken away.
        for name, data in ((CONFIG_NAME, plan.config), (INDEX_NAME, plan.index)):
            if _content(os.path.join(dest, name)) != data:
                _put(dest, name, data)
    except OSError as error:
        if not is_full(error):
            raise
        raise SlimError(
            f"The file system of {dest} ({_file_system(dest)}) is full ({error.strerror}): found "
            f"{shutil.disk_usage(dest).free} bytes free, needed {plan.copy_bytes}. Make room and run again."
        ) from error
    _remove(os.path.join(dest, STATE_NAME))
    flush(dest)


# The source


def _read_source(
    source: str, suffixes: tuple[str, ...], revision: str | None, findings: list[FileFinding]
) -> _Wanted | None:
    """What the source holds, None when something is wrong with it, which then is in ``findings``."""
    config = _read_json(source, CONFIG_NAME, findings)
    index = _read_json(source, INDEX_NAME, findings)
    if index is None:
        return None
    name = INDEX_NAME
    weight_map, metadata = index[1].get("weight_map"), index[1].get("metadata", {})
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        findings.append(FileFinding(name, "no usable weight_map", "an object of tensor names and shards"))
        return None
    if not isinstance(metadata, dict):
        findings.append(FileFinding(name, "metadata that is not an object", "an object"))
        return None
    unsafe = {shard for shard in weight_map.values() if not _is_safe(shard)}
    findings += [FileFinding(name, f"unsafe shard name {shard!r}", "a name below the directory") for shard in unsafe]
    chosen = {tensor: weight_map[tensor] for tensor in sorted(weight_map) if tensor.endswith(suffixes)}
    if not chosen:
        findings.append(FileFinding(name, f"no tensor that ends with {' or '.join(suffixes)}", "one at least"))
    findings += _scattered(chosen, suffixes)

    shards: dict[str, os.stat_result] = {}
    total = 0
    for shard in sorted(set(chosen.values()) - unsafe):
        tensors = [tensor for tensor, where in chosen.items() if where == shard]
        status, size = _read_shard(source, shard, tensors, findings)
        if status is not None:
            shards[shard] = status
            total += size
    if findings or config is None:
        return None
    marker = {"slim": list(suffixes), "source_revision": revision}
    metadata = {**metadata, "sparkwright": marker}
    if "total_size" in metadata:
        metadata["total_size"] = total
    text = json.dumps({"metadata": metadata, "weight_map": chosen}, indent=2) + "\n"
    return _Wanted(chosen, shards, text.encode(), config[0])


def _scattered(chosen: dict[str, str], suffixes: tuple[str, ...]) -> list[FileFinding]:
    """A finding for each layer that lacks a tensor, or has its tensors in several shards."""
    layers: dict[str, dict[str, str]] = {}
    for tensor, shard in chosen.items():
        # The longest: a suffix may be the end of another one.
        suffix = max((suffix for suffix in suffixes if tensor.endswith(suffix)), key=len)
        layers.setdefault(tensor[: -len(suffix)], {})[suffix] = shard
    findings = []
    for layer, found in sorted(layers.items()):
        lacking = [suffix for suffix in suffixes if suffix not in found]
        if lacking:
            findings.append(FileFinding(INDEX_NAME, f"{layer} without {', '.join(lacking)}", "all of its tensors"))
        if len(set(found.values())) > 1:
            where = ", ".join(f"{layer}{suffix} in {shard}" for suffix, shard in sorted(found.items()))
            findings.append(FileFinding(INDEX_NAME, where, "all tensors of a layer in one shard"))
    return findings


def _read_shard(
    source: str, shard: str, tensors: Iterable[str], findings: list[FileFinding]
) -> tuple[os.stat_result | None, int]:
    """The status of a shard and the size of these tensors in it, by its header; None when something is wrong."""
    path = os.path.join(source, shard)
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        findings.append(FileFinding(shard, "nothing", "a shard, as the index names it"))
        return None, 0
    if not stat.S_ISREG(status.st_mode):
        found = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "something that is not a regular file"
        findings.append(FileFinding(shard, found, "a regular file, which a hard link can be made of"))
        return None, 0
    try:
        data_start, header = _read_header(path)
        offsets = {tensor: _offsets(header, tensor) for tensor in header if tensor != "__metadata__"}
    except ValueError as error:
        findings.append(FileFinding(shard, str(error), "a safetensors file"))
        return None, 0
    promised = data_start + max((end for _, end in offsets.values()), default=0)
    if promised != status.st_size:
        findings.append(FileFinding(shard, f"{status.st_size} bytes", f"{promised}, as its header promises"))
    absent = [tensor for tensor in tensors if tensor not in offsets]
    findings += [FileFinding(shard, f"no tensor {tensor}", "it, as the index says it is there") for tensor in absent]
    return status, sum(offsets[tensor][1] - offsets[tensor][0] for tensor in tensors if tensor in offsets)


def _read_header(path: str) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begins, and its header. Raises ValueError, OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
        head = stream.read(8)
        if len(head) < 8:
            raise ValueError(f"{len(head)} bytes, too few for a safetensors header")
        (length,) = struct.unpack("<Q", head)
        if length > _HEADER_BYTES:
            raise ValueError(f"a safetensors header of {length} bytes, more than the format allows")
        text = stream.read(length)
    if len(text) < length:
        raise ValueError(f"{len(text)} of the {length} bytes of the safetensors header")
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError("a safetensors header that is not JSON") from error
    if not isinstance(header, dict):
        raise ValueError("a safetensors header that is not an object")
    return 8 + int(length), header


def _offsets(header: dict[str, Any], tensor: str) -> tuple[int, int]:
    """Where the tensor is, from the beginning of the data. Raises ValueError."""
    try:
        start, end = header[tensor]["data_offsets"]
        if 0 <= start <= end:
            return int(start), int(end)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a safetensors header that does not say where {tensor} is") from error
    raise ValueError(f"a safetensors header with {tensor} from {start} to {end}")


def _read_json(folder: str, name: str, findings: list[FileFinding]) -> tuple[bytes, dict[str, Any]] | None:
    """A file that must be a JSON object; what is wrong with it goes into ``findings``."""
    try:
        with open(os.path.join(folder, name), "rb") as stream:
            data = stream.read()
        value = json.loads(data)
    except (FileNotFoundError, NotADirectoryError):
        findings.append(FileFinding(name, "nothing", "a file with a JSON object"))
        return None
    except IsADirectoryError:
        findings.append(FileFinding(name, "a directory", "a file with a JSON object"))
        return None
    except (ValueError, RecursionError) as error:
        findings.append(FileFinding(name, f"{len(data)} bytes that are not JSON ({error})", "a whole JSON object"))
        return None
    if not isinstance(value, dict):
        findings.append(FileFinding(name, "JSON that is not an object", "a JSON object"))
        return None
    return data, value


# The destination


def _read_dest(dest: str) -> tuple[set[str], dict[str, Any] | None, bool, list[FileFinding]]:
    """The names of our files in ``dest``, the index there, whether a run was interrupted, and what is in the way."""
    if os.path.lexists(dest) and not os.path.isdir(dest):
        return set(), None, False, [FileFinding(dest, "something that is not a directory", "a directory, or nothing")]
    ours: set[str] = set()
    index = _json_or_none(os.path.join(dest, INDEX_NAME))
    weight_map, metadata = (index or {}).get("weight_map"), (index or {}).get("metadata")
    if (
        isinstance(metadata, dict)
        and isinstance(metadata.get("sparkwright"), dict)
        and "slim" in metadata["sparkwright"]
        and isinstance(weight_map, dict)
        and _are_names(list(weight_map.values()))
    ):
        ours |= {INDEX_NAME, CONFIG_NAME, *weight_map.values()}
    unfinished = os.path.lexists(os.path.join(dest, STATE_NAME))
    state = _json_or_none(os.path.join(dest, STATE_NAME))
    if state is not None and state.get("format") == _STATE_FORMAT and _are_names(state.get("files")):
        ours |= set(state["files"])
    return {name for name in ours if name in (INDEX_NAME, CONFIG_NAME) or _is_safe(name)}, index, unfinished, []


def _in_place(path: str, source: os.stat_result, copy: bool) -> bool:
    """Whether a file is the shard: the same inode or, for copies, a file with its size and modification time."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if os.path.samestat(status, source):
        return True
    same = (status.st_size, status.st_mtime_ns) == (source.st_size, source.st_mtime_ns)
    return copy and same and stat.S_ISREG(status.st_mode)


def _where_to(
    source: str, dest: str, link: dict[str, os.stat_result], copy_bytes: int, copy: bool
) -> list[FileFinding]:
    """What keeps these shards from being linked or copied, as far as that can be known before."""
    parent = dest
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent) or os.curdir
    if copy:
        free = shutil.disk_usage(parent).free
        where = f"{free} bytes free on the file system of {dest} ({_file_system(parent)})"
        return [FileFinding(dest, where, f"{copy_bytes} bytes for copies")] if free < copy_bytes else []
    device = os.stat(parent).st_dev
    return [
        _other_file_system(name, os.path.join(source, name), parent)
        for name, status in link.items()
        if status.st_dev != device
    ]


def _other_file_system(name: str, source: str, dest: str) -> FileFinding:
    return FileFinding(
        name,
        f"{source} on {_file_system(source)}, and {dest} on {_file_system(dest)}",
        "both on one file system, where hard links can be made; or copies (copy)",
    )


def _file_system(path: str) -> str:
    """The mount point a path is on, with type and device where the kernel tells."""
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as stream:
        for line in reversed(stream.readlines()):
            device, where, kind = line.split()[:3]
            if where.replace("\\040", " ") == path:
                return f"{path}, {kind}, {device}"
    return path


def _put_shard(plan: SlimPlan, name: str) -> None:
    """Link or copy one shard beside its place, then put it there."""
    source, target = os.path.join(plan.source, name), os.path.join(plan.dest, name)
    aside = os.path.join(plan.dest, _aside(name))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if plan.copy:
        try:
            shutil.copyfile(source, aside, follow_symlinks=False)
            shutil.copystat(source, aside, follow_symlinks=False)
            flush(aside)
            for path in (source, aside):
                leave_memory(path)
        except OSError:
            _remove(aside)
            raise
    else:
        try:
            os.link(source, aside, follow_symlinks=False)
        except OSError as error:
            if error.errno == errno.EXDEV:
                finding = _other_file_system(name, source, plan.dest)
            elif error.errno in (errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP):
                found = f"no hard link of {source}: {error.strerror} ({_file_system(source)})"
                finding = FileFinding(name, found, "a file that this user may link, or copies (copy)")
            else:
                raise
            raise SlimError(f"{plan.dest} cannot be made of {plan.source}:", [finding]) from error
    os.rename(aside, target)
    flush(os.path.dirname(target))


def _remove_empty_folders(dest: str, names: Iterable[str]) -> None:
    """Remove the folders below ``dest`` that led to these files and hold nothing any more, the innermost first."""
    folders: set[str] = set()
    for name in names:
        parts = name.split("/")[:-1]
        folders.update("/".join(parts[: count + 1]) for count in range(len(parts)))
    for folder in sorted(folders, key=len, reverse=True):
        path = os.path.join(os.path.realpath(dest), folder)
        # Through a link it would be a folder somewhere else.
        if os.path.realpath(path) == path:
            with suppress(OSError):
                os.rmdir(path)
                flush(os.path.dirname(path))


def _put(folder: str, name: str, data: bytes) -> None:
    """Write a file beside its place, and put it there when it is on the disk."""
    aside = os.path.join(folder, _aside(name))
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(aside, os.path.join(folder, name))
    flush(folder)


def _aside(name: str) -> str:
    folder, base = os.path.split(name)
    return os.path.join(folder, f".{base}.sparkwright-new")


def _content(path: str) -> bytes | None:
    """The bytes of a small regular file, None where there is none."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        with open(path, "rb") as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _json_or_none(path: str) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        value = json.loads(_content(path) or b"")
        return value if isinstance(value, dict) else None
    return None


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_safe(name: str) -> bool:
    try:
        FileEntry(name, 0, _NO_DIGEST)
    except ValueError:
        return False
    return name not in (INDEX_NAME, CONFIG_NAME, STATE_NAME)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)
