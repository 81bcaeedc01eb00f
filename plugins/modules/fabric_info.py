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
  - Reads sysfs, the IPv4 addresses and the default route of a node, and the RDMA MTU where C(ibv_devinfo) is installed.
  - Nothing is cached, since GID indexes drift. Which ports join the ranks is decided on the controller, by
    P(sparkwright.dsv41.fabric_survey#filter).
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
  sysfs_root:
    description: Where sysfs is mounted.
    type: path
    default: /sys
  commands_root:
    description:
      - Directory with recorded outputs that are read instead of running the commands.
      - They are C(ip-address.json) (C(ip -j -4 address show)), C(ip-route.json) (C(ip -j -4 route show default)) and
        C(ibv_devinfo.txt) (C(ibv_devinfo)), which may be missing.
    type: path
"""

EXAMPLES = r"""
- name: Read the fabric
  sparkwright.dsv41.fabric_info:
    sysfs_root: /sys
"""

RETURN = r"""
ports:
  description:
    - Every RDMA port, as hca, port, pci, netdev, state, phys_state, link_layer, rate_gbps, mtu (of the network device),
      active_mtu (of RDMA), addresses and gids.
    - Each entry of gids has index, gid, type, netdev and ipv4; empty slots are left out.
    - 0 and an empty string mean unknown.
  returned: always
  type: list
  elements: dict
interfaces:
  description: Network devices, as name, mtu, state, pci and addresses.
  returned: always
  type: list
  elements: dict
management:
  description: The network device by which the controller reaches the node, else that of the default route.
  returned: always
  type: str
errors:
  description: What could not be read, and why.
  returned: always
  type: list
  elements: str
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparkwright.dsv41.plugins.module_utils import fabric


def recorded(root: str, name: str) -> str:
    try:
        with open(f"{root}/{name}", encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except FileNotFoundError:
        return ""


def run(module: AnsibleModule) -> fabric.Outputs:
    """Outputs of the commands; only `ip` must be there."""
    ip = module.get_bin_path("ip", required=True)
    outputs = []
    for words in (["address", "show"], ["route", "show", "default"]):
        rc, out, err = module.run_command([ip, "-j", "-4", *words])
        if rc != 0:
            module.fail_json(msg=f"ip -j -4 {' '.join(words)} failed: {err.strip() or out.strip()}")
        outputs.append(out)
    devinfo = module.get_bin_path("ibv_devinfo")
    # It fails where there is no RDMA device: then there is nothing to know.
    devices = module.run_command([devinfo])[1] if devinfo else ""
    return fabric.Outputs(outputs[0], outputs[1], devices)


def main() -> None:
    module = AnsibleModule(
        argument_spec={"sysfs_root": {"type": "path", "default": "/sys"}, "commands_root": {"type": "path"}},
        supports_check_mode=True,
    )
    root = module.params["commands_root"]
    if root:
        names = ("ip-address.json", "ip-route.json", "ibv_devinfo.txt")
        outputs = fabric.Outputs(*(recorded(root, name) for name in names))
    else:
        outputs = run(module)
    # "client port server port"; sudo may have taken it away.
    reached_at = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
    try:
        node = fabric.read(module.params["sysfs_root"], outputs, reached_at)
    except ValueError as error:
        module.fail_json(msg=f"`ip -j` printed something else than expected: {error}")
    module.exit_json(changed=False, **node.to_dict())


if __name__ == "__main__":
    main()
