# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""How far a long piece of work on a node is: written there by modules, shown by the controller. Private.

A module writes small JSON files into one directory of the node; the action plugin reads them while the module works.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Callable, Deque, Mapping, Optional, Tuple

_WINDOW_S = 20.0
_UNITS = ("bytes", "KiB", "MiB", "GiB")


@dataclass(frozen=True)
class Sample:
    """Where the work is: bytes done of `total_bytes`, bytes a second over the last seconds, None where unknown yet.

    Without `total_bytes` it is a step that nobody can measure.
    """

    what: str
    done_bytes: int
    total_bytes: int
    rate: Optional[float] = None

    @property
    def left_s(self) -> Optional[float]:
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate else None

    def line(self) -> str:
        """One line for a person: `fetching 1.2 of 4.0 GiB (30 %), 110.0 MiB/s, 26 s left`."""
        if not self.total_bytes:
            return self.what
        share = 100 * self.done_bytes // self.total_bytes
        text = f"{self.what} {_pair(self.done_bytes, self.total_bytes)} ({share} %)"
        if self.rate is None:
            return text
        left = "" if self.left_s is None else f", {duration(self.left_s)} left"
        return f"{text}, {amount(self.rate)}/s{left}"


def amount(size: float) -> str:
    """A number of bytes in the binary unit that suits it: `512 bytes`, `1.5 GiB`."""
    power = 0
    while size >= 1024 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.0f} bytes" if power == 0 else f"{size:.1f} {_UNITS[power]}"


def _pair(done: int, total: int) -> str:
    number, unit = amount(total).split()
    power = _UNITS.index(unit)
    return f"{done / 1024**power:.{0 if power == 0 else 1}f} of {number} {unit}"


def duration(seconds: float) -> str:
    """`50 s`, `12 min` or `3 h 20 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def parse(text: str) -> Optional[Sample]:
    """The sample of a progress file, None where there is none (yet) or half of one."""
    try:
        data: Mapping[str, Any] = json.loads(text)
        rate = data["rate"]
        return Sample(
            str(data["what"]),
            int(data["done_bytes"]),
            int(data["total_bytes"]),
            None if rate is None else float(rate),
        )
    except (ValueError, KeyError, TypeError):
        return None


class Progress:
    """Writes a sample a second into a file, in a thread of its own, until it is closed.

    The number of bytes done is what `add` was told, or what `measure` returns where the work is done by others. An
    empty path, or one that cannot be written, turns the file off: nobody's weights fail for want of a progress line.
    """

    def __init__(self, path: str, interval_s: float = 1.0) -> None:
        self._path = path
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._what, self._total, self._done = "", 0, 0
        self._measure: Optional[Callable[[], int]] = None
        self._seen: Deque[Tuple[float, int]] = deque()
        self._ended = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def begin(self, what: str, total_bytes: int = 0, measure: Optional[Callable[[], int]] = None) -> None:
        """Begin a piece of work: what it is called, and its bytes in all (0: none that can be counted)."""
        with self._lock:
            self._what, self._total, self._done, self._measure = what, total_bytes, 0, measure
            self._seen.clear()
        if self._path and self._thread is None:
            self._thread = threading.Thread(target=self._write_on, daemon=True)
            self._thread.start()

    def add(self, count: int) -> None:
        """Count bytes done; called from any thread."""
        with self._lock:
            self._done += count

    def sample(self, now: float) -> Sample:
        with self._lock:
            if self._measure is not None:
                with suppress(OSError):
                    self._done = self._measure()
            done = min(self._done, self._total)
            self._seen.append((now, done))
            while now - self._seen[0][0] > _WINDOW_S:
                self._seen.popleft()
            then, before = self._seen[0]
            rate = (done - before) / (now - then) if now > then else None
            return Sample(self._what, done, self._total, rate)

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)

    def _write_on(self) -> None:
        while not self._ended.is_set():
            temporary = f"{self._path}.tmp"
            try:
                os.makedirs(os.path.dirname(self._path), mode=0o755, exist_ok=True)
                with open(temporary, "w", encoding="utf-8") as stream:
                    json.dump(asdict(self.sample(time.monotonic())), stream)
                os.replace(temporary, self._path)
            except OSError:
                return
            self._ended.wait(self._interval_s)
