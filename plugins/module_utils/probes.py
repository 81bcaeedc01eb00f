# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Probes of a rail: the commands that send traffic over it, and what their output says.

A rail is a mapping as `cabling.probe_plan` makes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

PACKAGES = {"ping": "iputils-ping", "ibv_rc_pingpong": "ibverbs-utils", "ib_write_bw": "perftest"}
# IPv4 and ICMP headers.
_PING_HEADERS = 28
# A size of 16 GiB freezes a Spark (NVIDIA/dgx-spark-playbooks#102): blocks stay at 1 MiB.
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit code, None when it was killed at its limit, and all it printed, errors last."""

    code: Optional[int]
    output: str


def ping(tool: str, rail: Mapping[str, Any]) -> List[str]:
    """Three frames of the port's MTU out of this very port, which nobody may fragment."""
    size = int(rail["mtu"]) - _PING_HEADERS
    return [tool, "-n", "-c3", "-i0.2", "-W2", "-Mdo", f"-s{size}", f"-I{rail['netdev']}", str(rail["remote"])]


def pingpong(tool: str, rail: Mapping[str, Any]) -> List[str]:
    """100 messages of 4 KiB each way with the rail's GID; the end that calls appends the peer's address."""
    argv = [tool, f"-d{rail['hca']}", f"-i{rail['port']}", f"-g{rail['gid_index']}", f"-p{rail['tcp_port']}"]
    return [*argv, f"-m{rail['path_mtu']}", "-n100", "-s4096"]


def bandwidth(tool: str, rail: Mapping[str, Any], seconds: int) -> List[str]:
    """RDMA writes in blocks of 1 MiB for some seconds; the end that calls appends the peer's address."""
    argv = [tool, "-d", str(rail["hca"]), "-i", str(rail["port"]), "-x", str(rail["gid_index"])]
    return [*argv, "-p", str(rail["tcp_port"]), "-s", str(_BLOCK), "-D", str(seconds), "-F", "--report_gbits"]


def not_serving(done: Done) -> bool:
    """Whether the peer does not listen yet; calling again helps then."""
    # Not "Couldn't connect to remote QP".
    return done.code not in (0, None) and bool(re.search(r"Couldn't connect to \S+:\d+", done.output))


def _tail(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return "\n".join(lines[-6:])


def _result(kind: str, rail: Mapping[str, Any], ok: bool, detail: str, done: Done) -> Dict[str, Any]:
    evidence = "" if ok else _tail(done.output)
    return {"kind": kind, "rail": rail["rail"], "peer": rail["peer"], "ok": ok, "detail": detail, "evidence": evidence}


def judge_ping(rail: Mapping[str, Any], done: Done) -> Dict[str, Any]:
    """One answer is enough: the first frame may be lost while the address is resolved."""
    size = int(rail["mtu"])
    received = re.search(r"(\d+) received", done.output)
    too_long = re.search(r"(local error: )?[Mm]essage too long(, mtu=\d+)?|Frag needed.*", done.output)
    if received and int(received[1]) > 0:
        return _result("ping", rail, True, f"answers frames of {size} bytes", done)
    why = too_long[0] if too_long else "no answer"
    return _result("ping", rail, False, f"{why} to a frame of {size} bytes that may not be fragmented", done)


def judge_pingpong(rail: Mapping[str, Any], done: Done) -> Dict[str, Any]:
    """It prints the time of its messages only when all of them came back."""
    if done.code == 0 and re.search(r"iters in [\d.]+ seconds", done.output):
        return _result("rdma", rail, True, f"RDMA pingpong with GID index {rail['gid_index']}", done)
    # The end that serves only sees that the other went away; without a caller it waits to its limit.
    lines = [line for line in _tail(done.output).splitlines() if not re.match(r"(local|remote) address", line)]
    if done.code is None:
        why = ": ".join(["it hangs", *([" | ".join(lines)] if lines else [])])
        why = "the peer did not call" if rail["serves"] and not lines else why
    else:
        why = " | ".join(lines) or f"exit code {done.code}"
    return _result("rdma", rail, False, f"RDMA pingpong with GID index {rail['gid_index']} fails: {why}", done)


def judge_bandwidth(rail: Mapping[str, Any], done: Done, min_ratio: float) -> Dict[str, Any]:
    """The average of `ib_write_bw --report_gbits` against a part of the link's rate."""
    needed = float(rail["rate_gbps"]) * min_ratio
    rows = re.findall(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", done.output, re.MULTILINE)
    gbps = float(rows[-1]) if rows else 0.0
    ok = bool(rows) and gbps >= needed
    detail = f"{gbps:.1f} Gb/s" if rows else "the bandwidth test fails"
    return {**_result("bandwidth", rail, ok, detail, done), "gbps": gbps, "needed_gbps": needed}
