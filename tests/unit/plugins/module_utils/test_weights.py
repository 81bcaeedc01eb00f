# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Manifests, receipts and the look at one file; nothing here needs a network."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import weights
from ansible_collections.sparkwright.dsv41.plugins.module_utils.weights import (
    RECEIPT_NAME,
    FileEntry,
    FileFinding,
    Manifest,
    Receipt,
    ReceiptError,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHA = "sha256:" + "0" * 64


def entry_for(path: str, content: bytes, kind: str = "sha256") -> FileEntry:
    if kind == "sha256":
        digest = hashlib.sha256(content).hexdigest()
    else:
        digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return FileEntry(path, len(content), f"{kind}:{digest}")


def put(root: Path, path: str, content: bytes, kind: str = "sha256") -> FileEntry:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)
    return entry_for(path, content, kind)


def manifest_of(*files: FileEntry, include: tuple[str, ...] = ()) -> Manifest:
    return Manifest("acme/tiny", COMMIT, include, files)


def receipt_of(root: Path, *files: FileEntry) -> Receipt:
    return Receipt(manifest_of(*files), {entry: (root / entry.path).stat().st_mtime_ns for entry in files})


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("revision", "expected"),
    [
        (COMMIT, True),
        ("main", False),
        ("v1.0", False),
        (COMMIT[:39], False),
        (COMMIT + "0", False),
        (COMMIT.upper(), False),
        (COMMIT + "\n", False),
        ("", False),
    ],
)
def test_is_commit(revision: str, expected: bool) -> None:
    assert weights.is_commit(revision) is expected


@pytest.mark.parametrize(
    ("repo", "expected"),
    [
        ("acme/tiny", True),
        ("acme-1/Tiny_2.5-exl3", True),
        ("tiny", False),
        ("acme/tiny/x", False),
        ("../tiny", False),
        ("acme/..", False),
        ("acme/ti..ny", False),
        ("acme/tiny\n", False),
        ("/tiny", False),
        ("", False),
    ],
)
def test_is_repo(repo: str, expected: bool) -> None:
    assert weights.is_repo(repo) is expected


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../x", "a/../x", "a//b", "./a", "a/", "a\\b", "a\0b", ".cache/x", RECEIPT_NAME],
)
def test_unsafe_names_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="unsafe file name"):
        FileEntry(path, 1, SHA)


@pytest.mark.parametrize(
    ("size", "digest", "message"),
    [
        (-1, SHA, "impossible size"),
        (1, "sha256:" + "0" * 63, "no usable digest"),
        (1, "git-sha1:None", "no usable digest"),
        (1, "md5:" + "0" * 32, "no usable digest"),
    ],
)
def test_entries_need_size_and_digest(size: int, digest: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FileEntry("a", size, digest)


@pytest.mark.parametrize(
    ("include", "expected", "unmatched"),
    [
        ((), ["a.json", "deep/b.json", "deep/er/c.bin", "model-1.safetensors"], ()),
        (("*.json",), ["a.json", "deep/b.json"], ()),
        (("deep/",), ["deep/b.json", "deep/er/c.bin"], ()),
        (("deep/*.bin",), ["deep/er/c.bin"], ()),
        (("a.json", "a.*"), ["a.json"], ()),
        (("*.SAFETENSORS",), [], ("*.SAFETENSORS",)),
        (("model-[12].safetensors", "none"), ["model-1.safetensors"], ("none",)),
    ],
)
def test_select(include: tuple[str, ...], expected: list[str], unmatched: tuple[str, ...]) -> None:
    files = [FileEntry(path, 1, SHA) for path in ("model-1.safetensors", "deep/er/c.bin", "a.json", "deep/b.json")]
    selected, without = weights.select(files, include)
    assert [entry.path for entry in selected] == expected
    assert without == unmatched


def test_absent_names_tell_a_wrong_name_from_a_wrong_pattern() -> None:
    manifest = manifest_of(FileEntry("a", 1, SHA))
    texts = [str(finding) for finding in weights.absent_names(["a", "b", "c"], manifest, ["a", "b"])]
    assert texts == [
        "b: found a file that include leaves out, needed a pattern that selects it",
        f"c: found no such file in acme/tiny at {COMMIT}, needed it, as must_exist names it",
    ]


def test_manifest_answers_whatever_the_order_of_patterns() -> None:
    manifest = manifest_of(FileEntry("a", 1, SHA), FileEntry("b", 2, SHA), include=("a", "b"))
    assert manifest.size == 3
    assert manifest.answers("acme/tiny", COMMIT, ["b", "a", "b"])
    assert not manifest.answers("acme/tiny", COMMIT, ["a"])
    assert not manifest.answers("acme/tiny", "0" * 40, ["a", "b"])
    assert not manifest.answers("acme/other", COMMIT, ["a", "b"])


@pytest.mark.parametrize("kind", ["sha256", "git-sha1"])
@pytest.mark.parametrize("content", [b"", b"hello\n", bytes(9 * 1024 * 1024)])
def test_file_digest(tmp_path: Path, kind: str, content: bytes) -> None:
    expected = put(tmp_path, "file", content, kind)
    assert weights.file_digest(str(tmp_path / "file"), kind, len(content)) == expected.digest


def test_file_digest_of_a_file_that_grows(tmp_path: Path) -> None:
    path, whole = tmp_path / "file", threading.Event()
    path.touch()
    with ThreadPoolExecutor(1) as pool, path.open("ab", buffering=0) as stream:
        digest = pool.submit(weights.file_digest, str(path), "sha256", 0, None, whole)
        for number in range(5):
            time.sleep(0.05)
            stream.write(b"%d" % number * 3_000_000)
        assert not digest.done(), "it may still grow"
        # The last bytes and the end come at once.
        stream.write(b"end")
        whole.set()
    assert digest.result() == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_file_digest_is_what_git_says(tmp_path: Path) -> None:
    # echo hello | git hash-object --stdin
    put(tmp_path, "file", b"hello\n")
    assert weights.file_digest(str(tmp_path / "file"), "git-sha1", 6) == (
        "git-sha1:ce013625030ba8dba906f756967f9e9ca394464a"
    )


TWO = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    "b": {"dtype": "U8", "shape": [6], "data_offsets": [4, 10]},
}


def test_safetensors_size(tmp_path: Path) -> None:
    whole = safetensors(TWO, bytes(10))
    put(tmp_path, "f", whole)
    assert weights.safetensors_size(str(tmp_path / "f")) == len(whole)
    put(tmp_path, "f", whole[:-3])
    assert weights.safetensors_size(str(tmp_path / "f")) == len(whole)
    put(tmp_path, "f", safetensors({}))
    assert weights.safetensors_size(str(tmp_path / "f")) == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes, too few"),
        (b"1234567", "7 bytes, too few"),
        (safetensors(TWO)[:30], "22 of the "),
        (b"<!DOCTYPE html>\n<html>", "more than the format allows"),
        (safetensors(b"not json"), "cannot be read"),
        (safetensors(b"[1]"), "cannot be read"),
        (safetensors({"a": {"data_offsets": [0]}}), "cannot be read"),
        (safetensors({"a": 1}), "cannot be read"),
    ],
)
def test_safetensors_without_a_whole_header(tmp_path: Path, content: bytes, message: str) -> None:
    put(tmp_path, "f", content)
    with pytest.raises(ValueError, match=message):
        weights.safetensors_size(str(tmp_path / "f"))


WHOLE = safetensors(TWO, bytes(10))
PAGE = b"\n <!doctype HTML><html></html>"


@pytest.mark.parametrize(
    ("path", "content", "needed", "found"),
    [
        ("a.bin", b"right", b"right", None),
        ("m.safetensors", WHOLE, WHOLE, None),
        ("a.bin", None, b"right", "nothing"),
        ("a.bin", b"righ", b"right", "4 bytes"),
        ("a.bin", b"r", b"right", "1 byte"),
        ("a.bin", b"wrong", b"right", entry_for("a", b"wrong").digest),
        ("a.bin", PAGE, b"right", f"a web page of {len(PAGE)} bytes"),
        ("a.bin", PAGE, b"x" * len(PAGE), entry_for("a", PAGE).digest + " (a web page)"),
        ("a.html", PAGE, b"right", f"{len(PAGE)} bytes"),
        ("m.safetensors", WHOLE[:-4], WHOLE[:-4], f"{len(WHOLE) - 4} bytes where its header promises {len(WHOLE)}"),
        ("m.safetensors", b"short", b"short", "5 bytes, too few for a safetensors header"),
    ],
)
@pytest.mark.parametrize("kind", ["sha256", "git-sha1"])
def test_check_file(
    tmp_path: Path, path: str, content: bytes | None, needed: bytes, found: str | None, kind: str
) -> None:
    if content is not None:
        put(tmp_path, path, content)
    entry = entry_for(path, needed, kind)
    checked = weights.check_file(str(tmp_path), entry)
    if found and found.startswith("sha256:") and kind != "sha256":
        assert content is not None
        found = found.replace(entry_for(path, content).digest, entry_for(path, content, kind).digest)
    assert (checked.finding.found if checked.finding else None) == found
    assert checked.size == (0 if content is None else len(content))
    assert (checked.mtime_ns is None) == (content is None)
    if checked.finding:
        assert checked.finding.path == path


def test_check_file_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    checked = weights.check_file(str(tmp_path), FileEntry("a", 1, SHA))
    assert checked.finding == FileFinding("a", "something that is not a regular file", "1 byte")


def test_a_file_as_in_the_receipt_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = put(tmp_path, "a", b"right")
    receipt = receipt_of(tmp_path, entry)
    stat = (tmp_path / "a").stat()
    (tmp_path / "a").write_bytes(b"wrong")
    os.utime(tmp_path / "a", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights.check_file(str(tmp_path), entry, receipt).finding is None
    assert weights.check_file(str(tmp_path), entry, receipt, rehash=True).finding is not None
    monkeypatch.setattr(weights, "file_digest", lambda *args: pytest.fail("the file was read"))
    assert weights.check_file(str(tmp_path), entry, receipt).finding is None


def test_a_receipt_vouches_for_size_time_and_digest_together(tmp_path: Path) -> None:
    entry = put(tmp_path, "a", b"right")
    receipt = receipt_of(tmp_path, entry)
    mtime = (tmp_path / "a").stat().st_mtime_ns
    assert receipt.vouches_for(entry, 5, mtime)
    assert not receipt.vouches_for(entry, 4, mtime)
    assert not receipt.vouches_for(entry, 5, mtime + 1)
    assert not receipt.vouches_for(entry_for("a", b"other"), 5, mtime)
    assert not receipt.vouches_for(entry_for("b", b"right"), 5, mtime)


def test_receipt_comes_back_as_written(tmp_path: Path) -> None:
    files = put(tmp_path, "a", b"one"), put(tmp_path, "deep/b", b"two", "git-sha1")
    manifest = manifest_of(*files, include=("*", "a"))
    receipt = Receipt(manifest, {files[0]: 1, files[1]: 2**62})
    assert weights.read_receipt(str(tmp_path)) is None
    weights.write_receipt(str(tmp_path), receipt)
    assert weights.read_receipt(str(tmp_path)) == receipt
    assert sorted(os.listdir(tmp_path)) == [RECEIPT_NAME, "a", "deep"]


def test_a_crash_while_writing_leaves_the_old_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = put(tmp_path, "a", b"one")
    old = receipt_of(tmp_path, entry)
    weights.write_receipt(str(tmp_path), old)
    steps: list[str] = []

    def fsync(descriptor: int) -> None:
        steps.append("fsync")

    def replace(source: str, target: str) -> None:
        steps.append("replace")
        raise OSError("the power went")

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(OSError, match="the power went"):
        weights.write_receipt(str(tmp_path), Receipt(old.manifest, {entry: 7}))
    assert steps == ["fsync", "replace"]
    assert weights.read_receipt(str(tmp_path)) == old


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        ('{"format": 2}', "format 2, this version reads 1"),
        ('{"format": 1, "repo": "a/b", "revision": "r", "include": [], "files": [{"path": "a"}]}', "KeyError"),
        (
            '{"format": 1, "repo": "a/b", "revision": "r", "include": [],'
            f' "files": [{{"path": "../a", "size": 1, "digest": "{SHA}", "mtime_ns": 1}}]}}',
            "unsafe file name",
        ),
    ],
)
def test_unusable_receipts(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / RECEIPT_NAME).write_text(text)
    with pytest.raises(ReceiptError, match=message):
        weights.read_receipt(str(tmp_path))


def test_too_small_for_joining_too() -> None:
    message = weights.too_small(100, -30, 50, "/srv/w", 3)
    assert message is not None
    assert "3 file(s) to fetch need 100 bytes, joining needs 30 more, 50 are free; 100 + 30 - 50 = 80 bytes" in message


@pytest.mark.parametrize(("free", "missing"), [(40, "; 100 - 40 = 60 bytes (0.0 GiB) are missing"), (100, "")])
def test_filled_up(free: int, missing: str) -> None:
    message = weights.filled_up(100, 2, free, "/srv/w")
    amounts = f"2 file(s) still need 100 bytes, {free} are free now{missing}"
    assert message == f"The file system of /srv/w is full: {amounts}. Make room and run again."


@pytest.mark.parametrize(
    ("need", "freed", "free", "short"), [(10, 0, 10, None), (10, 4, 6, None), (10, 0, 9, 1), (2**40, 2**30, 5, 2**40)]
)
def test_too_small(need: int, freed: int, free: int, short: int | None) -> None:
    message = weights.too_small(need, freed, free, "/srv/w", 3)
    if short is None:
        assert message is None
    else:
        assert message is not None
        assert "/srv/w" in message
        assert "3 file(s)" in message
        assert f"{need} - {freed} - {free} = {need - freed - free} bytes" in message


@pytest.mark.parametrize(
    ("status", "code", "path", "has_token", "says", "stop"),
    [
        (401, "GatedRepo", "f", False, "gated and no token was given: accept its terms at http://h/acme/tiny", True),
        (403, "GatedRepo", "f", True, "its account has no access to acme/tiny: accept the terms", True),
        (401, "", "f", True, "refuses the token (401)", True),
        (401, "GatedRepo", "f", True, "refuses the token (401)", True),
        (401, "", "", False, "no repository acme/tiny at http://h, or it is private and needs a token", True),
        (401, "RepoNotFound", "", True, "or the token's account may not see it", True),
        (404, "RepoNotFound", "", False, "no repository acme/tiny", True),
        (404, "", "", False, "no repository acme/tiny", True),
        (404, "RevisionNotFound", "", False, f"acme/tiny has no commit {COMMIT}", True),
        (404, "EntryNotFound", "f", False, "no such file at http://h", False),
        (404, "", "f", False, "answers 404", False),
        (403, "", "f", False, "forbids access to acme/tiny (403)", True),
        (429, "", "f", False, "no more requests for now (429)", True),
        (503, "", "f", False, "answers 503", False),
    ],
)
def test_explain_status(status: int, code: str, path: str, has_token: bool, says: str, stop: bool) -> None:
    message, stops = weights.explain_status(
        status,
        code,
        "quoted " * 100,
        repo="acme/tiny",
        revision=COMMIT,
        endpoint="http://h",
        path=path,
        has_token=has_token,
    )
    assert says in message
    assert stops is stop
    assert "the hub says: quoted" in message
    assert len(message) < 500


# --- joined files, and room for several repositories ------------------------------------------------------------------


def piece(path: str, size: int) -> FileEntry:
    return FileEntry(path, size, f"sha256:{hashlib.sha256(path.encode()).hexdigest()}")


def test_joined_files_take_the_place_of_their_parts() -> None:
    one, two, other = piece("x.part1", 10), piece("x.part2", 5), piece("config.json", 1)
    digest = "a" * 64
    after = weights.assemble([two, other, one], {"x": ("x.part1", "x.part2")}, {"x": digest})
    assert after == [other, FileEntry("x", 15, f"sha256:{digest}", (one, two))]
    finding = weights.assemble([one, two], {"x": ("x.part1", "x.part2")}, {})[0]
    assert str(finding) == "x: found no digest in the repository's manifest, needed one, to verify the joined file"


def test_a_receipt_remembers_the_parts(tmp_path: Path) -> None:
    joined = FileEntry("x", 15, f"sha256:{'a' * 64}", (piece("x.part1", 10), piece("x.part2", 5)))
    receipt = weights.Receipt(weights.Manifest("acme/x", "0" * 40, (), (joined,)), {joined: 7})
    weights.write_receipt(str(tmp_path), receipt)
    assert weights.read_receipt(str(tmp_path)) == receipt


def ask(filesystem: str, need: int, free: int, files: int = 1) -> dict[str, Any]:
    fetched = [f"f{number}" for number in range(files)]
    where = {"filesystem": filesystem, "path": f"{filesystem}/{need}"}
    return {**where, "fetched": fetched, "fetch_bytes": need, "need_bytes": need, "free_bytes": free}


def test_room_is_that_of_each_file_system() -> None:
    room = weights.room([ask("/a", 600, 1000), ask("/b", 10, 5), ask("/a", 400, 1000, files=2)], "spark2")
    assert room["lines"][0].startswith(
        "spark2: /a: 3 file(s) to fetch, 1000 bytes (0.0 GiB); at most 1000 bytes more are needed"
    )
    assert len(room["lines"]) == 2
    assert room["problems"] == [
        "spark2: the file system /b is too small for /b/10: 10 - 5 = 5 bytes (0.0 GiB) are missing"
    ]
    (problem,) = weights.room([ask("/a", 601, 1000), ask("/a", 400, 1000)], "spark2")["problems"]
    assert "for /a/601, /a/400: 601 + 400 - 1000 = 1 bytes" in problem
