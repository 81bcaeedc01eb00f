# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Rows as they are in the file, through io_uring and through threads, and every way in which they cannot be had."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engram_support import mounted_ext4, reference_bytes, small_config, xxh64
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sparkwright_kernels.engram import native
from sparkwright_kernels.engram.errors import EngramError
from sparkwright_kernels.engram.formats import EngramFile, planned
from sparkwright_kernels.engram.layout import EngramLayout
from sparkwright_kernels.engram.reader import EngramReader

LAYOUT = EngramLayout.from_config(small_config(1500))
FILES = {format: planned(LAYOUT, format, 14, "heads", 1, 2) for format in ("dsv41en1", "pages")}  # type: ignore[arg-type]
Open = Callable[..., EngramReader]


@pytest.fixture(autouse=True)
def built(engram_library: Path | None) -> None:
    if engram_library is None:
        pytest.skip("NOT TESTED: the native reader needs a C++ compiler")


@pytest.fixture(scope="module")
def rows() -> np.ndarray[Any, Any]:
    """What rank 1 holds, never a zero byte: zeros are told from rows."""
    rng = np.random.default_rng(1)
    return rng.integers(1, 256, (FILES["pages"].rows.rows, 264), np.uint8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, rows: np.ndarray[Any, Any]) -> Path:
    path = tmp_path_factory.mktemp("engram")
    for format, file in FILES.items():
        (path / format).write_bytes(reference_bytes(file, rows))
    return path


@pytest.fixture(params=["io_uring", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring" and not native.library().engram_has_io_uring():
        pytest.skip("NOT TESTED: io_uring; liburing is not installed")
    return str(request.param)


@pytest.fixture
def open_reader(directory: Path) -> Iterator[Open]:
    opened: list[EngramReader] = []

    def opener(format: str, **options: Any) -> EngramReader:
        try:
            opened.append(EngramReader(directory / format, FILES[format], **options))
        except EngramError as error:
            if options.get("backend") == "io_uring" and error.repair:
                pytest.skip(f"NOT TESTED: io_uring is refused here: {error}")
            raise
        return opened[-1]

    yield opener
    for reader in opened:
        reader.close()


def expected(rows: np.ndarray[Any, Any], file: EngramFile, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    held = (ids >= file.rows.lo) & (ids < file.rows.hi)
    result = np.zeros((len(ids), 264), np.uint8)
    result[held] = rows[ids[held] - file.rows.lo]
    return result


@pytest.mark.parametrize("format", FILES)
@pytest.mark.parametrize("count, depth", [(0, 8), (1, 1), (24, 128), (96, 4), (5000, 128), (5000, 1)])
def test_rows(format: str, backend: str, count: int, depth: int, open_reader: Open, rows: Any) -> None:
    file = FILES[format]
    reader = open_reader(format, backend=backend, queue_depth=depth, threads=min(depth, 16))
    assert reader.backend == backend
    ids = np.random.default_rng(count).integers(file.rows.lo, file.rows.hi, count)
    out = np.full((count, 264), 7, np.uint8)
    reader.read(ids, out)
    assert np.array_equal(out, expected(rows, file, ids))
    stats = reader.stats
    assert (stats.batches, stats.rows, stats.unique_rows) == (1, count, len(set(ids)))
    assert stats.errors == stats.absent == stats.out_of_range == 0


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch(data: st.DataObject, open_reader: Open, rows: Any, backend: str) -> None:
    """Ids near each other, twice, absent, outside; 32 and 64 bits; strides; with and without a cache."""
    format = data.draw(st.sampled_from(sorted(FILES)))
    file = FILES[format]
    near = data.draw(st.integers(file.rows.lo, file.rows.hi - 1))
    some = st.one_of(
        st.integers(near - 40, near + 40), st.integers(file.rows.lo, file.rows.hi - 1),
        st.sampled_from([-1, -2, 0, file.rows.lo - 1, file.rows.hi, file.rows.hi - 1, file.rows.lo, 2**31 - 1]),
    )  # fmt: skip
    ids = np.array(data.draw(st.lists(some, max_size=80)), data.draw(st.sampled_from([np.int32, np.int64])))
    stride = data.draw(st.sampled_from([264, 272, 512]))
    reader = open_reader(
        format, backend=backend, queue_depth=8, threads=4, cache_bytes=data.draw(st.sampled_from([0, 9000]))
    )
    wanted = expected(rows, file, ids.astype(np.int64))
    for _ in range(2):
        out = np.full((len(ids), stride), 7, np.uint8)
        reader.read(ids, out, stride)
        assert np.array_equal(out[:, :264], wanted)
        assert (out[:, 264:] == 7).all()
    stats = reader.stats
    outside = (ids < file.rows.lo) | (ids >= file.rows.hi)
    assert stats.absent == 2 * np.count_nonzero(ids == -1)
    assert stats.out_of_range == 2 * np.count_nonzero(outside & (ids != -1))
    assert stats.unique_rows == 2 * len(set(ids[~outside].tolist()))
    reader.close()


@pytest.mark.parametrize("format, blocks", [("dsv41en1", 1.0625), ("pages", 1.0)])
def test_blocks_per_row(format: str, blocks: float, open_reader: Open, backend: str) -> None:
    """One block a row in our format, 6.25 % more in the published one: counted over every row, one batch each."""
    file, reader = FILES[format], open_reader(format, backend=backend, threads=2)
    out = np.empty((1, 264), np.uint8)
    ids = range(file.rows.lo, file.rows.lo + 512)  # the pattern of the published format repeats after 512
    for row in ids:
        reader.read(np.array([row]), out)
    assert reader.stats.reads == 512
    assert reader.stats.read_bytes / 4096 / 512 == blocks


def test_a_row_is_read_once_and_neighbours_together(open_reader: Open, rows: Any, backend: str) -> None:
    file, reader = FILES["pages"], open_reader("pages", backend=backend)
    out = np.empty((2000, 264), np.uint8)
    ids = np.repeat(file.rows.lo + np.arange(0, 20), 100)
    reader.read(ids, out)
    assert (reader.stats.reads, reader.stats.read_bytes, reader.stats.unique_rows) == (1, 2 * 4096, 20)
    # Blocks end to end are read 64 KiB at a time.
    reader.read(file.rows.lo + np.arange(15 * 64), np.empty((15 * 64, 264), np.uint8))
    assert (reader.stats.reads, reader.stats.read_bytes) == (1 + 4, 66 * 4096)


def test_the_cache(open_reader: Open, rows: Any) -> None:
    file, reader = FILES["pages"], open_reader("pages", cache_bytes=264 * 8 * 64)
    ids = file.rows.lo + np.arange(64) * 7
    out = np.empty((64, 264), np.uint8)
    for _ in range(3):
        out[:] = 7
        reader.read(ids, out)
        assert np.array_equal(out, expected(rows, file, ids))
    stats = reader.stats
    assert stats.cache_misses + stats.cache_hits == stats.unique_rows == 192
    assert stats.cache_hits > 100 and stats.reads < 80
    assert open_reader("pages").stats.cache_misses == 0


def test_buffers(open_reader: Open, rows: Any) -> None:
    file, reader = FILES["pages"], open_reader("pages")
    ids = [file.rows.lo + 3, -1]
    wanted = rows[3].tobytes() + bytes(264)
    for out in (bytearray(b"\7" * 528), memoryview(bytearray(600)), mmap.mmap(-1, 528), (ctypes.c_ubyte * 528)()):
        reader.read(ids, out)
        assert bytes(out)[:528] == wanted
    memory = np.full(528, 7, np.uint8)
    reader.read(ids, memory.ctypes.data)
    assert memory.tobytes() == wanted
    for out, told in (
        (bytes(528), "read-only"),
        (bytearray(527), "found 527 bytes, writable, needed 528"),
        (np.empty((2, 528), np.uint8)[:, ::2], "contiguous"),
    ):
        with pytest.raises(EngramError, match=told):
            reader.read(ids, out)
    for wrong in (np.array([1.0]), np.arange(8)[::2], np.array([1], np.uint64)):
        with pytest.raises(EngramError, match="contiguous int64 or int32"):
            reader.read(wrong, memory)
    with pytest.raises(EngramError, match="at least 264, a row"):
        reader.read(ids, memory, 100)
    reader.close()
    reader.close()
    with pytest.raises(EngramError, match="closed"):
        reader.read(ids, memory)


def test_many_threads(open_reader: Open, rows: Any, backend: str) -> None:
    file, reader = FILES["pages"], open_reader("pages", backend=backend, queue_depth=16, threads=8, cache_bytes=10000)
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            ids = rng.integers(file.rows.lo - 5, file.rows.hi, 96)
            out = np.empty((96, 264), np.uint8)
            reader.read(ids, out)
            if not np.array_equal(out, expected(rows, file, ids)):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and reader.stats.batches == 240


def test_a_file_of_something_else(directory: Path) -> None:
    for change in ({"rank": 0, "rows": LAYOUT.shard(14, "heads", 0, 2)}, {"layer": 1}, {"rule": "rows"}, {"ranks": 4}):
        with pytest.raises(EngramError, match="needed"):
            EngramReader(directory / "pages", replace(FILES["pages"], **change))  # type: ignore[arg-type]
    with pytest.raises(EngramError, match="format dsv41en1, needed pages"):
        EngramReader(directory / "dsv41en1", FILES["pages"])
    for options, told in (
        ({"queue_depth": 0}, "queue_depth: found 0, needed 1 to 4096"),
        ({"threads": 2000}, "threads: found 2000"),
        ({"backend": "aio"}, "one of auto, io_uring, threads"),
        ({"cache_bytes": -300}, "cache_bytes"),
    ):
        with pytest.raises(EngramError, match=told):
            EngramReader(directory / "pages", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FILES)
def test_a_file_cut_short(format: str, directory: Path, tmp_path: Path, backend: str, rows: Any) -> None:
    """Before it is opened, and while it is open: an error and NaN, never zeros; rows before the cut are still right."""
    path, file = tmp_path / "file", FILES[format]
    shutil.copy(directory / format, path)
    last = file.rows.rows - 1
    with EngramReader(path, file, backend=backend, queue_depth=4, threads=4) as reader:  # type: ignore[arg-type]
        os.truncate(path, file.offset(last) + 263)
        out = np.zeros((3, 264), np.uint8)
        ids = np.array([file.rows.lo, -1, file.rows.lo + last])
        with pytest.raises(EngramError, match=r"the file's end after \d+ bytes at byte \d+.*pack it again"):
            reader.read(ids, out)
        assert (out == 0xFF).all()
        reader.read(ids[:2], out)
        assert np.array_equal(out[0], rows[0]) and not out[1].any()
        os.truncate(path, file.offset(last) // 4096 * 4096)
        with pytest.raises(EngramError, match="the file's end after 0 bytes"):
            reader.read(ids[2:], out)
        many = file.rows.lo + np.arange(file.rows.rows)
        with pytest.raises(EngramError, match="the file's end"):
            reader.read(many, np.empty((len(many), 264), np.uint8))
        assert reader.stats.errors == 3
    with pytest.raises(EngramError, match="as its header says"):
        EngramReader(path, file)


def test_an_io_error(directory: Path, tmp_path: Path, backend: str) -> None:
    """A disk whose last blocks are gone: the kernel reports EIO."""
    with mounted_ext4(tmp_path, 48, "an I/O error") as (image, mount):
        file = FILES["dsv41en1"]
        shutil.copy(directory / "dsv41en1", mount / "file")
        subprocess.run(["sync", "-f", mount / "file"], check=True)
        try:
            with EngramReader(mount / "file", file, backend=backend) as reader:  # type: ignore[arg-type]
                assert reader.direct
                os.truncate(image, 4 * 2**20)
                out = np.zeros((file.rows.rows, 264), np.uint8)
                with pytest.raises(EngramError, match="found Input/output error, needed .*kernel's log"):
                    reader.read(np.arange(file.rows.lo, file.rows.hi), out)
                assert (out == 0xFF).all() and reader.stats.errors == 1
        finally:
            os.truncate(image, 48 * 2**20)


# Refuses io_uring_setup as Docker's default seccomp profile does: EPERM, for this process.
DENIED = """
import ctypes, logging, struct, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO, format="%(message)s")
libc = ctypes.CDLL(None, use_errno=True)
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50000 | 1), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
filter = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(program))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0
import numpy as np
from sparkwright_kernels.engram.errors import EngramError
from sparkwright_kernels.engram.reader import EngramReader
path = Path(sys.argv[1])
with EngramReader(path) as reader:
    ids = np.arange(reader.file.rows.lo, reader.file.rows.lo + 1000)
    out = np.zeros((1000, 264), np.uint8)
    reader.read(ids, out)
    sys.stdout.buffer.write(out.tobytes())
    print(reader.backend, reader.denied, sep=": ", file=sys.stderr)
try:
    EngramReader(path, backend="io_uring")
except EngramError as error:
    print(error, file=sys.stderr)
"""


def test_where_io_uring_is_forbidden(directory: Path, rows: Any) -> None:
    if not native.library().engram_has_io_uring():
        pytest.skip("NOT TESTED: a forbidden io_uring; liburing is not installed")
    done = subprocess.run(
        [sys.executable, "-c", DENIED, directory / "pages"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    told = done.stderr.decode()
    assert done.returncode == 0, told
    assert done.stdout == rows[:1000].tobytes()
    assert "threads: Operation not permitted" in told
    assert "io_uring is refused (Operation not permitted); 32 threads read instead" in told
    assert "found Operation not permitted, needed a reader with backend io_uring" in told


def test_without_liburing(directory: Path, tmp_path: Path, rows: Any) -> None:
    """Built where liburing is not installed: threads, and it says so."""
    from sparkwright_kernels.engram import build

    library = tmp_path / "library.so"
    subprocess.run(
        [*os.environ.get("CXX", "c++").split(), "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", build.SOURCE]
        + ["-o", library], check=True,
    )  # fmt: skip
    code = textwrap.dedent("""
        import sys, pathlib, numpy as np
        from sparkwright_kernels.engram.reader import EngramReader
        with EngramReader(pathlib.Path(sys.argv[1])) as reader:
            out = np.zeros((9, 264), np.uint8)
            reader.read(np.arange(reader.file.rows.lo, reader.file.rows.lo + 9), out)
            print(reader.backend, reader.denied, out.tobytes().hex())
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), native.PATH_VARIABLE: str(library)}
    command = [sys.executable, "-c", code, directory / "pages"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"threads Function not implemented {rows[:9].tobytes().hex()}\n", done.stderr


def test_without_the_library(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.PATH_VARIABLE, str(tmp_path / "none.so"))
    native.library.cache_clear()
    try:
        with pytest.raises(EngramError, match="native library; install a C.. compiler"):
            EngramReader(directory / "pages")
    finally:
        native.library.cache_clear()


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200), st.integers(0, 40))
def test_xxh64(data: bytes, repeat: int) -> None:
    assert native.library().engram_xxh64(data * repeat, len(data) * repeat) == xxh64(data * repeat)


def test_xxh64_as_published() -> None:
    """The algorithm's own test vectors."""
    for data, digest in ((b"", 0xEF46DB3751D8E999), (b"a", 0xD24EC4F1A98C6E5B), (b"abc", 0x44BC2CF5AD770999)):
        assert native.library().engram_xxh64(data, len(data)) == xxh64(data) == digest
