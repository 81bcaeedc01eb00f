# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The gather's CUDA library, built without a GPU: registers, and what it does with a read that fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sparkwright_kernels.engram import gather_native
from sparkwright_kernels.engram.errors import EngramError

NVCC = gather_native.find_nvcc()
NEEDS_NVCC = pytest.mark.skipif(NVCC is None, reason="NOT TESTED: no nvcc: CUDA's, or the wheels nvidia-cuda-nvcc, ..")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    library = tmp_path_factory.mktemp("gather") / "lib.so"
    assert NVCC
    return library, gather_native.build(NVCC, library)


@NEEDS_NVCC
def test_no_kernel_spills(built: tuple[Path, str]) -> None:
    kernels = [line for line in built[1].splitlines() if "spill" in line]
    assert len(kernels) == 12 * len(gather_native.TARGETS)
    assert all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line for line in kernels), built[1]
    assert "sm_121a" in built[1]


@NEEDS_NVCC
@pytest.mark.parametrize(("status", "code"), [(0, 0), (5, -signal.SIGABRT)])
def test_a_failed_read_ends_the_process(built: tuple[Path, str], status: int, code: int) -> None:
    program = f"""
import ctypes
from pathlib import Path
from sparkwright_kernels.engram.gather_native import Read, load
run = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int32))(lambda job: job.__setitem__(0, {status}))
job = ctypes.c_int32(-1)
address = ctypes.addressof(job)
read = Read(ctypes.cast(run, ctypes.c_void_p), address, address, b"some/file")
load(Path({str(built[0])!r})).sparkwright_read_now(read)
assert job.value == 0
"""
    environment = {"PYTHONPATH": str(gather_native.SOURCE.parents[3])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    told = "some/file: found Input/output error, needed its rows; the engine ends, since rows are missing\n"
    assert done.stderr == (told if status else "")


@NEEDS_NVCC
def test_a_build_that_fails_leaves_no_library(tmp_path: Path) -> None:
    assert NVCC
    with pytest.raises(EngramError, match="nvcc's error"):
        gather_native.build(NVCC, tmp_path / "lib.so", ["1"])
    assert not list(tmp_path.iterdir())


def test_a_library_that_is_not_there_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match=r"build it with: python -m sparkwright_kernels.engram.gather_native"):
        gather_native.load(tmp_path / "lib.so")
