# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Rows of an Engram file into a caller's buffer, at the speed of the disk.

    with EngramReader(path, expected) as reader:
        reader.read(ids, out)      # out[i] = the row of ids[i], 256 weights then 8 scales

A batch is sorted, each row read once, neighbouring blocks together, and many reads kept in flight by io_uring with
direct I/O; where the kernel refuses io_uring (Docker's seccomp profile does) a pool of threads reads instead. An id of
-1 gives a row of zeros, and so does one outside of the file's range, which is counted. Whatever else goes wrong raises.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparkwright_kernels.engram import native
from sparkwright_kernels.engram.errors import EngramError
from sparkwright_kernels.engram.formats import PAGE, EngramFile, check_file, read_file

Backend = Literal["auto", "io_uring", "threads"]
_BACKENDS: dict[Backend, int] = {"auto": native.AUTO, "io_uring": native.IO_URING, "threads": native.THREADS}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReaderStats:
    """Counters since the reader was opened. `unique_rows` counts each valid id of a batch once, `absent` ids of -1,
    `out_of_range` other ids that the file does not hold, `reads` what was asked of the disk, `cache_hits` and
    `cache_misses` unique rows, `errors` batches that raised.
    """

    batches: int
    rows: int
    unique_rows: int
    absent: int
    out_of_range: int
    reads: int
    read_bytes: int
    cache_hits: int
    cache_misses: int
    errors: int


class EngramReader:
    """An open Engram file. Any number of threads may read at once; it does not survive a fork.

    `expected` refuses a file of anything else (see formats.check_file). `backend` is the one asked for, then the one in
    use; `direct` tells whether reads bypass the page cache. `cache_bytes` of rows are kept in memory (0: none).
    """

    def __init__(
        self,
        path: Path,
        expected: EngramFile | None = None,
        *,
        backend: Backend = "auto",
        queue_depth: int = 128,
        threads: int = 32,
        cache_bytes: int = 0,
    ) -> None:
        self._handle = ctypes.c_void_p()
        self.path = path
        self.file = check_file(path, expected) if expected else read_file(path)
        rows = self.file.rows
        for name, value, most in (("queue_depth", queue_depth, 4096), ("threads", threads, 1024)):
            if not 0 < value <= most:
                raise EngramError(name, str(value), f"1 to {most}")
        if backend not in _BACKENDS:
            raise EngramError("backend", repr(backend), f"one of {', '.join(_BACKENDS)}")
        cache_rows = cache_bytes // self.file.row_bytes
        if not 0 <= cache_rows < 2**32:
            raise EngramError("cache_bytes", str(cache_bytes), f"0 to {(2**32 - 1) * self.file.row_bytes}")
        self._library = native.library()
        options = native.Options(
            PAGE, self.file.file_bytes, rows.lo, rows.hi, self.file.row_bytes, self.file.rows_per_page,
            queue_depth, threads, _BACKENDS[backend], cache_rows,
        )  # fmt: skip
        direct, used, denied = ctypes.c_uint32(), ctypes.c_uint32(), ctypes.c_int32()
        status = self._library.engram_open(
            os.fsencode(path), ctypes.byref(options), ctypes.byref(self._handle), ctypes.byref(direct),
            ctypes.byref(used), ctypes.byref(denied),
        )  # fmt: skip
        if status:
            asked = f"a reader with backend {backend}, queue depth {queue_depth}, {threads} threads"
            raise EngramError(path, os.strerror(status), asked, 'use backend "threads"' if denied.value else "")
        self.direct = bool(direct.value)
        self.backend: Backend = "io_uring" if used.value == native.IO_URING else "threads"
        self.denied = os.strerror(denied.value) if denied.value else ""
        _log.info("%s: reads with %s%s", path, self.backend, "" if self.direct else ", through the page cache")
        if self.denied:
            _log.warning("%s: io_uring is refused (%s); %d threads read instead", path, self.denied, threads)

    def read(self, ids: Any, out: Any, stride: int | None = None) -> None:
        """Write the row of each of `ids` to `out`, one after the other.

        `ids`: contiguous int64 or int32 (an array, or what NumPy makes one of). `out`: a writable contiguous buffer, or
        the address of one (pinned memory, say) with room for the rows, which is then not checked. Row i begins at byte
        i * `stride` (by default the row's size). Raises EngramError if a row cannot be read; every row of `out` is then
        NaN (0xff), never zeros or what was there.
        """
        job, _keep = self.job(ids, out, stride)
        self.run(job)

    def job(self, ids: Any, out: Any, stride: int | None = None) -> tuple[native.Job, tuple[Any, ...]]:
        """A batch for `run`, or for the library's `engram_run` as a CUDA host function; and what must outlive it."""
        if not self._handle:
            raise EngramError(self.path, "a closed reader", "an open one")
        numbers = np.asarray(ids, np.int64 if isinstance(ids, list) else None)
        if numbers.dtype not in (np.int64, np.int32) or not numbers.flags.c_contiguous:
            raise EngramError("ids", f"{numbers.dtype}, strides {numbers.strides}", "contiguous int64 or int32")
        stride = self.file.row_bytes if stride is None else stride
        if stride < self.file.row_bytes:
            raise EngramError("stride", f"{stride} bytes", f"at least {self.file.row_bytes}, a row")
        address, keep = out, None
        if not isinstance(out, int):
            keep = np.asarray(out if isinstance(out, np.ndarray) else memoryview(out))
            needed = stride * (numbers.size - 1) + self.file.row_bytes if numbers.size else 0
            if not keep.flags.c_contiguous or not keep.flags.writeable or keep.nbytes < needed:
                found = f"{keep.nbytes} bytes, {'writable' if keep.flags.writeable else 'read-only'}"
                raise EngramError("out", found, f"{needed} contiguous writable bytes for {numbers.size} rows")
            address = keep.ctypes.data
        job = native.Job(
            self._handle.value, numbers.ctypes.data, numbers.size, address, stride, numbers.dtype.itemsize, 0
        )
        return job, (numbers, keep)

    def run(self, job: native.Job) -> None:
        """Read a batch; raises as `read` does."""
        self._library.engram_run(ctypes.byref(job))
        self.check(job)

    def check(self, job: native.Job) -> None:
        """Raise what went wrong with a batch that has run."""
        if not job.status:
            return
        place = f" at byte {job.error_offset}" if job.error_needed else ""
        needed = f"{job.error_needed or 'the'} bytes{place} of {self.file.file_bytes}"
        if job.status == errno.ENODATA:
            found = f"the file's end after {job.error_got} bytes{place}"
            raise EngramError(self.path, found, needed, "the file was cut short after it was opened: pack it again")
        raise EngramError(self.path, os.strerror(job.status), needed, "the kernel's log says what the disk reported")

    @property
    def stats(self) -> ReaderStats:
        if not self._handle:
            raise EngramError(self.path, "a closed reader", "an open one")
        found = native.Stats()
        self._library.engram_get_stats(self._handle, ctypes.byref(found))
        return ReaderStats(*(getattr(found, name) for name in native.STATS))

    def close(self) -> None:
        """Close the file; no batch may be running."""
        if self._handle:
            self._library.engram_close(self._handle)
            self._handle = ctypes.c_void_p()

    def __enter__(self) -> EngramReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()
