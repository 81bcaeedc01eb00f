#!/usr/bin/env python3
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Record the fixtures of the fabric on the acceptance machines: `record_cases.py [CASE ...]`; without one, all of them.

Each case starts from the initial state of `vm.py reset`, changes one thing and records what both machines say.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import vm

FIXTURES = vm.ROOT / "tests/fixtures/fabric"
LOGS = FIXTURES / "logs"
P0, P1, UNCABLED = "enp1s0f0np0", "enP2p1s0f0np0", "enp1s0f1np1"


@dataclass(frozen=True)
class Case:
    """Shell commands that lead from the initial state to the case, by number of the machine."""

    name: str
    title: str
    commands: dict[int, list[str]] = field(default_factory=dict)
    unplug: tuple[int, str] | None = None  # a port whose link goes down
    without: str = ""  # recorded file that the case is about not having


CASES = [
    Case("two-rails", "The initial state: two rails, MTU 9000; the other port has no cable."),
    Case(
        "moved-index",
        "The address of spark1's rail 0 went and came again after another one had taken its place in the GID table.",
        {1: [f"ip address del 10.77.0.1/24 dev {P0}", f"ip address add 192.0.2.1/24 dev {P0}", "sleep 2",
             f"ip address add 10.77.0.1/24 dev {P0}", "sleep 2", f"ip address del 192.0.2.1/24 dev {P0}"]},
    ),
    Case("one-end-1500", "Rail 0 of spark2 has MTU 1500.", {2: [f"ip link set {P0} mtu 1500"]}),
    Case("port-down", "Rail 1 of spark1 has no carrier; its address is still there.", unplug=(1, P1)),
    Case("no-address", "Rail 1 of spark2 has no IPv4 address.", {2: [f"ip -4 address flush dev {P1}"]}),
    Case(
        "link-local-only",
        "Rail 0 of spark2 has only an address of 169.254.0.0/16.",
        {2: [f"ip -4 address flush dev {P0}", f"ip address add 169.254.77.2/16 dev {P0} scope link"]},
    ),
    Case("two-addresses", "Rail 0 of spark1 has two IPv4 addresses.", {1: [f"ip address add 10.99.0.1/24 dev {P0}"]}),
    Case(
        "address-on-lo",
        "The address of spark1's rail 0 is on lo instead of the port.",
        {1: [f"ip -4 address flush dev {P0}", "ip address add 10.77.0.1/32 dev lo"]},
    ),
    Case(
        "wrong-port",
        "The address of spark2's rail 0 is on the port without a cable.",
        {2: [f"ip -4 address flush dev {P0}", f"ip address add 10.77.0.2/24 dev {UNCABLED}"]},
    ),
    Case(
        "management-roce",
        "The management interface has an RDMA device, too.",
        {n: ["rdma link add rocep7s7 type rxe netdev enP7s7"] for n in (1, 2)},
    ),
    Case(
        "no-hca",
        "No RDMA device at all.",
        {n: ["for hca in $(ls /sys/class/infiniband); do rdma link delete $hca; done"] for n in (1, 2)},
    ),
    Case(
        "no-ibverbs-tools",
        "As two-rails; package ibverbs-utils is not installed.",
        {n: ["mv /usr/bin/ibv_devinfo /usr/bin/ibv_devinfo.away"] for n in (1, 2)},
        without="ibv_devinfo.txt",
    ),
]  # fmt: skip

RC = "timeout 20 ibv_rc_pingpong -d rocep1s0f0 -n 20"
BW = "timeout 20 ib_write_bw -d rocep1s0f0 -n 100 -s 65536 -F"


@dataclass(frozen=True)
class Log:
    """A server on spark1 and a client on spark2, which gets the server's address as its last argument."""

    name: str
    title: str
    server: str
    client: str
    before: str = ""  # on spark2
    peer: str = "10.77.0.1"


LOG_CASES = [
    Log("pingpong-ok", "The GID index of the IPv4 address at both ends.", f"{RC} -g 1", f"{RC} -g 1"),
    Log("pingpong-empty-index-client", "The client's index names an empty slot.", f"{RC} -g 1", f"{RC} -g 2"),
    Log("pingpong-empty-index-server", "The server's index names an empty slot.", f"{RC} -g 2", f"{RC} -g 1"),
    Log("pingpong-empty-index-both", "The index of both names an empty slot.", f"{RC} -g 2", f"{RC} -g 2"),
    Log("pingpong-index-beyond-table", "The client's index is larger than the table.", f"{RC} -g 1", f"{RC} -g 5000"),
    Log("pingpong-mixed-v4-v6", "IPv4 at the server, IPv6 link-local at the client.", f"{RC} -g 1", f"{RC} -g 0"),
    Log("pingpong-no-index", "No GID index, which RoCE needs.", RC, RC),
    Log("pingpong-no-device", "A device that is not there.", f"{RC} -g 1", "timeout 20 ibv_rc_pingpong -d mlx5_0 -g 1"),
    Log(
        "pingpong-wrong-peer",
        "An address where nothing listens.",
        f"{RC} -g 1",
        f"{RC} -g 1",
        peer="10.77.0.9",
    ),
    Log("pingpong-no-server", "A peer on which no server runs.", "true", f"{RC} -g 1"),
    Log(
        "pingpong-mtu-1500-at-client",
        "Large messages with RDMA MTU 4096, while spark2's port has MTU 1500.",
        f"{RC} -g 1 -s 65536 -m 4096",
        f"{RC} -g 1 -s 65536 -m 4096",
        before=f"ip link set {P0} mtu 1500",
    ),
    Log(
        "pingpong-large-ok",
        "Large messages with RDMA MTU 4096 and MTU 9000 at both ends.",
        f"{RC} -g 1 -s 65536 -m 4096",
        f"{RC} -g 1 -s 65536 -m 4096",
    ),
    Log("write-bw-ok", "The GID index of the IPv4 address at both ends.", f"{BW} -x 1", f"{BW} -x 1"),
    Log("write-bw-empty-index-client", "The client's index names an empty slot.", f"{BW} -x 1", f"{BW} -x 2"),
    Log("write-bw-empty-index-both", "The index of both names an empty slot.", f"{BW} -x 2", f"{BW} -x 2"),
    Log("write-bw-mixed-v4-v6", "IPv4 at the server, IPv6 link-local at the client.", f"{BW} -x 1", f"{BW} -x 0"),
    Log("write-bw-wrong-peer", "An address where nothing listens.", f"{BW} -x 1", f"{BW} -x 1", peer="10.77.0.9"),
    Log(
        "write-bw-mtu-1500-at-client",
        "spark2's port has MTU 1500: passes, since both ends agree on RDMA MTU 1024.",
        f"{BW} -x 1 -m 4096",
        f"{BW} -x 1 -m 4096",
        before=f"ip link set {P0} mtu 1500",
    ),
]


def record(case: Case) -> None:
    vm.restore()
    for machine in vm.MACHINES:
        if commands := case.commands.get(machine.n):
            vm.on(machine, "set -e\n" + "\n".join(commands))
    if case.unplug:
        vm.ask(vm.Machine(case.unplug[0]), "set_link", name=case.unplug[1], up=False)
    time.sleep(3)  # the kernel fills GID tables in the background
    directory = FIXTURES / case.name
    shutil.rmtree(directory, ignore_errors=True)
    script = (vm.HERE / "record.py").read_bytes()
    for machine in vm.MACHINES:
        target = directory / machine.name
        target.mkdir(parents=True)
        done = subprocess.run(vm.ssh(machine, "python3", "-"), input=script, capture_output=True, check=True)
        subprocess.run(["tar", "--no-same-owner", "-x", "-C", target], input=done.stdout, check=True)
    (directory / "README.md").write_text(readme(case, kernel()))


def readme(case: Case, system: str) -> str:
    origin = (
        f"Recorded by `tests/acceptance/record.py` on both machines of `tests/acceptance/vm.py` (QEMU, {system}): "
        "Soft-RoCE devices on virtio ports; the speed of 200 Gb/s is what the virtual ports say, not what they carry."
    )
    how = [f"- {name(n)}: `{'; '.join(commands)}`" for n, commands in case.commands.items()]
    if case.unplug:
        how.append(f"- {name(case.unplug[0])}: link of {case.unplug[1]} set down in QEMU, the other end left as it was")
    if case.without:
        how.append(f"- so there is no `commands/{case.without}`")
    lines = [f"# {case.name}", "", case.title, "", textwrap.fill(origin, 120)]
    if how:
        lines += ["Made from the initial state:", "", *how]
    return "\n".join(lines) + "\n"


def name(n: int) -> str:
    return vm.Machine(n).name


def kernel() -> str:
    return vm.on(vm.MACHINES[0], '. /etc/os-release; echo "$PRETTY_NAME, kernel $(uname -r)"').strip()


def run_log(log: Log) -> None:
    """Both ends as one text file: command, output, exit code of each."""
    server, client = vm.MACHINES
    if log.before:
        vm.on(client, log.before)
    remote = f"{log.client} {log.peer}"
    with ThreadPoolExecutor() as pool:
        ends = [
            pool.submit(vm.on, server, f'({log.server}) 2>&1; echo "exit code $?"'),
            pool.submit(vm.on, client, f'sleep 4; ({remote}) 2>&1; echo "exit code $?"'),
        ]
        outputs = [end.result() for end in ends]
    parts = [f"{machine.name}# {command}\n{output}" for machine, command, output
             in zip(vm.MACHINES, (log.server, remote), outputs, strict=True)]  # fmt: skip
    if log.before:
        parts.insert(1, f"{client.name}# {log.before}\n")
    (LOGS / f"{log.name}.txt").write_text("\n".join(parts))
    if log.before:
        vm.on(client, f"ip link set {P0} mtu 9000")


def record_logs() -> None:
    vm.restore()
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    for log in LOG_CASES:
        vm.say(f"log {log.name}")
        run_log(log)
    (LOGS / "README.md").write_text(logs_readme(kernel()))


def logs_readme(system: str) -> str:
    lines = [
        "# Outputs of RDMA tools, both ends",
        "",
        textwrap.fill(
            "Recorded by `tests/acceptance/record_cases.py` on the machines of `tests/acceptance/vm.py` "
            f"(QEMU, {system}, Soft-RoCE). Server on spark1, client on spark2, over rail 0; "
            "GID 1 is the IPv4 address, 0 IPv6 link-local, 2 empty. Exit code 124 is the time limit of 20 s.",
            120,
        ),
        "",
        *(f"- `{log.name}.txt`: {log.title}" for log in LOG_CASES),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    wanted = sys.argv[1:] or [*(case.name for case in CASES), "logs"]
    os.chdir(vm.ROOT)
    vm.lock()
    for case in CASES:
        if case.name in wanted:
            vm.say(f"case {case.name}")
            record(case)
    if "logs" in wanted:
        record_logs()
    return 0


if __name__ == "__main__":
    sys.exit(main())
