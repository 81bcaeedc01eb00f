# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Files that hold one rank's rows of one Engram table; docs/engram.md specifies both formats byte by byte.

`dsv41en1` is the published one: a header page, then rows of `row_bytes` end to end. Its header says neither rule nor
rank, and its rows cross blocks. `pages` is ours: as many whole rows as fit into each page of 4096 bytes, so that one
block read gets a row, a header that says everything and is digested, and the XXH64 of each chunk of 2048 pages in a
table at the end. XXH64 because it runs at the speed of memory without instructions of any one processor, and 64 bits
find damage that 32 would let pass once in a few thousand million chunks; the table's own SHA-256 is in the header.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from sparkwright_kernels.engram.errors import EngramError, raise_all
from sparkwright_kernels.engram.layout import RULES, EngramLayout, RowRange, Rule

Format = Literal["dsv41en1", "pages"]
FORMATS: tuple[Format, ...] = get_args(Format)

PAGE = 4096
"""Bytes of a page, of a header, and of the blocks that direct I/O needs on every disk in use."""

MAGIC_DSV41EN1 = 0x31344E4531565344
MAGIC_PAGES = b"SWENGRAM"
VERSION = 1
XXH64 = 1
REVISION_BYTES = 64

_CHUNK_PAGES = 2048  # 8 MiB
_DSV41EN1 = struct.Struct("<6Q")
_PAGES = struct.Struct(f"<8s6I3Q4I5Q{REVISION_BYTES}s32s")
_DIGEST_AT = PAGE - 32
_RULE_NUMBERS: dict[Rule, int] = {"heads": 1, "rows": 2}
_MAX_ROWS = 1 << 40
_NAME = re.compile(r"engram-l(\d{1,9})-r(\d{1,9})of(\d{1,9})\.bin")


@dataclass(frozen=True)
class EngramFile:
    """What a file holds. `rule`, `rank`, `ranks` are None where the format does not say."""

    format: Format
    layer: int
    rows: RowRange
    row_bytes: int
    rule: Rule | None = None
    rank: int | None = None
    ranks: int | None = None
    revision: str = ""
    table_digest: bytes = bytes(32)

    @property
    def name(self) -> str:
        return f"engram-l{self.layer}-r{self.rank}of{self.ranks}.bin"

    @property
    def rows_per_page(self) -> int:
        """Rows in a page, or 0 where they lie end to end."""
        return PAGE // self.row_bytes if self.format == "pages" else 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of rows, with the padding between them; they begin at byte `PAGE`."""
        return self.span(self.rows.rows)

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk, the unit of packing and of checksums; a chunk is a whole number of pages."""
        per_page = self.rows_per_page
        if per_page:
            return per_page * _CHUNK_PAGES
        return PAGE * max(1, _CHUNK_PAGES // self.row_bytes)  # any multiple of PAGE rows is whole pages

    @property
    def chunks(self) -> int:
        return -(-self.rows.rows // self.chunk_rows)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of checksums, without the zeros that fill its last page."""
        return 8 * self.chunks if self.format == "pages" else 0

    @property
    def file_bytes(self) -> int:
        return PAGE + self.payload_bytes + -(-self.table_bytes // PAGE) * PAGE

    def span(self, rows: int) -> int:
        """Bytes that the first `rows` rows take, with the padding of the last page."""
        per_page = self.rows_per_page
        return -(-rows // per_page) * PAGE if per_page else rows * self.row_bytes

    def offset(self, row: int) -> int:
        """Byte at which row `rows.lo + row` begins."""
        per_page = self.rows_per_page
        if per_page:
            return PAGE + row // per_page * PAGE + row % per_page * self.row_bytes
        return PAGE + row * self.row_bytes

    def chunk(self, number: int) -> tuple[int, int]:
        """First row and number of rows of a chunk, counted from `rows.lo`."""
        first = number * self.chunk_rows
        return first, min(self.chunk_rows, self.rows.rows - first)

    def header(self) -> bytes:
        """The first page of the file."""
        rows = self.rows
        if self.format == "dsv41en1":
            return _DSV41EN1.pack(
                MAGIC_DSV41EN1, self.layer, rows.lo, rows.hi, rows.total, self.row_bytes
            ).ljust(PAGE, b"\0")  # fmt: skip
        assert self.rule is not None and self.rank is not None and self.ranks is not None
        fields = _PAGES.pack(
            MAGIC_PAGES, VERSION, PAGE, self.layer, _RULE_NUMBERS[self.rule], self.rank, self.ranks,
            rows.lo, rows.hi, rows.total, self.row_bytes, self.rows_per_page, PAGE, XXH64, _CHUNK_PAGES * PAGE,
            PAGE, self.payload_bytes, PAGE + self.payload_bytes, self.table_bytes,
            self.revision.encode("ascii"), self.table_digest,
        )  # fmt: skip
        digested = fields.ljust(_DIGEST_AT, b"\0")
        return digested + hashlib.sha256(digested).digest()


def directory_name(format: Format, rule: Rule, ranks: int) -> str:
    """Of the directory, below `engram/`, that holds the files of this format, rule and tensor-parallel size only."""
    return f"{format}-{rule}-tp{ranks}"


def planned(
    layout: EngramLayout, format: Format, layer: int, rule: Rule, rank: int, ranks: int, revision: str = ""
) -> EngramFile:
    """What a rank's file must hold; raises EngramError for values that fit no file."""
    if format not in FORMATS:
        raise EngramError("format", repr(format), f"one of {', '.join(FORMATS)}")
    if len(revision) > REVISION_BYTES or not re.fullmatch(r"[\w.\-/]*", revision, re.ASCII):
        raise EngramError("revision", repr(revision), f"at most {REVISION_BYTES} ASCII letters, digits or _ . - /")
    if layout.row_bytes > PAGE:
        raise EngramError("row", f"{layout.row_bytes} bytes", f"at most {PAGE}")
    return EngramFile(
        format, layer, layout.shard(layer, rule, rank, ranks), layout.row_bytes, rule, rank, ranks, revision
    )


def read_file(path: Path) -> EngramFile:
    """What the file says it holds; raises EngramError unless it is whole by its header and its size.

    Reads the header page only. Of a `dsv41en1` file rank and ranks are those of its name, if it has such a name.
    """
    try:
        with path.open("rb") as stream:
            page, size = stream.read(PAGE), os.fstat(stream.fileno()).st_size
    except OSError as reason:
        raise EngramError(path, f"no readable file ({reason.strerror})", "a packed Engram file", "pack it") from None
    found = parse_header(page, path)
    if found.format == "dsv41en1" and (match := _NAME.fullmatch(path.name)):
        found = replace(found, rank=int(match[2]), ranks=int(match[3]))
    if size != found.file_bytes:
        raise EngramError(
            path, f"{size} bytes", f"{found.file_bytes}, as its header says", "delete it and pack it again"
        )
    return found


def parse_header(page: bytes, subject: object = "header") -> EngramFile:
    """What a header page says; raises EngramError for any that no packer of these formats writes."""
    again = "delete it and pack it again"
    if len(page) < PAGE:
        raise EngramError(subject, f"{len(page)} bytes", f"a header of {PAGE} bytes", again)
    if page.startswith(_DSV41EN1.pack(MAGIC_DSV41EN1, 0, 0, 0, 0, 0)[:8]):
        _, layer, lo, hi, total, row_bytes = _DSV41EN1.unpack_from(page)
        found = EngramFile("dsv41en1", layer, RowRange(lo, hi, total), row_bytes)
        if any(page[_DSV41EN1.size :]):
            raise EngramError(subject, "something after the header's fields", "zeros", again)
        return _plausible(found, subject)
    if not page.startswith(MAGIC_PAGES):
        magics = f"{MAGIC_PAGES.decode()} (pages) or DSV1EN41 (dsv41en1)"
        raise EngramError(subject, f"a file that begins with {page[:8]!r}", magics)
    version = int.from_bytes(page[8:12], "little")
    if version != VERSION:
        raise EngramError(subject, f"version {version}", f"version {VERSION}", "pack it again with this release")
    if hashlib.sha256(page[:_DIGEST_AT]).digest() != page[_DIGEST_AT:]:
        raise EngramError(subject, "a damaged header", "one that agrees with its own digest", again)
    fields = _PAGES.unpack_from(page)
    layer, number, rank, ranks, lo, hi, total, row_bytes = fields[3:11]
    rule = next((rule for rule in RULES if _RULE_NUMBERS[rule] == number), None)
    if rule is None or rank >= ranks:
        raise EngramError(
            subject, f"rule {number}, rank {rank} of {ranks}", "rule 1 or 2, a rank below the ranks", again
        )
    revision = fields[19].rstrip(b"\0")
    if not revision.isascii():
        raise EngramError(subject, f"revision {revision!r}", "ASCII", again)
    rows = RowRange(lo, hi, total)
    found = EngramFile("pages", layer, rows, row_bytes, rule, rank, ranks, revision.decode(), fields[20])
    # Written once from what precedes: sizes and offsets that this release would not write are not read either.
    if _plausible(found, subject).header() != page:
        raise EngramError(subject, "sizes or offsets that contradict each other", "those of this version", again)
    return found


def _plausible(found: EngramFile, subject: object) -> EngramFile:
    rows = found.rows
    if not 0 <= rows.lo < rows.hi <= rows.total < _MAX_ROWS or not 0 < found.row_bytes <= PAGE:
        told = f"rows {rows.lo} to {rows.hi} of {rows.total}, {found.row_bytes} bytes each"
        raise EngramError(subject, told, f"a range within the table, rows of 1 to {PAGE} bytes")
    return found


def check_file(path: Path, expected: EngramFile, layout: EngramLayout | None = None) -> EngramFile:
    """Read the file's header and raise every difference from `expected`; return what it holds.

    With a layout, a range that belongs to the other rule or to another rank is told as such.
    """
    found = read_file(path)
    raise_all([*_differences(path, found, expected, layout)])
    return found


def _differences(
    path: Path, found: EngramFile, expected: EngramFile, layout: EngramLayout | None
) -> Iterator[EngramError]:
    again = "delete it and pack again, or give the directory of this recipe's files"
    for name in ("format", "layer", "rule", "rank", "ranks", "row_bytes", "revision"):
        theirs, ours = getattr(found, name), getattr(expected, name)
        if theirs not in (None, "") and ours not in (None, "") and theirs != ours:
            yield EngramError(path, f"{_WORDS.get(name, name)} {theirs}", str(ours), again)
    if found.rows != expected.rows:
        told = f"rows {found.rows.lo} to {found.rows.hi} of {found.rows.total}"
        owner = layout and _owner(found, layout)
        needed = f"rows {expected.rows.lo} to {expected.rows.hi} of {expected.rows.total}"
        ours = f" (rule {expected.rule}, rank {expected.rank} of {expected.ranks})" if expected.rule else ""
        yield EngramError(path, told + (f" ({owner})" if owner else ""), needed + ours, again)


_WORDS = {"ranks": "tensor-parallel size", "row_bytes": "row bytes"}


def _owner(found: EngramFile, layout: EngramLayout) -> str:
    """Whose rows these are, as far as a tensor-parallel size up to 8 explains it."""
    for rule in RULES:
        for ranks in range(1, 9):
            for rank in range(ranks):
                with suppress(EngramError):  # no such layer, or too few columns for so many ranks
                    if layout.shard(found.layer, rule, rank, ranks) == found.rows:
                        return f"rule {rule}, rank {rank} of {ranks}"
    return ""
