# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""SGLang's server with the API key of a file, which thus stands in no command line that others can read."""

from __future__ import annotations

import os
import runpy
import sys

FILE = os.environ.get("SPARKWRIGHT_API_KEY_FILE", "/run/secrets/sparkwright/api_key")

if __name__ == "__main__":
    # Only the head has the file, and only it is asked.
    if os.path.isdir(os.path.dirname(FILE)):
        with open(FILE, encoding="ascii") as stream:
            key = stream.read().strip()
        if not key:
            raise SystemExit(f"{FILE} is empty; needed the API key")
        sys.argv += ["--api-key", key]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
