#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Record what module fabric_info reads on a node, as a tar archive on standard output; reads only, needs no root:

    ssh NODE python3 - < tests/acceptance/record.py | tar -x -C tests/fixtures/fabric/CASE/NODE

gives sys/class/{infiniband,net} and commands/. What the kernel refuses to read (attributes of an empty GID entry,
speed of a port without link) is left out, as is the output of a tool that is not there. Standard library, Python 3.9 or
newer.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile

GID_ENTRIES = 16  # of a table that may have 1024
HCA = ("device", "fw_ver", "node_desc", "node_guid", "node_type", "parent")
PORT = ("link_layer", "phys_state", "rate", "state")
TABLES = ("gids", "gid_attrs/ndevs", "gid_attrs/types")
NET = ("address", "carrier", "dev_id", "dev_port", "device", "mtu", "operstate", "phys_port_name", "speed", "type")
COMMANDS = {
    "ip-address.json": ["ip", "-j", "-4", "address", "show"],
    "ip-route.json": ["ip", "-j", "-4", "route", "show", "default"],
    "ibv_devinfo.txt": ["ibv_devinfo", "-v"],
}


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def add_path(archive: tarfile.TarFile, path: str) -> None:
    """An attribute, or a link as it is; nothing where there is nothing to read."""
    try:
        if os.path.islink(path):
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
            archive.addfile(entry)
        else:
            with open(path, "rb") as file:
                add(archive, path.lstrip("/"), file.read())
    except OSError:
        pass


def names(directory: str) -> list[str]:
    return sorted(os.listdir(directory)) if os.path.isdir(directory) else []


def record(archive: tarfile.TarFile) -> None:
    for hca in names("/sys/class/infiniband"):
        base = f"/sys/class/infiniband/{hca}"
        for name in HCA:
            add_path(archive, f"{base}/{name}")
        for port in names(f"{base}/ports"):
            for name in PORT:
                add_path(archive, f"{base}/ports/{port}/{name}")
            for table in TABLES:
                for index in range(GID_ENTRIES):
                    add_path(archive, f"{base}/ports/{port}/{table}/{index}")
    for device in names("/sys/class/net"):
        for name in NET:
            add_path(archive, f"/sys/class/net/{device}/{name}")
    environment = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    for name, argv in COMMANDS.items():
        try:
            done = subprocess.run(argv, capture_output=True, env=environment, check=False)
        except FileNotFoundError:
            continue
        add(archive, f"commands/{name}", done.stdout)
        if done.stderr:
            add(archive, f"commands/{name}.stderr", done.stderr)


if __name__ == "__main__":
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as stream:
        record(stream)
