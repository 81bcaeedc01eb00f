# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What probes call, and what they read from what the tools print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils.probes import (
    Done,
    bandwidth,
    judge_bandwidth,
    judge_ping,
    judge_pingpong,
    not_serving,
    ping,
    pingpong,
)

RAIL: dict[str, Any] = {
    "rail": 1,
    "peer": "spark2",
    "netdev": "enP2p1s0f0np0",
    "hca": "roceP2p1s0f0",
    "port": 1,
    "gid_index": 4,
    "mtu": 9000,
    "path_mtu": 4096,
    "rate_gbps": 200.0,
    "local": "10.77.1.1",
    "remote": "10.77.1.2",
    "serves": False,
    "tcp_port": 18601,
}
SERVES = {**RAIL, "serves": True}


def test_ping_sends_whole_frames_out_of_the_port() -> None:
    # 9000 bytes less 20 of IPv4 and 8 of ICMP.
    assert ping("/bin/ping", RAIL) == [
        "/bin/ping", "-n", "-c3", "-i0.2", "-W2", "-Mdo", "-s8972", "-IenP2p1s0f0np0", "10.77.1.2",
    ]  # fmt: skip


def test_pingpong_uses_the_chosen_gid() -> None:
    assert pingpong("/bin/pp", RAIL) == [
        "/bin/pp", "-droceP2p1s0f0", "-i1", "-g4", "-p18601", "-m4096", "-n100", "-s4096",
    ]  # fmt: skip


def test_bandwidth_has_bounded_blocks() -> None:
    assert bandwidth("/bin/bw", RAIL, 3) == [
        "/bin/bw", "-d", "roceP2p1s0f0", "-i", "1", "-x", "4", "-p", "18601", "-s", "1048576", "-D", "3", "-F",
        "--report_gbits",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [
        (1, "Couldn't connect to 10.77.1.2:18601\n", True),
        (1, "Couldn't connect to remote QP\n", False),
        (0, "Couldn't connect to 10.77.1.2:18601\n", False),
        (None, "Couldn't connect to 10.77.1.2:18601\n", False),
        (1, "Failed to modify QP to RTR\n", False),
    ],
)
def test_a_peer_that_does_not_serve_yet(code: int | None, output: str, expected: bool) -> None:
    assert not_serving(Done(code, output)) is expected


# iputils 20221126, on Debian 12.
PING = """\
PING 127.0.0.1 (127.0.0.1) from 127.0.0.1 lo: 8972(9000) bytes of data.
8980 bytes from 127.0.0.1: icmp_seq=1 ttl=64 time=0.065 ms

--- 127.0.0.1 ping statistics ---
3 packets transmitted, {received} received, {loss}% packet loss, time 415ms
"""
TOO_LONG = """\
PING 127.0.0.1 (127.0.0.1) from 127.0.0.1 lo: 65508(65536) bytes of data.
ping: local error: message too long, mtu=65535

--- 127.0.0.1 ping statistics ---
1 packets transmitted, 0 received, +1 errors, 100% packet loss, time 0ms

"""


@pytest.mark.parametrize(
    ("code", "output", "ok", "detail"),
    [
        (0, PING.format(received=3, loss=0), True, "answers frames of 9000 bytes"),
        # The first one is lost while the address is resolved.
        (1, PING.format(received=1, loss=66), True, "answers frames of 9000 bytes"),
        (1, PING.format(received=0, loss=100), False, "no answer to a frame of 9000 bytes that may not be fragmented"),
        (
            1,
            TOO_LONG,
            False,
            "local error: message too long, mtu=65535 to a frame of 9000 bytes that may not be fragmented",
        ),
        (
            1,
            "From 10.77.1.9 icmp_seq=1 Frag needed and DF set (mtu = 1500)\n",
            False,
            "Frag needed and DF set (mtu = 1500) to",
        ),
        (2, "ping: SO_BINDTODEVICE enP2p1s0f0np0: Operation not permitted\n", False, "no answer to a frame"),
        (None, "", False, "no answer to a frame"),
    ],
)
def test_judge_ping(code: int | None, output: str, ok: bool, detail: str) -> None:
    result = judge_ping(RAIL, Done(code, output))
    assert (result["kind"], result["rail"], result["peer"], result["ok"]) == ("ping", 1, "spark2", ok)
    assert result["detail"].startswith(detail)
    lines = [line for line in output.splitlines() if line]
    assert result["evidence"].splitlines() == ([] if ok else lines[-6:])


ADDRESSES = """\
  local address:  LID 0x0000, QPN 0x000011, PSN 0x5a1b1c, GID ::ffff:10.77.1.1
  remote address: LID 0x0000, QPN 0x000011, PSN 0x9c1a2b, GID ::ffff:10.77.1.2
"""
PASSED = ADDRESSES + "819200 bytes in 0.01 seconds = 1147.07 Mbit/sec\n100 iters in 0.01 seconds = 57.13 usec/iter\n"


@pytest.mark.parametrize(
    ("rail", "code", "output", "ok", "detail"),
    [
        (RAIL, 0, PASSED, True, "RDMA pingpong with GID index 4"),
        (RAIL, 1, PASSED, False, "RDMA pingpong with GID index 4 fails: "),
        (RAIL, 0, ADDRESSES, False, "RDMA pingpong with GID index 4 fails: exit code 0"),
        (
            RAIL,
            1,
            ADDRESSES + "Failed to modify QP to RTR\n",
            False,
            "RDMA pingpong with GID index 4 fails: Failed to modify QP to RTR",
        ),
        (RAIL, None, ADDRESSES, False, "RDMA pingpong with GID index 4 fails: it hangs"),
        (SERVES, None, "", False, "RDMA pingpong with GID index 4 fails: the peer did not call"),
        (SERVES, None, ADDRESSES, False, "RDMA pingpong with GID index 4 fails: the peer did not call"),
        (
            SERVES,
            None,
            "poll CQ failed -1\n",
            False,
            "RDMA pingpong with GID index 4 fails: it hangs: poll CQ failed -1",
        ),
        (SERVES, -11, "", False, "RDMA pingpong with GID index 4 fails: exit code -11"),
    ],
)
def test_judge_pingpong(rail: dict[str, Any], code: int | None, output: str, ok: bool, detail: str) -> None:
    result = judge_pingpong(rail, Done(code, output))
    assert (result["kind"], result["ok"]) == ("rdma", ok)
    assert result["detail"].startswith(detail) and bool(result["evidence"]) == (not ok and bool(output))


BANDWIDTH = """\
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 1048576    35000            0.00               {average}             0.012345
---------------------------------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("output", "ok", "detail", "gbps"),
    [
        (BANDWIDTH.format(average="98.03"), True, "98.0 Gb/s", 98.03),
        (BANDWIDTH.format(average="80.00"), True, "80.0 Gb/s", 80.0),
        (BANDWIDTH.format(average="79.99"), False, "80.0 Gb/s", 79.99),
        (BANDWIDTH.format(average="3.10"), False, "3.1 Gb/s", 3.1),
        ("Failed to modify QP 17 to RTR\n", False, "the bandwidth test fails", 0.0),
        ("", False, "the bandwidth test fails", 0.0),
    ],
)
def test_judge_bandwidth(output: str, ok: bool, detail: str, gbps: float) -> None:
    result = judge_bandwidth(RAIL, Done(0, output), 0.4)
    assert (result["kind"], result["ok"], result["detail"]) == ("bandwidth", ok, detail)
    assert (result["gbps"], result["needed_gbps"]) == (gbps, pytest.approx(80.0))


# Recorded on Soft-RoCE, both ends

RECORDED = Path(__file__).parents[3] / "fixtures/fabric/logs"


def recorded(name: str, host: str) -> Done:
    """How the tool ended on a host; 124 is the time limit."""
    parts = re.split(r"^(spark\d)# (.*)\n", (RECORDED / f"{name}.txt").read_text(), flags=re.MULTILINE)[1:]
    (output,) = [
        text
        for end, command, text in zip(*(parts[n::3] for n in range(3)), strict=True)
        if end == host and "timeout" in command
    ]
    output, _, code = output.strip().rpartition("exit code ")
    # The module puts standard error, which came first here, behind the rest.
    lines = output.splitlines()
    first = next((n for n, line in enumerate(lines) if not line or line.startswith(("  local", "---"))), len(lines))
    return Done(None if code == "124" else int(code), "\n".join([*lines[first:], *lines[:first]]))


@pytest.mark.parametrize(
    ("name", "server", "client"),
    [
        ("pingpong-ok", "", ""),
        ("pingpong-large-ok", "", ""),
        (
            "pingpong-empty-index-both",
            "Failed to modify QP to RTR | Couldn't connect to remote QP",
            "client read/write: No data available | Couldn't read/write remote address",
        ),
        ("pingpong-empty-index-client", "Failed to modify QP to RTR", "client read/write: No data available"),
        ("pingpong-empty-index-server", "Failed to modify QP to RTR", "client read/write: No space left on device"),
        ("pingpong-mixed-v4-v6", "Failed to modify QP to RTR", "client read/write: No space left on device"),
        ("pingpong-no-index", "Failed to modify QP to RTR", "client read/write: No space left on device"),
        ("pingpong-index-beyond-table", "the peer did not call", "can't read sgid of index 5000"),
        ("pingpong-no-device", "the peer did not call", "IB device mlx5_0 not found"),
        ("pingpong-wrong-peer", "the peer did not call", "Couldn't connect to 10.77.0.9:18515"),
        (
            "pingpong-mtu-1500-at-client",
            "the peer did not call",
            "Failed status Work Request Flushed Error (5) for wr_id 2",
        ),
    ],
)
def test_recorded_pingpongs(name: str, server: str, client: str) -> None:
    for host, rail, why in (("spark1", SERVES, server), ("spark2", RAIL, client)):
        done = recorded(name, host)
        result = judge_pingpong(rail, done)
        expected = f"RDMA pingpong with GID index 4 fails: {why}" if why else "RDMA pingpong with GID index 4"
        assert result["ok"] == (not why) and result["detail"].startswith(expected)
        assert not_serving(done) == (host == "spark2" and name == "pingpong-wrong-peer")


def test_a_recorded_call_before_the_peer_serves() -> None:
    assert not_serving(recorded("pingpong-no-server", "spark2"))


@pytest.mark.parametrize(
    ("name", "gbps", "evidence"),
    [
        ("write-bw-ok", 2.27, ""),
        ("write-bw-mtu-1500-at-client", 2.10, ""),
        ("write-bw-empty-index-both", 0.0, "Failed to modify QP 30 to RTR"),
        ("write-bw-wrong-peer", 0.0, "Couldn't connect to 10.77.0.9:18515"),
    ],
)
def test_recorded_bandwidths(name: str, gbps: float, evidence: str) -> None:
    """Recorded without --report_gbits: the numbers are MiB/s, the table is the same."""
    result = judge_bandwidth({**RAIL, "rate_gbps": 5.0}, recorded(name, "spark2"), 0.4)
    assert (result["gbps"], result["ok"]) == (gbps, gbps > 0)
    assert evidence in result["evidence"]


def test_both_ends_of_a_bandwidth_test_tell_the_same() -> None:
    ends = [judge_bandwidth(RAIL, recorded("write-bw-ok", host), 0.0)["gbps"] for host in ("spark1", "spark2")]
    assert ends == [2.27, 2.27]


def test_a_link_of_unknown_rate_needs_an_answer_only() -> None:
    rail = {**RAIL, "rate_gbps": 0.0}
    assert judge_bandwidth(rail, Done(0, BANDWIDTH.format(average="0.50")), 0.4)["ok"]
    assert not judge_bandwidth(rail, Done(1, ""), 0.4)["ok"]
