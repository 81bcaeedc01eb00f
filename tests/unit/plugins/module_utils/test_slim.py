# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The directory with only the Engram tables: what it takes, hostile sources, and a death at every step."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import slim
from ansible_collections.sparkwright.dsv41.plugins.module_utils.slim import (
    CONFIG_NAME,
    INDEX_NAME,
    STATE_NAME,
    SUFFIXES,
    SlimError,
    SlimPlan,
    plan_slim,
)

REVISION = "0123456789abcdef0123456789abcdef01234567"
TABLES = {
    "model-3.safetensors": {"layers.1.engram.embed.weight": 256, "layers.1.engram.embed.scale": 8},
    "model-4.safetensors": {"layers.14.engram.embed.weight": 512, "layers.14.engram.embed.scale": 16},
}
SHARDS = {
    "model-1.safetensors": {"embed.weight": 40, "layers.1.engram.wkv.weight": 30},
    "model-2.safetensors": {"layers.0.attn.scale": 20, "layers.1.engram.embed.weight_extra": 7},
    **TABLES,
}
KEPT = {name: shard for shard, tensors in TABLES.items() for name in tensors}


def shard_bytes(tensors: dict[str, int]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + os.urandom(start)


def write_index(source: Path, weight_map: dict[str, Any], **metadata: Any) -> None:
    (source / INDEX_NAME).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of four shards, two of them with the tables of a layer each."""
    source = tmp_path / "model"
    source.mkdir()
    for name, tensors in SHARDS.items():
        (source / name).write_bytes(shard_bytes(tensors))
    weight_map = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}
    write_index(source, weight_map, total_size=10**6, note="kept")
    (source / CONFIG_NAME).write_bytes(b'{"engram_layer_ids": [1, 14]}\n')
    return source


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "slim"


def make(source: Path, dest: Path, **options: Any) -> SlimPlan:
    plan = plan_slim(str(source), str(dest), revision=REVISION, **options)
    slim.apply(plan)
    return plan


def state(root: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        path.relative_to(root).as_posix(): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file()
    }


def assert_made(source: Path, dest: Path, linked: bool = True) -> None:
    assert sorted(os.listdir(dest)) == sorted([CONFIG_NAME, INDEX_NAME, *TABLES])
    assert (dest / CONFIG_NAME).read_bytes() == (source / CONFIG_NAME).read_bytes()
    for name in TABLES:
        assert (dest / name).samefile(source / name) is linked
        assert (dest / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((dest / INDEX_NAME).read_text()) == {
        "metadata": {
            "total_size": 256 + 8 + 512 + 16,
            "note": "kept",
            "sparkwright": {"slim": list(SUFFIXES), "source_revision": REVISION},
        },
        "weight_map": KEPT,
    }


# --- making it --------------------------------------------------------------------------------------------------------


def test_makes_it_and_changes_nothing_the_second_time(source: Path, dest: Path) -> None:
    before = state(source)
    plan = plan_slim(str(source), str(dest), revision=REVISION)
    assert not dest.exists()
    assert plan.changed and (plan.link, plan.write, plan.remove) == (tuple(TABLES), (CONFIG_NAME, INDEX_NAME), ())
    assert plan.tensors == tuple(sorted(KEPT))
    assert plan.size == sum((source / name).stat().st_size for name in TABLES)
    assert plan.copy_bytes == 0
    assert plan.before == {"index": None, "shards": {}}
    slim.apply(plan)
    assert_made(source, dest)
    assert state(source) == before
    made = state(dest)
    again = make(source, dest)
    assert not again.changed and again.before == again.after == plan.after
    assert state(dest) == made


def test_a_copy_changes_nothing_the_second_time(source: Path, dest: Path) -> None:
    plan = make(source, dest, copy=True)
    assert plan.copy_bytes == plan.size
    assert_made(source, dest, linked=False)
    made = state(dest)
    assert not make(source, dest, copy=True).changed
    assert state(dest) == made
    # A copy of other content, as far as size and time tell.
    os.utime(dest / "model-3.safetensors", ns=(0, 0))
    assert make(source, dest, copy=True).link == ("model-3.safetensors",)
    # Links can be made after all: they take no room.
    assert make(source, dest).link == tuple(TABLES)
    assert_made(source, dest)
    assert not make(source, dest, copy=True).changed, "a link is as good as a copy"


def test_metadata_without_a_total_size_gets_none(source: Path, dest: Path) -> None:
    index = json.loads((source / INDEX_NAME).read_text())
    del index["metadata"]
    (source / INDEX_NAME).write_text(json.dumps(index))
    make(source, dest)
    marker = {"sparkwright": {"slim": list(SUFFIXES), "source_revision": REVISION}}
    assert json.loads((dest / INDEX_NAME).read_text())["metadata"] == marker


def test_shards_in_folders(source: Path, dest: Path) -> None:
    (source / "deep").mkdir()
    (source / "model-3.safetensors").rename(source / "deep/model-3.safetensors")
    text = (source / INDEX_NAME).read_text().replace('"model-3', '"deep/model-3')
    (source / INDEX_NAME).write_text(text)
    make(source, dest)
    assert (dest / "deep/model-3.safetensors").samefile(source / "deep/model-3.safetensors")
    assert not make(source, dest).changed


def in_folders(source: Path) -> Path:
    """A source whose shards are in folders: both tables in one, model-2 elsewhere."""
    text = (source / INDEX_NAME).read_text()
    for name, folder in (("model-2", "other"), ("model-3", "deep/er"), ("model-4", "deep")):
        (source / folder).mkdir(parents=True, exist_ok=True)
        (source / f"{name}.safetensors").rename(source / folder / f"{name}.safetensors")
        text = text.replace(f'"{name}', f'"{folder}/{name}')
    (source / INDEX_NAME).write_text(text)
    return source


@pytest.mark.parametrize("copy", [False, True])
def test_folders_that_became_empty_go(source: Path, dest: Path, tmp_path: Path, copy: bool) -> None:
    make(in_folders(source), dest, copy=copy)
    make(source, dest, suffixes=["embed.weight_extra"], copy=copy)
    assert sorted(os.listdir(dest)) == sorted([CONFIG_NAME, INDEX_NAME, "other"])
    make(source, dest, copy=copy)
    (dest / "deep/mine").write_text("x")
    make(source, dest, suffixes=["embed.weight_extra"], copy=copy)
    assert sorted(path.name for path in (dest / "deep").iterdir()) == ["mine"], "what others put there stays"


def test_folders_elsewhere_stay(source: Path, dest: Path, tmp_path: Path) -> None:
    make(in_folders(source), dest)
    shutil.rmtree(dest / "deep")
    (tmp_path / "elsewhere/er").mkdir(parents=True)
    (dest / "deep").symlink_to(tmp_path / "elsewhere")
    make(source, dest, suffixes=["embed.weight_extra"])
    assert (tmp_path / "elsewhere/er").is_dir() and (dest / "deep").is_symlink()


@pytest.mark.skipif(not shutil.which("fincore"), reason="NOT TESTED: what is in the page cache needs fincore")
def test_copies_leave_the_page_cache(source: Path, dest: Path) -> None:
    def resident() -> int:
        paths = [path for folder in (source, dest) for path in folder.glob("model-[34].*")]
        done = subprocess.run(["fincore", "-bno", "RES", *paths], capture_output=True, text=True, check=True)
        return sum(map(int, done.stdout.split()))

    for name in TABLES:
        with (source / name).open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident():
        pytest.skip("NOT TESTED: the file system of temporary files is memory")
    make(source, dest, copy=True)
    assert resident() == 0


def test_other_suffixes_and_what_is_no_longer_part_of_it_goes(source: Path, dest: Path) -> None:
    make(source, dest)
    (dest / "mine").write_text("x")
    plan = make(source, dest, suffixes=["embed.weight_extra"])
    assert (plan.link, plan.remove) == (("model-2.safetensors",), tuple(TABLES))
    assert sorted(os.listdir(dest)) == sorted([CONFIG_NAME, "mine", "model-2.safetensors", INDEX_NAME])
    assert (source / "model-3.safetensors").exists()


def test_a_suffix_may_be_the_end_of_another(source: Path, dest: Path) -> None:
    suffixes = [".embed.weight", ".engram.embed.weight"]
    with pytest.raises(SlimError, match="layers.1 without .embed.weight"):
        plan_slim(str(source), str(dest), suffixes)


def test_a_changed_source_is_followed(source: Path, dest: Path) -> None:
    make(source, dest)
    (source / "new").write_bytes(shard_bytes(TABLES["model-3.safetensors"]))
    os.replace(source / "new", source / "model-3.safetensors")
    (source / CONFIG_NAME).write_text("{}")
    plan = plan_slim(str(source), str(dest), revision="other")
    assert (plan.link, plan.write) == (("model-3.safetensors",), (CONFIG_NAME, INDEX_NAME))
    assert plan.before["index"]["metadata"]["sparkwright"]["source_revision"] == REVISION
    make(source, dest)
    assert_made(source, dest)


# --- sources that are refused -----------------------------------------------------------------------------------------

Spoil = Callable[[Path], Any]


def edit(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(source: Path) -> None:
        index = json.loads((source / INDEX_NAME).read_text())
        change(index)
        (source / INDEX_NAME).write_text(json.dumps(index))

    return spoil


def named(tensor: str, shard: Any) -> Spoil:
    return edit(lambda index: index["weight_map"].update({tensor: shard}))


def replace(name: str, data: bytes) -> Spoil:
    return lambda source: (source / name).write_bytes(data)


def cut(name: str) -> Spoil:
    return lambda source: os.truncate(source / name, (source / name).stat().st_size - 1)


def link(source: Path) -> None:
    (source / "model-3.safetensors").rename(source / "blob")
    (source / "model-3.safetensors").symlink_to("blob")


def folder(source: Path) -> None:
    (source / "model-3.safetensors").unlink()
    (source / "model-3.safetensors").mkdir()


def header(value: Any) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


SCALE, WEIGHT, SHARD = "layers.1.engram.embed.scale", "layers.1.engram.embed.weight", "model-3.safetensors"
REFUSED: dict[str, tuple[Spoil, list[str]]] = {
    "no index": (lambda source: (source / INDEX_NAME).unlink(), [f"{INDEX_NAME}: found nothing"]),
    "half an index": (cut(INDEX_NAME), [f"{INDEX_NAME}: found ", "bytes that are not JSON", "a whole JSON object"]),
    "empty index": (replace(INDEX_NAME, b""), ["0 bytes that are not JSON"]),
    "no text": (replace(INDEX_NAME, b"\xff\xfe{}"), ["bytes that are not JSON"]),
    "a list": (replace(INDEX_NAME, b"[]"), ["JSON that is not an object"]),
    "no weight_map": (replace(INDEX_NAME, b"{}"), ["no usable weight_map"]),
    "odd weight_map": (named("a", 1), ["no usable weight_map"]),
    "odd metadata": (edit(lambda index: index.update(metadata=[])), ["metadata that is not an object"]),
    "no config": (lambda source: (source / CONFIG_NAME).unlink(), [f"{CONFIG_NAME}: found nothing"]),
    "half a config": (replace(CONFIG_NAME, b'{"a'), [f"{CONFIG_NAME}: found 3 bytes that are not JSON"]),
    "above": (named(SCALE, "../x.safetensors"), ["unsafe shard name '../x.safetensors'"]),
    "absolute": (named("any", "/etc/passwd"), ["unsafe shard name '/etc/passwd'"]),
    "our own name": (named("any", CONFIG_NAME), [f"unsafe shard name '{CONFIG_NAME}'"]),
    "two shards": (
        named(SCALE, "model-4.safetensors"),
        [f"layers.1.engram.embed.scale in model-4.safetensors, {WEIGHT} in {SHARD}", f"no tensor {SCALE}"],
    ),
    "no scale": (edit(lambda index: index["weight_map"].pop(SCALE)), ["found layers.1 without .engram.embed.scale"]),
    "no tables": (
        edit(lambda index: [index["weight_map"].pop(name) for name in KEPT]),
        ["no tensor that ends with .engram.embed.weight or .engram.embed.scale"],
    ),
    "no shard": (lambda source: (source / SHARD).unlink(), [f"{SHARD}: found nothing"]),
    "a link": (link, [f"{SHARD}: found a symbolic link, needed a regular file"]),
    "a folder": (folder, [f"{SHARD}: found something that is not a regular file"]),
    "cut": (cut(SHARD), [f"{SHARD}: found ", "as its header promises"]),
    "too short": (replace(SHARD, b"1234"), ["4 bytes, too few for a safetensors header"]),
    "too long": (replace(SHARD, b"\xff" * 9), ["more than the format allows"]),
    "half a header": (replace(SHARD, struct.pack("<Q", 99) + b"{}"), ["2 of the 99 bytes of the safetensors header"]),
    "no header": (replace(SHARD, header(b"{]")), ["a safetensors header that is not JSON"]),
    "list header": (replace(SHARD, header([])), ["a safetensors header that is not an object"]),
    "no offsets": (replace(SHARD, header({WEIGHT: {}})), [f"does not say where {WEIGHT} is"]),
    "odd offsets": (replace(SHARD, header({WEIGHT: {"data_offsets": [0, "9"]}})), [f"does not say where {WEIGHT}"]),
    "backward": (replace(SHARD, header({WEIGHT: {"data_offsets": [9, 0]}})), [f"{WEIGHT} from 9 to 0"]),
    "absent": (
        replace(SHARD, shard_bytes({WEIGHT: 5})),
        [f"{SHARD}: found no tensor {SCALE}, needed it, as the index says"],
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_sources_that_are_refused(source: Path, dest: Path, kind: str) -> None:
    spoil, messages = REFUSED[kind]
    spoil(source)
    with pytest.raises(SlimError) as raised:
        make(source, dest)
    for message in messages:
        assert message in str(raised.value)
    assert not dest.exists()


def test_everything_that_is_wrong_is_named_at_once(source: Path, dest: Path) -> None:
    (source / CONFIG_NAME).unlink()
    named("x", "../x")(source)
    (source / SHARD).unlink()
    cut("model-4.safetensors")(source)
    with pytest.raises(SlimError) as raised:
        make(source, dest)
    paths = [finding.path for finding in raised.value.findings]
    assert paths == [CONFIG_NAME, INDEX_NAME, SHARD, "model-4.safetensors"]


@pytest.mark.parametrize("suffixes", [[], [""], ["a", "a"]], ids=str)
def test_suffixes_that_make_no_sense(source: Path, dest: Path, suffixes: list[str]) -> None:
    with pytest.raises(SlimError, match="suffixes must be"):
        plan_slim(str(source), str(dest), suffixes)


# --- destinations that are refused ------------------------------------------------------------------------------------


def test_the_source_is_not_made_slim_itself(source: Path, tmp_path: Path) -> None:
    before = state(source)
    (tmp_path / "alias").symlink_to(source)
    for same in source, tmp_path / "alias":
        with pytest.raises(SlimError, match="are the same directory"):
            make(source, same)
    assert state(source) == before


def test_files_of_others_are_not_replaced(source: Path, dest: Path) -> None:
    dest.mkdir()
    for name in (INDEX_NAME, CONFIG_NAME, SHARD):
        (dest / name).write_text('{"weight_map": {"a": "mine"}}')
    (dest / "mine").write_text("x")
    before = state(dest)
    with pytest.raises(SlimError, match="nothing was changed") as raised:
        make(source, dest)
    assert [finding.path for finding in raised.value.findings] == [
        str(dest / name) for name in (SHARD, CONFIG_NAME, INDEX_NAME)
    ]
    assert "a file that is not ours" in str(raised.value)
    assert state(dest) == before


def test_a_destination_that_is_a_file(source: Path, dest: Path) -> None:
    dest.write_text("x")
    with pytest.raises(SlimError, match="found something that is not a directory"):
        make(source, dest)


def test_a_folder_in_the_place_of_a_file(source: Path, dest: Path) -> None:
    (dest / SHARD).mkdir(parents=True)
    with pytest.raises(SlimError, match=f"{SHARD}: found something that is not a regular file"):
        make(source, dest)


def test_the_marker_of_a_stranger_removes_nothing_elsewhere(source: Path, dest: Path, tmp_path: Path) -> None:
    make(source, dest)
    (tmp_path / "victim").write_text("x")
    index = json.loads((dest / INDEX_NAME).read_text())
    index["weight_map"] = {"a": "../victim", "b": str(tmp_path / "victim"), "c": CONFIG_NAME}
    (dest / INDEX_NAME).write_text(json.dumps(index))
    (dest / STATE_NAME).write_text(json.dumps({"format": 1, "files": ["../victim", INDEX_NAME, *TABLES]}))
    make(source, dest)
    assert (tmp_path / "victim").exists()
    assert_made(source, dest)


# --- another file system ----------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another file system."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and memory.stat().st_dev != tmp_path.stat().st_dev:
        directory = memory / f"slim-{os.getpid()}"
        directory.mkdir()
        yield directory
        shutil.rmtree(directory)
    else:
        pytest.skip("there is no second file system to write to")


def test_another_file_system_is_told_before_anything_changes(source: Path, elsewhere: Path) -> None:
    with pytest.raises(SlimError) as raised:
        make(source, elsewhere / "slim")
    assert [finding.path for finding in raised.value.findings] == list(TABLES)
    assert "/dev/shm, tmpfs" in str(raised.value) and "or copies" in str(raised.value)
    mount = subprocess.run(["stat", "-c", "%m", source], capture_output=True, text=True, check=True).stdout.strip()
    assert f"{source / SHARD} on {mount}, " in str(raised.value)
    assert os.listdir(elsewhere) == []


def test_another_file_system_takes_copies(source: Path, elsewhere: Path) -> None:
    make(source, elsewhere / "slim", copy=True)
    assert_made(source, elsewhere / "slim", linked=False)
    assert not make(source, elsewhere / "slim", copy=True).changed


@pytest.mark.parametrize(
    ("number", "message"), [(errno.EXDEV, "both on one file system"), (errno.EPERM, "no hard link of")]
)
def test_a_link_that_is_refused_is_told(
    source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    """Bind mounts of one file system look like one, and take no links all the same."""

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(SlimError, match=message):
        make(source, dest)
    monkeypatch.undo()
    make(source, dest)
    assert_made(source, dest)


def test_copies_need_room(source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(SlimError, match="found 100 bytes free on the file system of .* bytes for copies"):
        make(source, dest, copy=True)
    assert not dest.exists()
    make(source, dest)


def test_a_disk_that_fills_up_meanwhile(source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*args: Any, **options: Any) -> None:
        Path(args[1]).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(SlimError, match="is full .* Make room and run again"):
        make(source, dest, copy=True)
    assert os.listdir(dest) == [STATE_NAME]
    monkeypatch.undo()
    make(source, dest, copy=True)
    assert_made(source, dest, linked=False)


# --- dying at every step ----------------------------------------------------------------------------------------------

CHANGES = ("write", "rename", "unlink", "link", "mkdir", "rmdir", "fsync", "utime", "sendfile")


def run_until(at: int, after: bool, work: Callable[[], Any]) -> bool:
    """Do the work in a process that dies at call number ``at`` of those that change the disk; whether it ended."""
    child = os.fork()
    if not child:
        status = 9
        count = 0

        def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                try:
                    if count == at and not after:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **options)
                finally:
                    if count == at:
                        os.kill(os.getpid(), signal.SIGKILL)

            return call

        try:
            for name in CHANGES:
                setattr(os, name, wrap(getattr(os, name)))
            work()
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        return False
    assert os.WEXITSTATUS(ended) == 0
    return True


def assert_index_is_true(dest: Path) -> None:
    """Whenever there is an index, its shards are there and hold what it says."""
    if (dest / INDEX_NAME).exists():
        index = json.loads((dest / INDEX_NAME).read_text())
        for tensor, shard in index["weight_map"].items():
            assert tensor.encode() in (dest / shard).read_bytes()
        assert (dest / CONFIG_NAME).exists()


@pytest.mark.parametrize(
    ("old", "copy", "after"),
    [
        (None, False, False),
        (None, True, True),
        (["embed.weight_extra"], False, True),
        (["embed.weight_extra"], True, False),
    ],
    ids=["new-link-before", "new-copy-after", "update-link-after", "update-copy-before"],
)
def test_dying_at_any_call_is_repaired(
    source: Path, dest: Path, old: list[str] | None, copy: bool, after: bool
) -> None:
    for at in range(1, 200):
        shutil.rmtree(dest, ignore_errors=True)
        if old:
            make(source, dest, suffixes=old, copy=copy)
        if run_until(at, after, lambda: make(source, dest, copy=copy)):
            break
        assert_index_is_true(dest)
        assert make(source, dest, copy=copy).changed or not list(dest.glob(".*"))
        assert_made(source, dest, linked=not copy)
        assert not make(source, dest, copy=copy).changed
    assert_made(source, dest, linked=not copy)
    assert at > 20


def test_dying_while_folders_go_is_repaired(source: Path, dest: Path) -> None:
    in_folders(source)
    update = {"suffixes": ["embed.weight_extra"]}
    for at in range(1, 200):
        shutil.rmtree(dest, ignore_errors=True)
        make(source, dest)
        if run_until(at, False, lambda: make(source, dest, **update)):
            break
        # It dies once more, in the middle.
        run_until(8, False, lambda: make(source, dest, **update))
        make(source, dest, **update)
        assert sorted(os.listdir(dest)) == sorted([CONFIG_NAME, INDEX_NAME, "other"])
    assert at > 15


def test_what_a_run_for_something_else_left_goes_too(source: Path, dest: Path) -> None:
    """It dies with a shard aside that is not part of what the next run makes."""
    for at in range(1, 200):
        shutil.rmtree(dest, ignore_errors=True)
        if run_until(at, True, lambda: make(source, dest, suffixes=["embed.weight_extra"])):
            break
        make(source, dest)
        assert_made(source, dest)
    assert at > 10
