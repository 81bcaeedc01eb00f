# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The real model's golden numbers, small tables of its structure, and files as the specification says them."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sparkwright_kernels.engram.formats import EngramFile

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from engram_tables import DTYPES, REAL, Tables, make_tables, save_planes, small_config

__all__ = ["DTYPES", "REAL", "Tables", "make_tables", "save_planes", "small_config"]

GOLDEN = {  # (layer, tensor-parallel size): boundaries of the ranks, then bytes of each dsv41en1 file; rule heads
    (1, 2): ([0, 192001740, 384006168], [50688463456, 50689173088]),
    (1, 3): ([0, 128000880, 256002934, 384006168], [33792236416, 33792546352, 33792857872]),
    (1, 4): (
        [0, 96000564, 192001740, 288003654, 384006168],
        [25344152992, 25344314560, 25344509392, 25344667792],
    ),
    (14, 2): ([0, 192007016, 384016682], [50689856320, 50690555920]),
    (14, 3): ([0, 128004290, 256009984, 384016682], [33793136656, 33793507312, 33793772368]),
    (14, 4): (
        [0, 96003054, 192007016, 288011564, 384016682],
        [25344810352, 25345050064, 25345204768, 25345355248],
    ),
}
GOLDEN_ROWS = {  # the same for rule rows
    (1, 2): ([0, 192003084, 384006168], [50688818272] * 2),
    (1, 3): ([0, 128002056, 256004112, 384006168], [33792546880] * 3),
    (1, 4): ([0, 96001542, 192003084, 288004626, 384006168], [25344411184] * 4),
    (14, 4): (
        [0, 96004170, 192008341, 288012511, 384016682],
        [25345104976, 25345105240, 25345104976, 25345105240],
    ),
}


def reference_bytes(file: EngramFile, rows: np.ndarray[Any, Any], chunk_pages: int = 2048) -> bytes:
    """A whole file as the specification says it, from this rank's rows `[n, row_bytes]`: NumPy only."""
    if file.format == "dsv41en1":
        return file.header() + rows.tobytes()
    per_page = 4096 // file.row_bytes
    pages = np.zeros((-(-len(rows) // per_page), 4096), np.uint8)
    padded = np.zeros((len(pages) * per_page, file.row_bytes), np.uint8)
    padded[: len(rows)] = rows
    pages[:, : per_page * file.row_bytes] = padded.reshape(len(pages), -1)
    payload = pages.tobytes()
    chunk = chunk_pages * 4096
    sums = [xxh64(payload[at : at + chunk]) for at in range(0, len(payload), chunk)]
    table = b"".join(value.to_bytes(8, "little") for value in sums)
    header = replace(file, table_digest=hashlib.sha256(table).digest()).header()
    return header + payload + table.ljust(-(-len(table) // 4096) * 4096, b"\0")


def xxh64(data: bytes) -> int:
    """XXH64 with seed 0, from its specification."""
    p1, p2, p3, p4, p5 = (
        0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
    )  # fmt: skip
    mask = 2**64 - 1

    def rotl(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) & mask

    def mix(lane: int, x: int) -> int:
        return rotl((lane + x * p2) & mask, 31) * p1 & mask

    stripes = len(data) // 32
    digest = p5
    if stripes:
        lanes = [(p1 + p2) & mask, p2, 0, -p1 & mask]
        words = struct.unpack_from(f"<{stripes * 4}Q", data)
        for at in range(0, len(words), 4):
            lanes = [mix(lane, word) for lane, word in zip(lanes, words[at : at + 4], strict=True)]
        digest = sum(map(rotl, lanes, (1, 7, 12, 18))) & mask
        for lane in lanes:
            digest = ((digest ^ mix(0, lane)) * p1 + p4) & mask
    digest = (digest + len(data)) & mask
    at = stripes * 32
    for size in (8, 4, 1):
        while at + size <= len(data):
            word = int.from_bytes(data[at : at + size], "little")
            at += size
            if size == 8:
                digest = (rotl(digest ^ mix(0, word), 27) * p1 + p4) & mask
            elif size == 4:
                digest = (rotl(digest ^ word * p1 & mask, 23) * p2 + p3) & mask
            else:
                digest = rotl(digest ^ word * p5 & mask, 11) * p1 & mask
    digest = (digest ^ digest >> 33) * p2 & mask
    digest = (digest ^ digest >> 29) * p3 & mask
    return digest ^ digest >> 32


@contextmanager
def mounted_ext4(folder: Path, mib: int, what: str) -> Iterator[tuple[Path, Path]]:
    """An ext4 of so many MiB in `folder`: its image and where it is mounted. Skips `what` where that cannot be."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4") or not Path("/dev/loop-control").exists():
        pytest.skip(f"NOT TESTED: {what} needs root, mkfs.ext4 and loop devices")
    image, mount = folder / "image", folder / "mount"
    mount.mkdir()
    with image.open("wb") as stream:
        stream.truncate(mib * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-O", "^has_journal", image], check=True)
    done = subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"NOT TESTED: {what} needs loop mounts ({done.stderr.strip()})")
    try:
        yield image, mount
    finally:
        subprocess.run(["umount", mount], check=True)
