# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The native library by ctypes; csrc/engram_io.h says what its functions do."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from sparkwright_kernels.engram.build import LIBRARY
from sparkwright_kernels.engram.errors import EngramError

PATH_VARIABLE = "SPARKWRIGHT_ENGRAM_IO"
"""Names the library, where it is not beside this module."""

VERSION = 1
AUTO, IO_URING, THREADS = 0, 1, 2


class Options(ctypes.Structure):
    _fields_ = [
        ("payload", ctypes.c_uint64),
        ("file_bytes", ctypes.c_uint64),
        ("lo", ctypes.c_int64),
        ("hi", ctypes.c_int64),
        ("row_bytes", ctypes.c_uint32),
        ("rows_per_page", ctypes.c_uint32),
        ("queue_depth", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("backend", ctypes.c_uint32),
        ("cache_rows", ctypes.c_uint32),
    ]


STATS = (
    "batches", "rows", "unique_rows", "absent", "out_of_range", "reads", "read_bytes", "cache_hits", "cache_misses",
    "errors",
)  # fmt: skip


class Stats(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in STATS]


class Job(ctypes.Structure):
    _fields_ = [
        ("reader", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("out", ctypes.c_void_p),
        ("stride", ctypes.c_uint64),
        ("id_bytes", ctypes.c_uint32),
        ("status", ctypes.c_int32),
        ("error_offset", ctypes.c_uint64),
        ("error_got", ctypes.c_uint64),
        ("error_needed", ctypes.c_uint64),
    ]


def library_path() -> Path:
    return Path(os.environ.get(PATH_VARIABLE) or Path(__file__).parent / LIBRARY)


@cache
def library() -> ctypes.CDLL:
    """Load it; its functions run without the interpreter's lock. Raises EngramError where it is not built."""
    path = library_path()
    build = f"install a C++ compiler (and liburing-dev) and the package again, or set {PATH_VARIABLE}"
    try:
        loaded = ctypes.CDLL(str(path))
        found = int(loaded.engram_io_version())
    except (OSError, AttributeError) as reason:
        raise EngramError(path, str(reason), "the package's native library", build) from None
    if found != VERSION:
        raise EngramError(path, f"interface {found}", f"interface {VERSION}", build)
    u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    loaded.engram_open.argtypes = [
        ctypes.c_char_p, ctypes.POINTER(Options), ctypes.POINTER(pointer), ctypes.POINTER(u32), ctypes.POINTER(u32),
        ctypes.POINTER(ctypes.c_int32),
    ]  # fmt: skip
    loaded.engram_close.argtypes = [pointer]
    loaded.engram_close.restype = None
    loaded.engram_run.argtypes = [pointer]
    loaded.engram_run.restype = None
    loaded.engram_get_stats.argtypes = [pointer, ctypes.POINTER(Stats)]
    loaded.engram_get_stats.restype = None
    loaded.engram_pack.argtypes = [pointer, pointer, pointer, u64, u32, u32, u32]
    loaded.engram_pack.restype = u64
    loaded.engram_xxh64.argtypes = [pointer, u64]
    loaded.engram_xxh64.restype = u64
    return loaded
