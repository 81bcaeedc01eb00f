#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""A directory with only the Engram tensors of a checkpoint; see module_utils/slim.py."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: weights_slim
short_description: Make a directory with only the Engram tables of a checkpoint
version_added: 0.1.0
description:
  - Makes a directory that holds hard links of exactly those shards of a checkpoint that have the Engram tables, an
    index that names these tensors and nothing else, and C(config.json). It takes no room on the disk.
  - Everything that is wrong with the checkpoint or the directory is reported at once, and then nothing is changed.
  - What an interrupted run left is repaired by the next one. Shards of an earlier such directory that are no longer
    part of it are removed. A directory that holds other files of these names is refused.
  - A hard link is the same file. Who changes a shard in one of the directories changes it in both.
attributes:
  check_mode:
    support: full
    description: Can run in check mode and say what would change, without changing anything.
    details:
      - The headers of the shards are read, so that a run that would fail because of them fails in check mode too.
  diff_mode:
    support: full
    description: Can say in diff mode what differs.
    details:
      - Before and after hold the index and the shards with their sizes.
  idempotent:
    support: full
    description: A second run with the same options changes nothing.
options:
  source:
    description: The directory of the checkpoint, with C(model.safetensors.index.json), C(config.json) and the shards.
    type: path
    required: true
  dest:
    description:
      - The directory to make. Without O(copy) it must be on the file system of O(source).
    type: path
    required: true
  suffixes:
    description:
      - Ends of the names of the tensors to have.
      - Every layer must have a tensor for each of them, all in one shard.
    type: list
    elements: str
    default: [.engram.embed.weight, .engram.embed.scale]
  revision:
    description: The commit that O(source) holds; it is noted in the index.
    type: str
  copy:
    description:
      - Copy the shards instead of linking them, which takes their size again.
      - A copy of the size and modification time of its shard counts as right.
    type: bool
    default: false
author:
  - Sparkwright contributors (@sparkwright)
"""

EXAMPLES = r"""
- name: Have the Engram tables where the engine looks for them
  sparkwright.dsv41.weights_slim:
    source: /srv/models/example-model
    dest: /srv/models/example-model-engram
    revision: 0123456789abcdef0123456789abcdef01234567

- name: Have them on another disk
  sparkwright.dsv41.weights_slim:
    source: /srv/models/example-model
    dest: /mnt/fast/example-model-engram
    copy: true
"""

RETURN = r"""
path:
  description: The directory.
  returned: always
  type: str
shards:
  description: The shards in it.
  returned: success
  type: list
  elements: str
tensors:
  description: The tensors that its index names.
  returned: success
  type: list
  elements: str
bytes:
  description: Size of the shards together.
  returned: success
  type: int
placed:
  description: The shards that were linked or copied; in check mode, those that would be.
  returned: success
  type: list
  elements: str
copied_bytes:
  description: Size of the shards in RV(placed) when they are copied, else 0.
  returned: success
  type: int
written:
  description: The other files that were written; in check mode, those that would be.
  returned: success
  type: list
  elements: str
removed:
  description: Files of an earlier or interrupted run that were removed; in check mode, those that would be.
  returned: success
  type: list
  elements: str
before:
  description: What was there.
  returned: success
  type: dict
  contains:
    index:
      description: The index, null where there was none.
      type: dict
    shards:
      description: Size in bytes of each shard, by its name.
      type: dict
after:
  description: What is there now, or would be, as in RV(before).
  returned: success
  type: dict
findings:
  description: What is wrong with source and destination.
  returned: when that is the reason of the failure
  type: list
  elements: dict
  contains:
    path:
      description: The file, or the directory.
      type: str
    found:
      description: What was found.
      type: str
    needed:
      description: What is needed.
      type: str
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils.slim import SUFFIXES, SlimError, apply, plan_slim


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "dest": {"type": "path", "required": True},
            "suffixes": {"type": "list", "elements": "str", "default": list(SUFFIXES)},
            "revision": {"type": "str"},
            "copy": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    source, dest = params["source"], params["dest"]
    try:
        for name in ("source", "dest"):
            if not os.path.isabs(params[name]):
                raise SlimError(f"{name} must be an absolute path, not {params[name]!r}.")
        plan = plan_slim(source, dest, params["suffixes"], params["revision"] or None, params["copy"])
        if not module.check_mode:
            apply(plan)
    except SlimError as error:
        findings = [finding.as_dict() for finding in error.findings]
        module.fail_json(msg=str(error), path=dest, **({"findings": findings} if findings else {}))
    except OSError as error:
        module.fail_json(msg=f"{source} to {dest}: {type(error).__name__}: {error}", path=dest)
    result: dict[str, Any] = {
        "changed": plan.changed,
        "path": dest,
        "shards": list(plan.shards),
        "tensors": list(plan.tensors),
        "bytes": plan.size,
        "placed": list(plan.link),
        "copied_bytes": plan.copy_bytes,
        "written": list(plan.write),
        "removed": list(plan.remove),
        "before": plan.before,
        "after": plan.after,
    }
    if module._diff:
        result["diff"] = {"before": plan.before, "after": plan.after}
    module.exit_json(**result)


if __name__ == "__main__":
    main()
