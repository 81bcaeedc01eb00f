# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Small files of a node that modules write whole: below a root, and not at all in check mode. Private."""

from __future__ import annotations

import os
import tempfile

from ansible.module_utils.basic import AnsibleModule


class Files:
    """Paths are relative to a root; `live` says whether that is the node's own."""

    def __init__(self, module: AnsibleModule, root: str) -> None:
        self.module = module
        self.root = os.path.abspath(root)
        self.live = os.path.realpath(self.root) == "/"

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def read(self, name: str) -> str:
        """The text of a file, "" where there is none."""
        try:
            with open(self.path(name), encoding="utf-8", errors="replace") as stream:
                return stream.read()
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def put(self, name: str, text: str) -> bool:
        """Have a file of mode 0644 with this text, or none where it is empty; returns whether that changes it."""
        path = self.path(name)
        if self.read(name) == text and os.path.exists(path) == bool(text):
            return False
        if self.module.check_mode:
            return True
        if not text:
            os.unlink(path)
            return True
        os.makedirs(os.path.dirname(path), exist_ok=True)
        handle, new = tempfile.mkstemp(dir=self.module.tmpdir)
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        self.module.atomic_move(new, path)
        os.chmod(path, 0o644)
        return True
