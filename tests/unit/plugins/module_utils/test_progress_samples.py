# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""How far a module is: numbers, words, and the file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils.progress import (
    Progress,
    Sample,
    amount,
    duration,
    parse,
)

GIB = 1024**3


@pytest.mark.parametrize(
    ("sample", "line"),
    [
        (Sample("fetching", 0, 4 * GIB), "fetching 0.0 of 4.0 GiB (0 %)"),
        (
            Sample("fetching", GIB, 4 * GIB, 110 * 1024**2),
            "fetching 1.0 of 4.0 GiB (25 %), 110.0 MiB/s, 28 s left",
        ),
        (Sample("joining", 3, 7, 0.0), "joining 3 of 7 bytes (42 %), 0 bytes/s"),
        (Sample("zfs snapshot", 0, 0, 5.0), "zfs snapshot"),
    ],
)
def test_line(sample: Sample, line: str) -> None:
    assert sample.line() == line


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (2**50, "1048576.0 GiB")]
)
def test_amount(size: int, text: str) -> None:
    assert amount(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (99, "99 s"), (100, "2 min"), (5900, "98 min"), (12000, "3 h 20 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_rate_is_that_of_the_last_seconds() -> None:
    progress = Progress("")
    progress.begin("copying", 10_000)
    assert progress.sample(0.0) == Sample("copying", 0, 10_000, None)
    progress.add(1000)
    assert progress.sample(10.0).rate == 100
    # Twenty seconds on, the first ten no longer count.
    assert progress.sample(30.0).rate == 0
    progress.add(20_000)
    assert progress.sample(31.0).done_bytes == 10_000, "never more than all"
    progress.begin("joining", 5)
    assert progress.sample(32.0) == Sample("joining", 0, 5, None), "a new piece of work begins anew"


def test_what_others_write_is_measured() -> None:
    progress, sizes = Progress(""), iter([10, 20])
    progress.begin("fetching", 100, lambda: next(sizes))
    assert [progress.sample(0.0).done_bytes, progress.sample(1.0).done_bytes] == [10, 20]


def test_the_file_is_whole_at_any_time_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run/one.json"
    progress = Progress(str(path), interval_s=0.001)
    progress.begin("verifying", 1000)
    seen = set()
    end = time.monotonic() + 10
    while len(seen) < 20 and time.monotonic() < end:
        progress.add(1)
        if path.exists():
            sample = parse(path.read_text())
            assert sample is not None
            seen.add(sample)
    assert len(seen) >= 20
    progress.close()
    assert list(path.parent.iterdir()) == []


def test_a_place_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    progress = Progress(str(tmp_path / "file/one.json"), interval_s=0.001)
    progress.begin("verifying", 1000)
    progress.add(1)
    progress.close()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"what": "x", "done_bytes": "y"})])
def test_half_a_file_is_no_sample(text: str) -> None:
    assert parse(text) is None
