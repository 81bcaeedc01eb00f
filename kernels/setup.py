# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Builds the native reader into the package. Without a C++ compiler the rest is installed, and a warning says so."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ENGRAM = "sparkwright_kernels/engram"
spec = importlib.util.spec_from_file_location("engram_build", Path(__file__).parent / "src" / ENGRAM / "build.py")
engram_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engram_build)


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            target = Path(__file__).parent / "src" / ENGRAM / engram_build.LIBRARY
        else:
            target = Path(self.build_lib) / ENGRAM / engram_build.LIBRARY
        target.unlink(missing_ok=True)  # of an earlier build
        try:
            self.announce(f"{target.name}: {engram_build.build(target)}", 4)
        except OSError as reason:
            self.warn(f"{target.name} is not built, Engram tables cannot be packed or read: no C++ compiler ({reason})")


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        # The library knows nothing of Python: one wheel for every version of it.
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution)
