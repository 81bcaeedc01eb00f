#!/usr/bin/python
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_info
author: Sparkwright contributors (@sparkwright)
version_added: 0.1.0
short_description: RDMA ports, GID tables and network devices of a node
description:
  - Reads sysfs and the IPv4 addresses of a node, and chooses the rail that carries the fabric address.
  - Nothing is cached, since GID indexes drift.
attributes:
  check_mode:
    description: Runs fully in check mode, as it only reads.
    support: full
  diff_mode:
    description: Never changes anything.
    support: none
  idempotent:
    description: Reads only.
    support: full
options:
  address:
    description: Fabric IPv4 address of this node.
    type: str
    required: true
  host:
    description: Name of this node in findings.
    type: str
    required: true
  rdma:
    description: Whether a node without an RDMA device is a finding.
    type: bool
    default: true
  sysfs_root:
    description: Where sysfs is mounted.
    type: path
    default: /sys
"""

EXAMPLES = r"""
- name: Read the fabric
  sparkwright.dsv41.fabric_info:
    address: 10.77.0.1
    host: spark1
"""

RETURN = r"""
ports:
  description: Every RDMA port with its filled GID entries.
  returned: always
  type: list
  elements: dict
interfaces:
  description: Network devices with MTU, state and IPv4 addresses.
  returned: always
  type: list
  elements: dict
fabric:
  description: The chosen rail, as address, socket_interface, mtu, hcas (in NCCL's exact form) and gids (index by HCA).
  returned: always
  type: dict
findings:
  description: What is wrong, as id, host, found, needed, repair, severity.
  returned: always
  type: list
  elements: dict
"""

import json

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils import fabric


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str", "required": True},
            "host": {"type": "str", "required": True},
            "rdma": {"type": "bool", "default": True},
            "sysfs_root": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    root = module.params["sysfs_root"].rstrip("/")
    rc, out, err = module.run_command([module.get_bin_path("ip", required=True), "-j", "-4", "address", "show"])
    if rc != 0:
        module.fail_json(msg=f"ip -j -4 address show failed: {err.strip() or out.strip()}")
    info = {
        "ports": fabric.ports_to_dicts(fabric.read_ports(root)),
        "interfaces": fabric.read_interfaces(root, json.loads(out or "[]")),
    }
    chosen, findings = fabric.select(info, module.params["address"], module.params["host"], module.params["rdma"])
    module.exit_json(changed=False, fabric=chosen, findings=[finding.to_dict() for finding in findings], **info)


if __name__ == "__main__":
    main()
