#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
module: image_fetch
author: Sparkwright contributors (@sparkwright)
version_added: 0.1.0
short_description: Fetch an image from the head's engine
description:
  - Streams the image from the head over the fabric (SSH with this worker's own key) into this node's engine.
  - Compares by layers and configuration before and after, so an image that is the same is not moved.
attributes:
  check_mode:
    description: Says whether the image would be fetched.
    support: full
  diff_mode:
    description: Shows the identity before and after.
    support: full
  idempotent:
    description: An image of the wanted identity is left alone.
    support: full
options:
  name:
    description: Name and tag of the image.
    type: str
    required: true
  identity:
    description: Identity of the head's copy, from the filter P(sparkwright.dsv41.image_identity#filter).
    type: str
    required: true
  head_address:
    description: Fabric address of the head.
    type: str
    required: true
  key_directory:
    description: Directory with C(id_ed25519) and C(known_hosts).
    type: path
    default: /etc/sparkwright/peers
"""

EXAMPLES = r"""
- name: Fetch the engine image
  sparkwright.dsv41.image_fetch:
    name: sparkwright/exl3-vllm-cpu:0123456789ab
    identity: 0123456789abcdef
    head_address: 10.77.0.1
"""

RETURN = r"""
identity:
  description: Identity of the image on this node.
  returned: success
  type: str
"""

import json
import subprocess
from typing import List

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils import images


def local_identity(module: AnsibleModule, docker: str) -> str:
    rc, out, _err = module.run_command([docker, "image", "inspect", module.params["name"]])
    return images.identity(images.first_inspect(json.loads(out))) if rc == 0 else ""


def stream(ssh: List[str], load: List[str]) -> str:
    """Pipe one command into another; return what went wrong, or ""."""
    with subprocess.Popen(ssh, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as source:
        target = subprocess.run(load, stdin=source.stdout, capture_output=True, check=False)
        assert source.stdout and source.stderr
        source.stdout.close()
        complaint = source.stderr.read().decode(errors="replace").strip()
    # Either may be the cause: a load that stops also breaks the pipe of the head.
    ends = (
        ("the head", source.returncode, complaint),
        ("docker load", target.returncode, target.stderr.decode(errors="replace").strip()),
    )
    return "; ".join(f"{name} answered {code}: {text}" for name, code, text in ends if code != 0)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "identity": {"type": "str", "required": True},
            "head_address": {"type": "str", "required": True},
            "key_directory": {"type": "path", "default": "/etc/sparkwright/peers"},
        },
        supports_check_mode=True,
    )
    name, wanted, head = (module.params[key] for key in ("name", "identity", "head_address"))
    if not wanted:
        module.fail_json(msg=f"the head has no image {name}; needed one to fetch; repair: --tags image on the head")
    docker = module.get_bin_path("docker", required=True)
    before = local_identity(module, docker)
    diff = {"before": f"{name} {before or 'absent'}\n", "after": f"{name} {wanted}\n"}
    if before == wanted or module.check_mode:
        module.exit_json(changed=before != wanted, identity=before, diff=diff)
    keys = module.params["key_directory"]
    ssh = [
        module.get_bin_path("ssh", required=True),
        "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=yes",
        "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-o", f"UserKnownHostsFile={keys}/known_hosts",
        "-i", f"{keys}/id_ed25519", f"root@{head}", f"image {name}",
    ]  # fmt: skip
    problem = stream(ssh, [docker, "load", "--quiet"])
    after = local_identity(module, docker)
    if problem or after != wanted:
        seen = problem or f"identity is {after or 'absent'} after the transfer; needed {wanted}"
        module.fail_json(msg=f"fetching {name} from {head} failed: {seen}; repair: --tags peers,image")
    module.exit_json(changed=True, identity=after, diff=diff)


if __name__ == "__main__":
    main()
