#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""How long fabric facts and selection take, against `cat` of the same files in the same run.

Run it with the Python that has Ansible; see README.md beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.sparkwright.dsv41.plugins.module_utils import cabling, fabric  # noqa: E402

EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
MODULE = "ansible_collections.sparkwright.dsv41.plugins.modules.fabric_info"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def generate(root: Path, node: int, hcas: int, slots: int, filled: int) -> None:
    """The tree of one node: every HCA has a device and a rail, its GID table `filled` entries somewhere in `slots`."""
    shown = [{"ifname": "enP7s7", "addr_info": [{"local": f"192.168.1.{node}", "prefixlen": 24}]}]
    for number in range(hcas):
        hca, netdev, domain = f"mlx5_{number}", f"ens{number}np0", f"{number:04x}"
        device = root / f"devices/{domain}:01:00.0"
        write(device / f"net/{netdev}/mtu", "9000")
        write(device / f"net/{netdev}/operstate", "up")
        os.symlink(device, device / f"net/{netdev}/device")
        port = device / f"infiniband/{hca}/ports/1"
        os.makedirs(port)
        os.symlink(device, port.parents[1] / "device")
        values = {
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "link_layer": "Ethernet",
            "rate": "200 Gb/sec (4X HDR)",
        }
        for name, value in values.items():
            write(port / name, value)
        for slot in range(slots):
            # The last entry is the fabric's; the others are IPv6, v1 first.
            address = f"10.77.{number}.{node}"
            last = slot == filled - 1
            mapped = f"0000:0000:0000:0000:0000:ffff:0a4d:{number:02x}{node:02x}"
            gid = (mapped if last else f"fe80:0000:0000:0000:0000:0000:0000:{slot:04x}") if slot < filled else EMPTY
            write(port / f"gids/{slot}", gid)
            if slot < filled:
                write(port / f"gid_attrs/types/{slot}", "RoCE v2" if last or slot % 2 else "IB/RoCE v1")
                write(port / f"gid_attrs/ndevs/{slot}", netdev)
        for kind, name in (("net", netdev), ("infiniband", hca)):
            os.makedirs(root / f"class/{kind}", exist_ok=True)
            os.symlink(device / kind / name, root / f"class/{kind}/{name}")
        shown.append({"ifname": netdev, "addr_info": [{"local": address, "prefixlen": 24}]})
    write(root / "commands/ip-address.json", json.dumps(shown))
    write(root / "commands/ip-route.json", json.dumps([{"dst": "default", "dev": "enP7s7"}]))


def outputs(root: Path) -> fabric.Outputs:
    return fabric.Outputs(*((root / f"commands/{name}.json").read_text() for name in ("ip-address", "ip-route")))


def files(root: Path) -> list[str]:
    """What fabric.read reads, in its order: seen by looking at its calls."""
    seen: list[str] = []
    real = os.open

    def note(path: str, flags: int) -> int:
        seen.append(path)
        return real(path, flags)

    os.open = note  # type: ignore[assignment]
    try:
        fabric.read(str(root), outputs(root))
    finally:
        os.open = real
    return [path for path in seen if os.path.exists(path)]


def run(argv: list[str], stdin: str = "") -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "collections")}
    subprocess.run(argv, input=stdin.encode(), stdout=subprocess.DEVNULL, check=True, env=environment)


def cat(root: Path, paths: list[str]) -> None:
    """One process, or as few as the length of a command line allows."""
    names = "\n".join(os.path.relpath(path, root) for path in paths).encode()
    subprocess.run(["xargs", "-s1900000", "cat"], input=names, cwd=root, stdout=subprocess.DEVNULL, check=True)


def clock(runs: int, *works: Callable[[], object]) -> list[float]:
    """Medians in milliseconds. The works take turns, so that a busy machine is busy for all of them."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(runs):
        for work, spent in zip(works, times, strict=True):
            started = time.perf_counter()
            work()
            spent.append(1000 * (time.perf_counter() - started))
    return [statistics.median(spent) for spent in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--hcas", type=int, default=16)
    parser.add_argument("--gids", type=int, default=256, help="slots of a GID table")
    parser.add_argument("--filled", type=int, default=256, help="slots that are not empty")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        roots = [Path(directory) / f"node{number}" for number in range(1, options.nodes + 1)]
        for number, root in enumerate(roots, 1):
            generate(root, number, options.hcas, options.gids, options.filled)
        paths = [files(root) for root in roots]
        infos = {f"spark{n}": fabric.read(str(root), outputs(root)).to_dict() for n, root in enumerate(roots, 1)}
        plan = {"topology": "switch", "rdma": True, "mtu": 9000, "min_rails": options.hcas, "max_rails": 0}
        ranks = [{"host": host, "address": "", "rails": [], "gid_index": None, "argv": [], "env": {}} for host in infos]
        survey = cabling.survey(plan, ranks, infos)
        assert [len(rank["rails"]) for rank in survey["ranks"].values()] == [options.hcas] * options.nodes
        assert not survey["findings"], survey["findings"]

        def facts() -> None:
            for root in roots:
                fabric.read(str(root), outputs(root)).to_dict()

        read, select, plain = clock(
            options.runs,
            facts,
            lambda: cabling.survey(plan, ranks, infos),
            lambda: [cat(*each) for each in zip(roots, paths, strict=True)],
        )
        arguments = {"sysfs_root": str(roots[0]), "commands_root": str(roots[0] / "commands")}
        python = [sys.executable, "-c"]
        # As Ansible does: a fresh interpreter that is handed its arguments and prints its answer.
        handed = json.dumps({"ANSIBLE_MODULE_ARGS": {**arguments, "_ansible_remote_tmp": directory}})
        script = (
            "import sys, ansible.module_utils.basic as basic\n"
            "basic._ANSIBLE_ARGS, basic._ANSIBLE_PROFILE = sys.stdin.buffer.read(), 'legacy'\n"
            f"from {MODULE} import main\nmain()"
        )
        start = "import ansible.module_utils.basic"
        whole, bare, one = clock(
            options.runs,
            lambda: run([*python, script], handed),
            lambda: run([*python, start]),
            lambda: cat(roots[0], paths[0]),
        )
    print(f"{options.nodes} nodes, {options.hcas} HCAs each, {options.filled} of {options.gids} GIDs filled;", end=" ")
    print(f"{len(paths[0])} files a node; median of {options.runs}; Python {platform.python_version()}\n")
    rows = [
        ("facts of all nodes (fabric.read)", read, plain),
        ("selection (cabling.survey)", select, plain),
        ("facts and selection", read + select, plain),
        ("module on a node, whole process", whole, bare + one),
        ("module on a node, less interpreter start", whole - bare, one),
    ]
    print(f"{'what':42} {'ms':>8} {'against':>28} {'ms':>8} {'ratio':>6}")
    names = ["cat, all nodes"] * 3 + ["interpreter start + cat", "cat"]
    for (what, spent, against), name in zip(rows, names, strict=True):
        print(f"{what:42} {spent:8.1f} {name:>28} {against:8.1f} {spent / against:6.2f}")


if __name__ == "__main__":
    main()
