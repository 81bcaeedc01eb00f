# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Small files that the processes of one run of Ansible have in common, on the controller."""

from __future__ import annotations

from pathlib import Path

from ansible import constants


def run_file(name: str) -> Path:
    """A name in Ansible's own directory for this run: all forks have it, and it is removed at the end."""
    return Path(constants.DEFAULT_LOCAL_TMP) / name


def put(path: Path, text: str) -> None:
    """Write a file in one step, so that who reads it never finds half of it. Raises OSError."""
    partial = path.with_suffix(".tmp")
    partial.write_text(text)
    partial.rename(path)
