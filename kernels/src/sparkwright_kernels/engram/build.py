# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Builds libsparkwright_engram_io.so: `python3 build.py TARGET`. For setup.py's sake it imports nothing of ours."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = "libsparkwright_engram_io.so"
SOURCE = Path(__file__).parent / "csrc" / "engram_io.cpp"

_FLAGS = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
# liburing goes into the library where its archive is installed, so that the package needs it nowhere else.
_LIBURING: tuple[list[str], ...] = (
    ["-DSPARKWRIGHT_LIBURING", "-Wl,-Bstatic", "-luring", "-Wl,-Bdynamic", "-Wl,--exclude-libs,ALL"],
    ["-DSPARKWRIGHT_LIBURING", "-luring"],
    [],
)


def build(target: Path) -> str:
    """Compile to `target`; say how it reads. Raises OSError without a compiler, CalledProcessError if it fails.

    `CXX` names the compiler (c++ otherwise).
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    target.parent.mkdir(parents=True, exist_ok=True)
    for liburing in _LIBURING:
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            made = Path(directory) / LIBRARY
            command = [*compiler, *_FLAGS, str(SOURCE), "-o", str(made), *liburing]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                made.replace(target)
                return "io_uring, else a pool of threads" if liburing else "a pool of threads only: no liburing found"
    print(done.stderr, file=sys.stderr)
    raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)


if __name__ == "__main__":
    print(f"{sys.argv[1]}: {build(Path(sys.argv[1]))}")
