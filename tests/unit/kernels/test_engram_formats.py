# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Headers and sizes: golden ones of the real tables (as sparse files), and what is refused."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engram_support import GOLDEN, GOLDEN_ROWS, REAL, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from sparkwright_kernels.engram.errors import EngramError, EngramErrors
from sparkwright_kernels.engram.formats import (
    PAGE,
    EngramFile,
    check_file,
    directory_name,
    parse_header,
    planned,
    read_file,
)
from sparkwright_kernels.engram.layout import EngramLayout, RowRange

LAYOUT = EngramLayout.from_config(REAL)
SMALL = EngramLayout.from_config(small_config(1000))
REVISION = "fb2764a5cf321eaa5070ca8f9e892818f477c16d"


def sparse(directory: Path, file: EngramFile, size: int | None = None) -> Path:
    path = directory / file.name
    path.write_bytes(file.header())
    os.truncate(path, file.file_bytes if size is None else size)
    return path


@pytest.mark.parametrize("rule, golden", [("heads", GOLDEN), ("rows", GOLDEN_ROWS)])
def test_the_published_format_as_published(rule: Any, golden: dict[Any, Any], tmp_path: Path) -> None:
    for (layer, ranks), (bounds, sizes) in golden.items():
        for rank in range(ranks):
            file = planned(LAYOUT, "dsv41en1", layer, rule, rank, ranks)
            assert file.name == f"engram-l{layer}-r{rank}of{ranks}.bin"
            fields = (0x31344E4531565344, layer, bounds[rank], bounds[rank + 1], bounds[-1], 264)
            assert file.header() == struct.pack("<6Q", *fields) + bytes(PAGE - 48)
            assert file.header()[:8] == b"DSV1EN41"
            path = sparse(tmp_path, file)
            assert path.stat().st_size == sizes[rank] == 4096 + 264 * (bounds[rank + 1] - bounds[rank])
            assert check_file(path, file).rows == file.rows
            path.unlink()


def test_the_page_format_of_the_real_tables(tmp_path: Path) -> None:
    file = planned(LAYOUT, "pages", 1, "heads", 0, 2, REVISION)
    assert (file.rows_per_page, file.chunk_rows) == (15, 30720)
    pages = -(-192001740 // 15)
    assert file.payload_bytes == pages * PAGE and file.chunks == -(-pages // 2048)
    assert file.file_bytes == PAGE + pages * PAGE + -(-file.chunks * 8 // PAGE) * PAGE
    assert abs(file.file_bytes / 2**30 - 48.83) < 0.01
    assert check_file(sparse(tmp_path, file), file) == file
    page = file.header()
    assert len(page) == PAGE and page[:8] == b"SWENGRAM"
    assert struct.unpack_from("<6I3Q4I5Q", page, 8) == (
        1, 4096, 1, 1, 0, 2, 0, 192001740, 384006168, 264, 15, 4096, 1, 2048 * 4096, 4096, pages * 4096,
        4096 + pages * 4096, 8 * file.chunks,
    )  # fmt: skip
    assert page[112:176] == REVISION.encode().ljust(64, b"\0") and page[176:208] == b"".ljust(32, b"\0")
    assert page[-32:] == hashlib.sha256(page[:-32]).digest()


def test_where_rows_are() -> None:
    for format in ("dsv41en1", "pages"):
        file = planned(SMALL, format, 1, "heads", 1, 2)  # type: ignore[arg-type]
        for row in (0, 1, 14, 15, 16, 29, 30, file.rows.rows - 1):
            there = PAGE + (row // 15 * PAGE + row % 15 * 264 if format == "pages" else row * 264)
            assert file.offset(row) == there
        rows = [file.chunk(number) for number in range(file.chunks)]
        assert sum(count for _, count in rows) == file.rows.rows and all(count > 0 for _, count in rows)
        assert all(file.offset(first) % PAGE == 0 for first, _ in rows)
    crossing = sum(row * 264 % PAGE > PAGE - 264 for row in range(512)) / 512
    assert crossing == 0.0625
    assert directory_name("pages", "heads", 2) == "pages-heads-tp2"


def differences(error: pytest.ExceptionInfo[EngramError]) -> list[EngramError]:
    return error.value.errors if isinstance(error.value, EngramErrors) else [error.value]


@pytest.mark.parametrize("format", ["dsv41en1", "pages"])
def test_a_file_of_something_else_is_refused(format: Any, tmp_path: Path) -> None:
    def file(layer: int = 1, rule: Any = "heads", rank: int = 0, ranks: int = 2) -> EngramFile:
        return planned(SMALL, format, layer, rule, rank, ranks, REVISION)

    expected = file()
    path = tmp_path / expected.name
    for other, told in (
        (file(rule="rows"), "rule rows, rank 0 of 2"),
        (file(rank=1), "rule heads, rank 1 of 2"),
        (file(ranks=3), "rule heads, rank 0 of 3"),
        (file(layer=14), "layer 14"),
    ):
        path = sparse(tmp_path, other)
        path.rename(tmp_path / expected.name)  # the other recipe's file under our name
        with pytest.raises(EngramError) as error:
            check_file(tmp_path / expected.name, expected, SMALL)
        assert told in str(error.value), str(error.value)
        assert f"needed rows {expected.rows.lo} to {expected.rows.hi}" in str(error.value)
        assert all(found.repair for found in differences(error))
    path = sparse(tmp_path, replace(expected, row_bytes=136))
    with pytest.raises(EngramError, match="row bytes 136, needed 264"):
        check_file(path, expected)
    other_format = "pages" if format == "dsv41en1" else "dsv41en1"
    path = sparse(tmp_path, planned(SMALL, other_format, 1, "heads", 0, 2, REVISION))  # type: ignore[arg-type]
    with pytest.raises(EngramError, match=f"format {other_format}, needed {format}"):
        check_file(path, expected)
    if format == "pages":
        path = sparse(tmp_path, replace(expected, revision="main"))
        with pytest.raises(EngramError, match=f"revision main, needed {REVISION}"):
            check_file(path, expected)
        assert check_file(path, replace(expected, revision="")).revision == "main"


@pytest.mark.parametrize("format", ["dsv41en1", "pages"])
def test_a_damaged_file_is_refused(format: Any, tmp_path: Path) -> None:
    file = planned(SMALL, format, 1, "heads", 0, 2)
    for size, told in (
        (file.file_bytes - 1, f"found {file.file_bytes - 1} bytes, needed {file.file_bytes}"),
        (file.file_bytes + 1, "as its header says"),
        (PAGE, "as its header says"),
        (PAGE - 1, "a header of 4096 bytes"),
        (0, "found 0 bytes"),
    ):
        with pytest.raises(EngramError, match=told):
            read_file(sparse(tmp_path, file, size))
    with pytest.raises(EngramError, match="No such file.*pack it"):
        read_file(tmp_path / "nothing")
    page = bytearray(file.header())
    page[3000] = 1
    with pytest.raises(EngramError, match="digest" if format == "pages" else "zeros"):
        parse_header(bytes(page))
    with pytest.raises(EngramError, match="begins with"):
        parse_header(b"GGUF".ljust(PAGE, b"\0"))


def test_a_page_header_of_another_version_is_refused() -> None:
    page = bytearray(planned(SMALL, "pages", 1, "heads", 0, 2).header())
    page[8] = 2
    with pytest.raises(EngramError, match="found version 2, needed version 1"):
        parse_header(bytes(page))


def resealed(page: bytes) -> bytes:
    return page[:-32] + hashlib.sha256(page[:-32]).digest()


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 207), st.binary(min_size=1, max_size=8), st.booleans(), st.sampled_from(["dsv41en1", "pages"]))
def test_a_changed_header_is_refused_or_says_what_it_means(at: int, change: bytes, seal: bool, format: Any) -> None:
    """Whatever bytes change: an EngramError, or a header that is written back the same."""
    page = bytearray(planned(SMALL, format, 1, "heads", 1, 2, REVISION).header())
    page[at : at + len(change)] = change
    changed = resealed(bytes(page)) if seal and format == "pages" else bytes(page)
    try:
        found = parse_header(changed)
    except EngramError:
        return
    assert replace(found, rank=found.rank or 0, ranks=found.ranks or 2).header() == changed
    assert found.file_bytes >= PAGE + found.rows.rows * found.row_bytes > PAGE


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=2 * PAGE))
def test_any_bytes(page: bytes) -> None:
    for start in (b"", b"SWENGRAM\x01\0\0\0", b"DSV1EN41"):
        with pytest.raises(EngramError):
            parse_header(start + page)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**40 - 2), st.integers(1, 10**6), st.integers(1, PAGE), st.sampled_from(["dsv41en1", "pages"]))
def test_any_range(lo: int, rows: int, row_bytes: int, format: Any) -> None:
    hi = min(lo + rows, 2**40 - 1)
    file = EngramFile(format, 3, RowRange(lo, hi, 2**40 - 1), row_bytes, "rows", 0, 1)
    found = parse_header(file.header())
    assert found.rows == file.rows and found.file_bytes == file.file_bytes
    last = file.offset(file.rows.rows - 1) + row_bytes
    assert last <= PAGE + file.payload_bytes < last + PAGE
    assert file.span(file.chunk_rows) % PAGE == 0


def test_values_that_fit_no_file() -> None:
    for arguments, told in (
        (("tar", 1, "heads", 0, 2), "one of dsv41en1, pages"),
        (("pages", 1, "heads", 0, 2, "r" * 65), "at most 64"),
        (("pages", 1, "heads", 0, 2, "é"), "ASCII"),
        (("pages", 1, "heads", 2, 2), "0 to 1"),
    ):
        with pytest.raises(EngramError, match=told):
            planned(SMALL, *arguments)  # type: ignore[arg-type]
