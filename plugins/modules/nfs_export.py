#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Export directories of weights with the kernel's NFS server; see module_utils/nfs.py."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nfs_export
short_description: Export directories of weights, read-only, to the workers alone
version_added: 0.1.0
description:
  - Makes the NFS server of the kernel export directories to a list of addresses, read-only, with every user squashed.
  - The exports lie in a file of their own in C(/etc/exports.d) and are added to the running server one by one, so that
    the entries of others are neither read again nor changed.
  - Everything that is in the way is reported at once, and then nothing is changed. An empty O(clients) is such a
    thing, as is a directory on a file system that the kernel cannot export, a file that only its owner may read, or a
    server that somebody else started.
attributes:
  check_mode:
    support: full
    description: Can run in check mode and say what would change, without changing anything.
  diff_mode:
    support: full
    description: Can say in diff mode what differs.
    details:
      - Before and after hold the file of exports.
  idempotent:
    support: full
    description: A second run with the same options changes nothing.
options:
  host:
    description: Inventory name of the node, for the findings.
    type: str
    required: true
  state:
    description:
      - V(absent) takes away what this module exported. The server is stopped only when nothing else is exported.
    type: str
    choices: [present, absent]
    default: present
  paths:
    description: The directories.
    type: list
    elements: path
    default: []
  clients:
    description: The IPv4 addresses that may mount them.
    type: list
    elements: str
    default: []
  rdma:
    description: Listen for NFS over RDMA as well, on port 20049.
    type: bool
    default: false
  root:
    description: Where the files lie; below another directory than C(/) they are checked and written, not applied.
    type: path
    default: /
requirements:
  - nfs-kernel-server and systemd on the node
author:
  - Sparkwright contributors (@sparkwright)
"""

EXAMPLES = r"""
- name: Share a model with two workers
  sparkwright.dsv41.nfs_export:
    host: spark1
    paths: [/srv/models/example-model]
    clients: [10.77.0.2, 10.77.0.3]

- name: Share nothing any more
  sparkwright.dsv41.nfs_export:
    host: spark1
    state: absent
"""

RETURN = r"""
before:
  description: The file of exports as it was, empty where there was none.
  returned: success
  type: str
after:
  description: The file as it is now, or would be.
  returned: success
  type: str
added:
  description: What the running server was told to export, as client:directory; in check mode, what it would be told.
  returned: success
  type: list
  elements: str
removed:
  description: What it was told to export no more.
  returned: success
  type: list
  elements: str
findings:
  description: What is wrong, as id, host, found, needed, repair, severity; the module fails when there is any.
  returned: always
  type: list
  elements: dict
"""

from typing import Any, Dict, List, NoReturn

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils import nfs
from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding, failure
from ansible_collections.sparkwright.dsv41.plugins.module_utils.node_files import Files

SERVICE = "nfs-server.service"


class Export:
    """One run of the module on the head."""

    def __init__(self, module: AnsibleModule) -> None:
        params: Dict[str, Any] = module.params
        self.module = module
        self.host: str = params["host"]
        self.wanted: bool = params["state"] == "present"
        self.paths: List[str] = sorted(set(params["paths"])) if self.wanted else []
        self.clients: List[str] = sorted(set(params["clients"])) if self.wanted else []
        self.rdma: bool = params["rdma"] and self.wanted
        self.files = Files(module, params["root"])
        self.acts = self.files.live and not module.check_mode

    def run(self) -> None:
        files = self.files
        before = files.read(nfs.EXPORTS_FILE)
        after = nfs.exports_text(self.paths, self.clients) if self.wanted else ""
        # The server's own table outlives the server, so it tells only while that runs.
        active = self.active()
        exported = nfs.parse_etab(files.read("var/lib/nfs/etab")) if active else {}
        if self.wanted:
            self.refuse(exported, active)
        change = nfs.changes(self.paths, self.clients, before, exported)
        config = nfs.config_text() if self.rdma else ""
        changed = files.put(nfs.EXPORTS_FILE, after) | files.put(nfs.CONFIG_FILE, config)
        if self.wanted:
            changed |= self.serve(active, change)
        elif before and active:
            self.unexport(change)
            if len(exported) == len(change.remove):
                self.systemctl("disable", "--now", SERVICE)
        self.module.exit_json(
            changed=changed,
            before=before,
            after=after,
            added=[str(entry) for entry in change.add],
            removed=[str(entry) for entry in change.remove],
            findings=[],
            diff={
                "before": before,
                "after": after,
                "before_header": nfs.EXPORTS_FILE,
                "after_header": nfs.EXPORTS_FILE,
            },
        )

    def refuse(self, exported: Dict[nfs.Entry, Any], active: bool) -> None:
        mounts = nfs.parse_mountinfo(self.files.read("proc/self/mountinfo"))
        threads = self.files.read("proc/fs/nfsd/threads").strip()
        server = nfs.Server(int(threads) if threads.isdigit() else 0, active)
        found = nfs.export_problems(self.host, self.paths, self.clients, mounts, server, exported)
        for path in self.paths:
            try:
                closed = nfs.unreadable(path)
            except OSError as error:
                found.append(Finding("nfs.path", self.host, str(error), path, "run with --tags weights"))
                continue
            if closed:
                repair = f"chmod -R a+rX {closed}"
                found.append(Finding("nfs.mode", self.host, f"{closed} closed to others", "read access", repair))
        if found:
            self.fail(found)

    def serve(self, active: bool, change: nfs.Changes) -> bool:
        """Bring the running server to what is wanted; returns whether that changes something."""
        enabled = self.files.live and self.ask("is-enabled")
        listening = not self.rdma or nfs.listens_for_rdma(self.files.read("proc/fs/nfsd/portlist"))
        if self.acts and not (active and enabled):
            self.systemctl("enable", "--now", SERVICE)
        if self.acts and active:
            self.unexport(change)
            for entry in change.add:
                self.call("exportfs", "-o", ",".join(nfs.EXPORT_OPTIONS), str(entry))
        if self.acts and self.rdma and not nfs.listens_for_rdma(self.files.read("proc/fs/nfsd/portlist")):
            self.listen()
        running = active and enabled and listening
        return self.files.live and bool(change.add or change.remove or not running)

    def unexport(self, change: nfs.Changes) -> None:
        if self.acts:
            for entry in change.remove:
                self.call("exportfs", "-u", str(entry))

    def listen(self) -> None:
        """The kernel loads what it needs for RDMA by itself."""
        try:
            with open("/proc/fs/nfsd/portlist", "w", encoding="ascii") as stream:
                stream.write(f"rdma {nfs.RDMA_PORT}\n")
        except OSError as error:
            seen = f"the NFS server cannot listen for RDMA: {error}"
            self.fail([Finding("nfs.rdma", self.host, seen, "an HCA", "weight_sync_nfs_rdma=false, or doctor.yml")])

    def active(self) -> bool:
        return self.files.live and self.ask("is-active")

    def ask(self, question: str) -> bool:
        command = self.module.get_bin_path("systemctl")
        return bool(command) and self.module.run_command([command, question, SERVICE])[0] == 0

    def systemctl(self, *words: str) -> None:
        if self.acts:
            self.call("systemctl", *words)

    def call(self, name: str, *words: str) -> None:
        package = {"exportfs": "nfs-kernel-server"}.get(name, "systemd")
        command = self.module.get_bin_path(name)
        if not command:
            self.fail([Finding("nfs.command", self.host, f"no {name}", name, f"apt-get install {package}")])
        rc, out, err = self.module.run_command([command, *words])
        if rc != 0:
            said = (err.strip() or out.strip() or f"exit code {rc}").splitlines()[-1]
            repair = f"journalctl -u {SERVICE}"
            self.fail([Finding("nfs.server", self.host, f"{name} {' '.join(words)}: {said}", "success", repair)])

    def fail(self, found: List[Finding]) -> NoReturn:
        self.module.fail_json(**failure(found))
        raise AssertionError("fail_json returned")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "paths": {"type": "list", "elements": "path", "default": []},
            "clients": {"type": "list", "elements": "str", "default": []},
            "rdma": {"type": "bool", "default": False},
            "root": {"type": "path", "default": "/"},
        },
        required_if=[("state", "present", ["paths"])],
        supports_check_mode=True,
    )
    Export(module).run()


if __name__ == "__main__":
    main()
