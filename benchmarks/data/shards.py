# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What join.py and verify.py have in common: bytes to work on, and the time that processors spent."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator

MIB = 2**20


def blocks(number: int, size: int) -> Iterator[memoryview]:
    """The bytes of a file: the same each time, and no two blocks of any two files alike."""
    block = bytearray(hashlib.shake_256(b"sparkwright").digest(8 * MIB))
    for start in range(0, size, len(block)):
        block[:16] = start.to_bytes(8, "little") + number.to_bytes(8, "little")
        yield memoryview(block)[: size - start]


def cpu() -> float:
    """Seconds that processors spent on this process and its children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
