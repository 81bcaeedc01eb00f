# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA library of the gather: building it with nvcc, loading it with ctypes. To build needs no GPU; never torch.

python -m sparkwright_kernels.engram.gather_native        # writes libsparkwright_gather.so beside this file
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from sparkwright_kernels.engram.errors import EngramError

SOURCE = Path(__file__).parent / "csrc" / "gather.cu"
LIBRARY = Path(__file__).parent / "libsparkwright_gather.so"
TARGETS = ("90", "121a")
"""GPU architectures built for: H100 and H200, on which the kernel is tested, and GB10."""

_REPAIR = f"build it with: python -m {__name__}"


class Read(ctypes.Structure):
    """struct sparkwright_read of gather.cu."""

    _fields_ = [("run", c_void_p), ("job", c_void_p), ("status", c_void_p), ("what", c_char_p)]


def find_nvcc() -> Path | None:
    """The CUDA compiler: $CUDA_HOME's, the one on PATH, or that of NVIDIA's wheels."""
    places = [Path(home) / "bin" for home in [os.environ.get("CUDA_HOME")] if home]
    places += [Path(found).parent for found in [shutil.which("nvcc")] if found]
    spec = find_spec("nvidia")
    places += [path for root in (spec and spec.submodule_search_locations) or [] for path in Path(root).glob("cu*/bin")]
    return next((path / "nvcc" for path in places if (path / "nvcc").is_file()), None)


def build(nvcc: Path, library: Path = LIBRARY, targets: Sequence[str] = TARGETS) -> str:
    """Compile SOURCE to `library`, which appears whole or not at all; return what ptxas says of every kernel.

    Raises EngramError with nvcc's own words.
    """
    part = library.with_suffix(".part.so")
    generate = [f"-gencode=arch=compute_{target},code=sm_{target}" for target in targets]
    host = ["-shared", "-Xcompiler=-fPIC,-fvisibility=hidden", "-cudart=static", f"-L{nvcc.parents[1] / 'lib'}"]
    command = [str(nvcc), "-O3", "-std=c++17", "-Xptxas=-v", *generate, *host, "-o", str(part), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        part.unlink(missing_ok=True)
        raise EngramError(SOURCE.name, f"nvcc's error: {done.stderr.strip()}", "a successful build")
    part.replace(library)
    return done.stderr


@cache
def load(library: Path = LIBRARY) -> ctypes.CDLL:
    """The library, its functions declared (gather.cu says what they take); raise EngramError if it is not there."""
    try:
        lib = ctypes.CDLL(str(library))
    except OSError as reason:
        raise EngramError(library, str(reason), "the CUDA library of the gather", _REPAIR) from None
    lib.sparkwright_gather.restype = c_int
    lib.sparkwright_gather.argtypes = [c_void_p, *[c_int64] * 4, c_void_p, c_int, c_int64, c_void_p, c_int, c_void_p]
    lib.sparkwright_read.restype = c_int
    lib.sparkwright_read.argtypes = [c_void_p, c_int64, c_void_p, *[c_int64] * 3, ctypes.POINTER(Read), c_void_p]
    lib.sparkwright_read_now.restype = None
    lib.sparkwright_read_now.argtypes = [ctypes.POINTER(Read)]
    lib.sparkwright_device_pointer.restype = c_uint64
    lib.sparkwright_device_pointer.argtypes = [c_void_p]
    lib.sparkwright_cuda_error.restype = c_char_p
    lib.sparkwright_cuda_error.argtypes = [c_int]
    return lib


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}", description="Build the gather's CUDA library.")
    parser.add_argument("--nvcc", type=Path, default=find_nvcc(), help="the CUDA compiler, 13.0 or newer")
    parser.add_argument("--output", type=Path, default=LIBRARY)
    parser.add_argument("--target", action="append", help=f"GPU architecture (default: {', '.join(TARGETS)})")
    args = parser.parse_args(argv)
    try:
        if args.nvcc is None:
            repair = "install it, or the wheels nvidia-cuda-{nvcc,crt,runtime,cccl} and nvidia-nvvm"
            raise EngramError("nvcc", "none", "CUDA's compiler", repair)
        report = build(args.nvcc, args.output, args.target or TARGETS)
    except EngramError as error:
        print(error, file=sys.stderr)
        return 1
    print(report, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
