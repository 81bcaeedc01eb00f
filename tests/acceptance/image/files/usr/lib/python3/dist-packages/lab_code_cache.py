# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Keeps what Python compiles of zip archives, at every start of Python.

Ansible sends a module with its imports as an archive of sources. To compile them takes longer than all the rest of the
module under emulation, and they are the same at each task; their content alone decides.
"""

import _imp
import marshal
import os
import zipimport

DIRECTORY = "/var/cache/lab-code"  # of root, so that nobody else's code is run
compile_source = zipimport._compile_source


def cached(path, source):
    name = f"{DIRECTORY}/{_imp.source_hash(0, source).hex()}"
    try:
        with open(name, "rb") as file:
            return marshal.load(file)
    except (OSError, EOFError, ValueError):
        code = compile_source(path, source)
    try:
        with open(f"{name}.{os.getpid()}", "wb") as file:
            marshal.dump(code, file)
        os.rename(file.name, name)
    except OSError:
        pass
    return code


zipimport._compile_source = cached
