#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Have a rank's packed Engram tables, by the command line of sparkwright_kernels.engram."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: engram_pack
short_description: Pack a rank's rows of the Engram tables
version_added: 0.1.0
description:
  - Has the files with a rank's rows of every Engram table of a checkpoint in O(path), below a directory that names
    format, rule and number of ranks. A file that is there is looked at, its header, size and table of checksums, and
    left alone when it is right; one that is wrong is told, and then nothing is changed.
  - Stopped anywhere, the next run goes on.
attributes:
  check_mode:
    support: full
    description: Can run in check mode and say what would be packed, without packing.
  diff_mode:
    support: full
    description: Can say in diff mode what differs.
    details:
      - Before and after hold the files and their sizes.
  idempotent:
    support: full
    description: A second run with the same options changes nothing.
options:
  host:
    description: Inventory name of the node, for the findings.
    type: str
    required: true
  command:
    description: How to run C(sparkwright-engram), up to its verb.
    type: list
    elements: str
    default: [sparkwright-engram]
  source:
    description: Directory of the checkpoint, with C(config.json), the index and the shards of the tables.
    type: path
    required: true
  revision:
    description: The commit that O(source) holds; files of our own format name it.
    type: str
    default: ""
  path:
    description: Directory that holds, for each format, rule and number of ranks, a directory of files.
    type: path
    required: true
  format:
    description: Format of the files. V(dsv41en1) is that of the published engines, V(pages) our own.
    type: str
    choices: [dsv41en1, pages]
    default: pages
  rule:
    description: How the engine splits a table. V(heads) are whole hash heads, V(rows) equal numbers of rows.
    type: str
    choices: [heads, rows]
    default: heads
  rank:
    description: The rank.
    type: int
    required: true
  ranks:
    description: How many ranks there are.
    type: int
    required: true
  workers:
    description: Threads that pack.
    type: int
    default: 4
  verify:
    description: Compare the files with O(source) after packing, V(sample) 10,000 rows of each, V(all) every row.
    type: str
    choices: [none, sample, all]
    default: none
  progress:
    description: File to tell in how far the run is; set by the action plugin.
    type: path
author:
  - Sparkwright contributors (@sparkwright)
"""

EXAMPLES = r"""
- name: Pack the rows of rank 1 of 2
  sparkwright.dsv41.engram_pack:
    host: spark2
    source: /srv/models/example-model-engram
    path: /srv/engram/example
    rank: 1
    ranks: 2
"""

RETURN = r"""
files:
  description: The files, and what was found of each before packing.
  returned: always
  type: list
  elements: dict
  contains:
    path:
      description: The file.
      type: str
    file_bytes:
      description: Its size.
      type: int
    state:
      description: What was found.
      choices: [there, missing, wrong]
      type: str
need_bytes:
  description: Size of the files that were missing.
  returned: always
  type: int
free_bytes:
  description: Room on the file system before packing.
  returned: always
  type: int
verified:
  description: How many rows of each file were compared with the source.
  returned: when O(verify) is not V(none)
  type: dict
findings:
  description: What is wrong with the source or the files.
  returned: always
  type: list
  elements: dict
"""

import json
import subprocess
from typing import Any, Dict, List, NoReturn, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding, failure
from ansible_collections.sparkwright.dsv41.plugins.module_utils.progress import Progress

REPAIR = "--tags engram"
VERIFY = {"sample": [], "all": ["--all"]}


class Packer:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params: Dict[str, Any] = module.params
        self.progress = Progress("" if module.check_mode else self.params["progress"] or "")
        self._done: Dict[str, int] = {}

    def run(self) -> Dict[str, Any]:
        plan = self.call("plan")
        files, need, free = plan["files"], plan["need_bytes"], plan["free_bytes"]
        missing = [file for file in files if file["state"] == "missing"]
        if missing and not self.module.check_mode:
            self.progress.begin("packing", need, lambda: sum(self._done.values()))
            self.call("pack", "--workers", str(self.params["workers"]))
        result: Dict[str, Any] = {
            "changed": bool(missing),
            "files": [{key: file[key] for key in ("path", "file_bytes", "state")} for file in files],
            "need_bytes": need,
            "free_bytes": free,
            "findings": [],
        }
        if self.params["verify"] != "none" and not self.module.check_mode:
            self._done.clear()
            total = sum(file["file_bytes"] for file in files)
            self.progress.begin("verifying", total, lambda: sum(self._done.values()))
            result["verified"] = self.call("verify", *VERIFY[self.params["verify"]])["verified"]
        if self.module._diff:
            after = {file["path"]: file["file_bytes"] for file in files}
            there = {path: size for path, size in after.items() if path not in {file["path"] for file in missing}}
            result["diff"] = {"before": there, "after": after}
        return result

    def call(self, verb: str, *more: str) -> Dict[str, Any]:
        """The result of a verb; progress is noted on the way. Ends the module when something is wrong."""
        given = self.params
        options = {
            "--model": given["source"],
            "--directory": given["path"],
            "--format": given["format"],
            "--rule": given["rule"],
            "--rank": str(given["rank"]),
            "--tp": str(given["ranks"]),
            "--revision": given["revision"],
        }
        argv = [*given["command"], verb, "--json", *more]
        argv += [word for name, value in options.items() if value for word in (name, value)]
        result: Optional[Dict[str, Any]] = None
        errors: List[Dict[str, str]] = []
        try:
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        except OSError as error:
            self.fail([self.finding(str(error), f"{argv[0]}, the packer")])
        with process:
            assert process.stdout and process.stderr
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "progress":
                    self._done[event["file"]] = event["done"]
                elif event["event"] == "errors":
                    errors = event["errors"]
                else:
                    result = event
            # Errors are told in both; what is here only is of Python itself, and short.
            said = process.stderr.read().strip()
        if errors:
            self.fail(
                [
                    self.finding(f"{error['subject']}: {error['found']}", error["needed"], error["repair"])
                    for error in errors
                ]
            )
        if process.returncode != 0 or result is None:
            last = said.splitlines()[-1] if said else "nothing"
            self.fail([self.finding(f"{verb} ended with {process.returncode}: {last}", "0")])
        return result

    def finding(self, found: str, needed: str, repair: str = "") -> Finding:
        return Finding(f"engram.{self.params['format']}", self.params["host"], found, needed, repair or REPAIR)

    def fail(self, found: List[Finding]) -> NoReturn:
        self.progress.close()
        self.module.fail_json(**failure(found))
        raise AssertionError("fail_json returned")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "command": {"type": "list", "elements": "str", "default": ["sparkwright-engram"]},
            "source": {"type": "path", "required": True},
            "revision": {"type": "str", "default": ""},
            "path": {"type": "path", "required": True},
            "format": {"type": "str", "choices": ["dsv41en1", "pages"], "default": "pages"},
            "rule": {"type": "str", "choices": ["heads", "rows"], "default": "heads"},
            "rank": {"type": "int", "required": True},
            "ranks": {"type": "int", "required": True},
            "workers": {"type": "int", "default": 4},
            "verify": {"type": "str", "choices": ["none", "sample", "all"], "default": "none"},
            "progress": {"type": "path"},
        },
        supports_check_mode=True,
    )
    packer = Packer(module)
    try:
        result = packer.run()
    finally:
        packer.progress.close()
    module.exit_json(**result)


if __name__ == "__main__":
    main()
