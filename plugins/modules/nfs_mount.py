#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Mount the head's weights on a worker by systemd units; see module_utils/nfs.py."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nfs_mount
short_description: Mount directories of weights that the head exports
version_added: 0.1.0
description:
  - Writes a systemd mount unit for each directory, starts it, and looks at what is mounted then. The mounts come back
    after each start of the machine.
  - Units that this module wrote for directories that are no longer named are stopped and removed.
  - A directory that holds files, or that something else is mounted on, is refused, all of them at once and before
    anything is changed.
attributes:
  check_mode:
    support: full
    description: Can run in check mode and say what would change, without changing anything.
  diff_mode:
    support: full
    description: Can say in diff mode what differs.
    details:
      - Before and after hold the mount units by name.
  idempotent:
    support: full
    description: A second run with the same options changes nothing.
options:
  host:
    description: Inventory name of the node, for the findings.
    type: str
    required: true
  mounts:
    description: What to mount; none takes all mounts of this module away.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: The directory on this node.
        type: path
        required: true
      source:
        description: What to mount there, as C(address:/directory).
        type: str
        required: true
  rdma:
    description: Use RDMA instead of TCP.
    type: bool
    default: false
  connections:
    description: TCP connections to the server (C(nconnect)).
    type: int
    default: 8
  root:
    description: Where the files lie; below another directory than C(/) they are checked and written, not applied.
    type: path
    default: /
requirements:
  - nfs-common and systemd on the node
author:
  - Sparkwright contributors (@sparkwright)
"""

EXAMPLES = r"""
- name: Have the head's model
  sparkwright.dsv41.nfs_mount:
    host: spark2
    mounts:
      - path: /srv/models/example-model
        source: 10.77.0.1:/srv/models/example-model

- name: Have none of them any more
  sparkwright.dsv41.nfs_mount:
    host: spark2
    mounts: []
"""

RETURN = r"""
before:
  description: The mount units of this module as they were, by name.
  returned: success
  type: dict
after:
  description: The units as they are now, or would be.
  returned: success
  type: dict
mounted:
  description: Directories that were mounted, or mounted anew; in check mode, those that would be.
  returned: success
  type: list
  elements: str
unmounted:
  description: Directories whose mount was taken away.
  returned: success
  type: list
  elements: str
findings:
  description: What is wrong, as id, host, found, needed, repair, severity; the module fails when there is any.
  returned: always
  type: list
  elements: dict
"""

import glob
import os
from typing import Any, Dict, List, NoReturn, Tuple

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils import nfs
from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding, failure
from ansible_collections.sparkwright.dsv41.plugins.module_utils.node_files import Files


class Mounting:
    """One run of the module on a worker."""

    def __init__(self, module: AnsibleModule) -> None:
        params: Dict[str, Any] = module.params
        self.module = module
        self.host: str = params["host"]
        self.rdma: bool = params["rdma"]
        self.sources: Dict[str, str] = {os.path.normpath(item["path"]): item["source"] for item in params["mounts"]}
        self.files = Files(module, params["root"])
        self.acts = self.files.live and not module.check_mode
        self.before = self.units()
        options = nfs.mount_options(self.rdma, params["connections"])
        self.after = {nfs.unit_name(p): nfs.unit_text(p, source, options) for p, source in self.sources.items()}

    def run(self) -> None:
        self.refuse()
        gone = {name: nfs.where(text) for name, text in self.before.items() if name not in self.after}
        stale = {nfs.unit_name(path): path for path, _ in self.wrong()}
        differ = [name for name, text in self.after.items() if self.before.get(name) != text]
        for name, path in gone.items():
            self.stop(name, path)
        for name, text in [*self.after.items(), *((name, "") for name in gone)]:
            self.files.put(os.path.join(nfs.UNITS, name), text)
        again = {**stale, **{name: nfs.where(self.after[name]) for name in differ}}
        closed = [name for name in self.after if not self.enabled(name)]
        if self.acts and (gone or differ):
            self.systemctl("daemon-reload")
        for name in closed:
            self.systemctl("enable", name)
        for name in again:
            self.systemctl("restart", name)
        found = [finding for _, finding in self.wrong()] if self.acts else []
        if found:
            self.fail(found)
        self.module.exit_json(
            changed=bool(gone or again or closed),
            before=self.before,
            after=self.after,
            mounted=sorted(again.values()),
            unmounted=sorted(gone.values()),
            findings=[],
            diff={"before": self.before, "after": self.after},
        )

    def units(self) -> Dict[str, str]:
        """Our units, by name."""
        found = {}
        for path in sorted(glob.glob(os.path.join(self.files.path(nfs.UNITS), "*.mount"))):
            name = os.path.basename(path)
            text = self.files.read(os.path.join(nfs.UNITS, name))
            if text.startswith(nfs.MARK):
                found[name] = text
        return found

    def mounts(self) -> List[nfs.Mount]:
        return nfs.parse_mountinfo(self.files.read("proc/self/mountinfo"))

    def refuse(self) -> None:
        mounts, found = self.mounts(), []
        for path, source in self.sources.items():
            mount = nfs.mount_of(path, mounts)
            # Never into a mount: a server that does not answer would hold this run.
            empty = (mount is not None and mount.target == path) or not os.path.isdir(path)
            files = 0 if empty else len(os.listdir(path))
            ours = nfs.unit_name(path) in self.before
            obstacle = nfs.obstacle(self.host, path, source, ours, mounts, files)
            found += [obstacle] if obstacle else []
        if found:
            self.fail(found)

    def wrong(self) -> List[Tuple[str, Finding]]:
        """Directories that do not show what is wanted, and why."""
        mounts = self.mounts()
        problems = [
            (p, nfs.mount_problem(self.host, p, source, self.rdma, mounts)) for p, source in self.sources.items()
        ]
        return [(path, finding) for path, finding in problems if finding]

    def enabled(self, name: str) -> bool:
        if not self.files.live:
            return True
        return self.call("systemctl", "is-enabled", name)[0] == 0

    def call(self, name: str, *words: str) -> Tuple[int, str, str]:
        rc, out, err = self.module.run_command([self.module.get_bin_path(name, required=True), *words])
        return int(rc), str(out), str(err)

    def stop(self, name: str, path: str) -> None:
        if not self.acts:
            return
        self.call("systemctl", "disable", name)
        rc, _out, _err = self.call("systemctl", "stop", name)
        mount = nfs.mount_of(path, self.mounts())
        if rc != 0 or (mount is not None and mount.target == path):
            seen = f"{path} in use: {self.last_words(name)}"
            self.fail([Finding("nfs.busy", self.host, seen, "nobody who reads it", "playbooks/stop.yml, then again")])

    def systemctl(self, *words: str) -> None:
        if not self.acts:
            return
        rc, _out, err = self.call("systemctl", *words)
        if rc != 0:
            name = words[-1]
            path = nfs.where(self.after.get(name, ""))
            said = self.last_words(name) if path else err.strip()
            needed = self.sources.get(path, "success")
            repair = "run with --tags weight_sync; is the head's nfs-server running and the worker's address right?"
            if "busy" in said:
                repair = "playbooks/stop.yml, then run with --tags weight_sync"
            self.fail([Finding("nfs.mount", self.host, f"systemctl {' '.join(words)}: {said}", needed, repair)])

    def last_words(self, name: str) -> str:
        """What mount said, by the journal."""
        _rc, out, _err = self.call("journalctl", "--unit", name, "-n", "6", "-o", "cat", "--no-pager")
        told = [line for line in out.splitlines() if line.strip() and "systemd" not in line]
        mount = [line for line in told if line.startswith(("mount", "umount"))]
        return (mount or told or ["no reason given"])[-1]

    def fail(self, found: List[Finding]) -> NoReturn:
        self.module.fail_json(**failure(found))
        raise AssertionError("fail_json returned")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "mounts": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "path": {"type": "path", "required": True},
                    "source": {"type": "str", "required": True},
                },
            },
            "rdma": {"type": "bool", "default": False},
            "connections": {"type": "int", "default": 8},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    Mounting(module).run()


if __name__ == "__main__":
    main()
