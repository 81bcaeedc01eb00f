# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import fabric_logs
from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding

LOGS = Path(__file__).parents[3] / "fixtures" / "nccl-logs"
TOOLS = LOGS.parent / "fabric" / "logs"

# File -> what it means: id, severity and words of what was found.
MEANINGS: dict[str, list[tuple[str, str, str]]] = {
    "gid-local-empty": [
        (
            "fabric.gid",
            "error",
            "on dev roceP2p1s0f0:1, curr state INIT, next state RTR, local GID index 3, local GID ::",
        ),
        ("fabric.nccl", "info", "unhandled system error"),
    ],
    "gid-remote-empty": [
        ("fabric.gid", "error", "local GID ::ffff:10.0.2.2, remote GID ::"),
        ("fabric.nccl", "info", "unhandled system error"),
    ],
    "gid-no-such-device": [("fabric.gid", "error", "No such device errno 19")],
    "gid-invalid-argument": [("fabric.gid", "error", "Invalid argument")],
    "path-timed-out": [
        (
            "fabric.path",
            "error",
            "dev rocep1s0f0:1, curr state INIT, next state RTR, local GID index 3, local GID ::ffff:192.168.99.1, "
            "remote GID ::ffff:192.168.99.6",
        )
    ],
    "path-timed-out-old": [("fabric.path", "error", "Connection timed out")],
    "path-timed-out-errno": [
        ("fabric.path", "error", "Connection timed out errno 110"),
        ("fabric.nccl", "info", "NCCL Error 2: unhandled system error"),
    ],
    "path-unreachable": [("fabric.path", "error", "Network is unreachable")],
    "path-rtr-errno": [("fabric.path", "error", "Failed to modify QP to RTR: Connection timed out")],
    "path-handshake": [("fabric.path", "error", "Connection timed out [110]")],
    "retry-exceeded": [("fabric.path", "error", "Got completion with error 12, opcode 1, len 0, vendor err 129")],
    "retry-exceeded-peer": [
        ("fabric.path", "error", "status=12 opcode=129 len=65536 vendor err 129 (Recv) localGid ::ffff:10.77.0.1"),
        # What is flushed after the first error says nothing more.
        ("fabric.rdma_path", "info", "status=5"),
    ],
    "retry-exceeded-link-local": [("fabric.gid", "error", "localGid fe80::4ebb:47ff:fe2e:5fa6")],
    "retry-exceeded-perftest": [("fabric.path", "error", "Failed status 12: wr_id 0 syndrom 0x81")],
    # A completion status in the words of an errno, which it is not.
    "retry-exceeded-strerror": [("fabric.path", "error", "status 12 (Ib failure: Cannot allocate memory)")],
    "retry-exceeded-ucx": [("fabric.path", "error", "exceeded on mlx5_2:1/IB (synd 0x15 vend 0x81")],
    "retry-exceeded-syndrome": [("fabric.path", "error", "transport retry counter exceeded")],
    "completion-invalid-request": [("fabric.rdma_path", "error", "IBV_WC_REM_INV_REQ_ERR(9)")],
    # 81 is 0x51, not 0x81.
    "completion-protection": [("fabric.rdma_path", "error", "with error 4, opcode 32564, len 32564, vendor err 81")],
    "memlock": [
        ("fabric.memlock", "error", "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"),
        ("fabric.nccl", "info", "unhandled system error"),
    ],
    "memlock-ucx": [("fabric.memlock", "error", "ibv_reg_mr failed: Cannot allocate memory")],
    "memlock-cq": [("fabric.memlock", "error", "ibv_create_cq() failed: Cannot allocate memory")],
    "memory": [("node.memory", "error", "[Errno 12] Cannot allocate memory")],
    "connect-refused": [("fabric.socket", "error", "Connect to 10.38.10.112<21724> failed : Connection refused")],
    "connect-aborted": [("fabric.socket", "error", "Software caused connection abort")],
    "connect-no-route": [("fabric.socket", "error", "Connect to 10.0.0.4<56849> returned 113(No route to host)")],
    "connect-retries": [("fabric.socket", "error", "connect to 10.82.101.249<37857> returned Connection refused")],
    "bootstrap-mismatch": [("fabric.socket", "error", "Bootstrap Root : mismatch in info from procs")],
    "unique-id": [("fabric.socket", "error", "retrieving ncclUniqueId from [0]")],
    "no-interface": [("fabric.socket", "error", "Bootstrap : no socket interface found")],
    "no-interface-family": [("fabric.socket", "error", "family 59936 is neither AF_INET(2) nor AF_INET6(10)")],
    "rank-missing": [("fabric.socket", "error", "Timed out after 601 seconds waiting for clients. 1/2 clients joined")],
    "rank-missing-old": [("fabric.socket", "error", "1/2 workers joined")],
    "store-timeout": [("fabric.socket", "error", "while trying to connect to (172.17.0.9, 46229)")],
    "gloo-mesh": [("fabric.socket", "error", "Gloo connectFullMesh failed with [")],
    "tcp-fallback": [("fabric.rdma", "error", "NET/Socket : Using [0]eno1:172.18.40.41<0>")],
    "tcp-no-libibverbs": [
        ("fabric.rdma", "error", "Failed to open libibverbs.so[.1]"),
        ("fabric.rdma", "error", "NET/Socket : Using [0]ens5:172.31.0.137<0>"),
    ],
    "pingpong-rtr": [("fabric.rdma_path", "error", "Failed to modify QP to RTR (2 times)")],
    # The errno of the tool is a leftover: no disk is full.
    "pingpong-client": [("fabric.rdma_path", "error", "client read/write: ")],
    "perftest-rtr": [("fabric.rdma_path", "error", "Failed to modify QP 122273 to RTR (4 times)")],
    "shm-full": [("node.shm", "error", "failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes")],
    "shm-full-old": [("node.shm", "error", "posix_fallocate failed : No space left on device")],
    "unhandled": [("fabric.nccl", "error", "unhandled system error, NCCL version 2.4.8")],
    "healthy-nccl": [],
    "healthy-socket-first": [],
    "healthy-vllm": [],
}


def recorded(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text().splitlines()


def one(*lines: str) -> Finding:
    (finding,) = fabric_logs.match(lines, "spark1")
    return finding


def test_every_recorded_log_has_a_meaning_and_an_address() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(MEANINGS)
    readme = (LOGS / "README.md").read_text()
    assert not [name for name in MEANINGS if not re.search(rf"^\|[^|]*\b{name}\b[^|]*\| \S", readme, re.MULTILINE)]


@pytest.mark.parametrize("name", MEANINGS)
def test_recorded_logs(name: str) -> None:
    findings = fabric_logs.match(recorded(name), "spark2")
    assert [(finding.id, finding.severity) for finding in findings] == [meaning[:2] for meaning in MEANINGS[name]]
    for finding, (_, _, words) in zip(findings, MEANINGS[name], strict=True):
        assert words in finding.found
        assert finding.host == "spark2"
        assert finding.needed and finding.repair
        assert finding.evidence


@pytest.mark.parametrize(
    ("name", "needed", "repair"),
    [
        ("gid-local-empty", "the RoCE v2 GID of the port's fabric address", "leave NCCL_IB_GID_INDEX out"),
        ("gid-remote-empty", "at the other end", "leave NCCL_IB_GID_INDEX out"),
        ("retry-exceeded-link-local", "link-local ones lead nowhere", "give both halves of the cable an address"),
        ("retry-exceeded", "the same MTU", "ansible-playbook playbooks/doctor.yml -i INVENTORY"),
        ("path-timed-out", "ends of one rail", "ansible-playbook playbooks/doctor.yml -i INVENTORY"),
        ("memlock", "ulimit -l unlimited", "kho=off"),
        ("memory", "free memory", "end other programs"),
        ("rank-missing", "all ranks at the rendezvous", "playbooks/status.yml -i INVENTORY tells which rank"),
        ("store-timeout", "rank 0", "playbooks/status.yml -i INVENTORY"),
        ("no-interface", "a socket interface", "NCCL_SOCKET_IFNAME"),
        ("gloo-mesh", "a socket interface", "GLOO_SOCKET_IFNAME"),
        ("tcp-fallback", "silent fallback to TCP", "/dev/infiniband"),
        ("shm-full", "/dev/shm", "shm_gib"),
        ("unhandled", "NCCL_DEBUG=INFO", "NCCL_DEBUG=INFO"),
    ],
)
def test_what_is_needed_and_what_repairs_it(name: str, needed: str, repair: str) -> None:
    finding = fabric_logs.match(recorded(name), "spark1")[0]
    assert needed in finding.needed
    assert repair in finding.repair


# Lines in the words of the programs' sources, for which no recorded log was found.
LINES = [
    ("NCCL WARN Call to ibv_modify_qp failed with error No data available errno 61", "fabric.gid", "error"),
    ("NCCL WARN Call to ibv_modify_qp failed with 113 No route to host, on dev mlx5_0:1", "fabric.path", "error"),
    ("NCCL WARN Call to ibv_modify_qp failed with 5 Input/output error", "fabric.rdma_path", "error"),
    ("NCCL WARN NET/IB : rocep1s0f0:1 Got async event : GID table change", "fabric.gid", "warning"),
    ("NCCL WARN NET/IB : rocep1s0f0:1 Got async event : port error", "fabric.port_state", "warning"),
    ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory errno 12", "fabric.memlock", "error"),
    ("Couldn't register MR", "fabric.memlock", "error"),
    ("NCCL WARN bootstrapRoot: timeout, 1 of 2 ranks checked in", "fabric.socket", "error"),
    ("NCCL WARN NET/Socket : No usable listening interface found", "fabric.socket", "error"),
    ("include/socket.h:185 WARN Call to connect failed : Connection refused", "fabric.socket", "error"),
    ("NCCL INFO Call to connect returned Connection refused, retrying", "fabric.socket", "warning"),
    ("NCCL INFO NCCL_IB_DISABLE set by environment to 1.", "fabric.rdma", "error"),
    ("NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0", "fabric.rdma", "error"),
    ("Failed status transport retry counter exceeded (12) for wr_id 2", "fabric.path", "error"),
    ("RoCE proxy failed: RDMA write to rank 1: vendor_err 0x81", "fabric.path", "error"),
    ("RuntimeError: poll_cq: IBV_WC_RETRY_EXC_ERR", "fabric.path", "error"),
    ("NET/IB: Got completion from peer 10.77.0.2<4> with status=IBV_WC_RETRY_EXC_ERR(12)", "fabric.path", "error"),
    ("NET/IB : Got completion from peer 10.77.0.2<4> with status=10 opcode=0", "fabric.rdma_path", "error"),
    ("NET/IB : Got completion with error 11, opcode 0, len 0, vendor err 138", "fabric.rdma_path", "error"),
    ("OSError: [Errno 28] No space left on device: '/cache/x'", "node.disk", "error"),
    ("ncclRemoteError: A call failed possibly due to a network error", "fabric.nccl", "error"),
]


@pytest.mark.parametrize(("line", "kind", "severity"), LINES)
def test_lines(line: str, kind: str, severity: str) -> None:
    finding = one(line)
    assert (finding.id, finding.severity) == (kind, severity)


def test_every_row_is_the_first_of_some_line() -> None:
    def row(line: str) -> int | None:
        for number, (words, pattern, _) in enumerate(fabric_logs.PATTERNS):
            if all(word in line for word in words.split("|")) and re.search(pattern, line):
                return number
        return None

    lines = [line for name in MEANINGS for line in recorded(name)] + [line for line, _, _ in LINES]
    assert {row(line) for line in lines} >= set(range(len(fabric_logs.PATTERNS)))


def test_the_empty_gid_is_told_from_the_filled_one() -> None:
    start = "NCCL WARN Call to ibv_modify_qp failed with 61 No data available, on dev rocep1s0f0:1, "
    peer = one(start + "local GID ::ffff:10.77.0.1, remote GID ::").needed
    for gids in (
        "local GID ::, remote GID ::",
        "local GID ::ffff:10.77.0.1, remote GID ::ffff:10.77.0.2",
        "local GID ::",
    ):
        assert one(start + gids).needed != peer


@pytest.mark.parametrize(
    "line",
    [
        "",
        "INFO 12 requests, status 12",
        "NCCL INFO Channel 12/16 : 0 1",
        "NCCL INFO Init timings - ncclCommInitRankConfig: rank 0 (kernels 0.18, bootstrap 0.01)",
        "NCCL INFO Bootstrap: Using enp1s0f0np0:10.77.0.1<0>",
        "NCCL INFO Call to ibv_set_ece failed with error Operation not supported errno 95",
        "NCCL INFO NCCL_IB_DISABLE set by environment to 0.",
        "NCCL INFO NCCL_IB_DISABLE set by environment to 10.",
        "NCCL WARN NET/IB : mlx5_0:1 Got async event : port active",
        "E0302 08:32:30 rdma_context.cpp:450] Failed to query GID 244 on rocep153s0/: No data available [61]",
        "INFO connect to http://10.0.0.1:8000 for docs",
        "Uvicorn running, error 404, status=200",
    ],
)
def test_lines_that_mean_nothing(line: str) -> None:
    assert fabric_logs.match([line], "spark1") == []


def test_one_finding_for_a_cause_with_its_most_telling_line_and_a_count() -> None:
    plain = "NCCL WARN Call to ibv_modify_qp failed with error Connection timed out"
    telling = recorded("path-timed-out")[0]
    finding = one(plain, *[telling] * 5, plain)
    assert "remote GID ::ffff:192.168.99.6" in finding.found
    assert finding.found.endswith("(7 times)")
    assert finding.evidence.splitlines() == [plain, *[telling] * 4]


def test_causes_with_one_id_are_kept_apart() -> None:
    lines = recorded("gid-local-empty")[:1] + recorded("gid-remote-empty")[:1]
    found = fabric_logs.match(lines, "spark1")
    assert [finding.id for finding in found] == ["fabric.gid", "fabric.gid"]
    assert len({finding.needed for finding in found}) == 2


def test_the_unhandled_error_points_at_the_exact_ones() -> None:
    found = fabric_logs.match(recorded("unhandled") + recorded("path-timed-out") + recorded("memlock"), "spark1")
    (vague,) = [finding for finding in found if finding.id == "fabric.nccl"]
    assert vague.severity == "info"
    assert vague.needed == "nothing of its own: see fabric.path, fabric.memlock"
    assert vague.repair == found[0].repair


def test_vague_causes_alone_are_errors() -> None:
    flushed = [line for line in recorded("retry-exceeded-peer") if "status=5" in line]
    assert [finding.severity for finding in fabric_logs.match(flushed, "spark1")] == ["error"]


def test_a_connection_that_was_retried_until_it_worked_is_no_finding() -> None:
    retries = recorded("connect-refused")[:3]
    assert [finding.severity for finding in fabric_logs.match(retries, "spark1")] == ["warning"]
    assert fabric_logs.match(retries + recorded("healthy-nccl"), "spark1") == []
    assert len(fabric_logs.match(recorded("healthy-nccl") + retries, "spark1")) == 1


def test_tcp_counts_only_where_rdma_is_wanted_and_did_not_come_later() -> None:
    tcp, rdma = recorded("tcp-fallback"), recorded("healthy-nccl")
    assert fabric_logs.match(tcp, "spark1", rdma=False) == []
    assert fabric_logs.match(recorded("tcp-no-libibverbs"), "spark1", rdma=False) == []
    assert fabric_logs.match(tcp + rdma, "spark1") == []
    # A container that was restarted: the last start counts.
    assert [finding.id for finding in fabric_logs.match(rdma + tcp, "spark1")] == ["fabric.rdma"]


@pytest.mark.parametrize(
    "decoration",
    [
        "\x1b[36m(Worker pid=1)\x1b[0m {} \x1b[32m [repeated 2x]\x1b[0m",
        "{}\r",
        "\x00\x07{}\x1b",
        "\udcff\ud800 {} \udcfe",
        "\ufeff{}\u200b",
    ],
)
def test_colours_and_garbage(decoration: str) -> None:
    message = recorded("path-timed-out")[0]
    finding = one(decoration.format(message))
    assert finding.id == "fabric.path"
    shown = json.dumps(finding.to_dict(), ensure_ascii=False).encode()
    assert b"\x1b" not in shown and b"\\u001b" not in shown
    assert all(character == "\n" or character.isprintable() or ord(character) > 255 for character in finding.evidence)


def test_colours_inside_a_message() -> None:
    assert one("NCCL WARN Call to \x1b[1mibv_modify_qp\x1b[0m failed with \x1b[31;1m61\x1b[m").id == "fabric.gid"


def test_what_is_shown_is_short() -> None:
    finding = one("NCCL WARN Call to ibv_modify_qp failed with 61 " + "x" * 100_000)
    assert len(finding.found) <= 240
    assert len(finding.evidence) <= 500


@pytest.mark.parametrize(
    "piece",
    [
        "x",
        "\x1b[",
        "\x1b[0;",
        "ibv_modify_qp failed with 61 local GID ::ffff:remote GID ::f",
        "Got completion localGid fe80:",
        "Got completion with error",
        "ibv_ Cannot allocate memory",
        "NCCL WARN Bootstrap time",
        "NCCL error unhandled system erro",
        "connect to ",
        "connecting to address neither AF_INET",
        "No space left on device /dev/shm ",
        "Timed out after 99999999999 joined",
    ],
)
def test_hostile_lines_take_linear_time(piece: str) -> None:
    line = piece * (1_000_000 // len(piece))
    begin = time.process_time()
    fabric_logs.match([line] * 100, "spark1")
    assert time.process_time() - begin < 5


def test_many_lines_take_linear_time() -> None:
    lines = recorded("healthy-nccl") * 500 + recorded("path-timed-out") * 5000
    begin = time.process_time()
    finding = one(*lines)
    assert time.process_time() - begin < 10
    assert finding.found.endswith("(5000 times)")


def test_no_pattern_has_an_unbounded_gap() -> None:
    for _, pattern, _ in fabric_logs.PATTERNS:
        assert not re.search(r"(?<!\\)[*+]", pattern), pattern


@pytest.mark.skipif(not TOOLS.is_dir(), reason="no recorded outputs of Soft-RoCE tools")
def test_outputs_of_soft_roce_tools_can_be_read() -> None:
    for path in sorted(TOOLS.iterdir()):
        fabric_logs.match(path.read_text(errors="surrogateescape").splitlines(), "spark1")
