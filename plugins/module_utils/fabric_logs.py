# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""What the errors of NCCL, torch and the verbs tools in a rank's log mean: a table of patterns and their causes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding

DOCTOR = "ansible-playbook playbooks/doctor.yml -i INVENTORY"
FABRIC = "ansible-playbook site.yml -i INVENTORY --tags fabric"
STATUS = "ansible-playbook playbooks/status.yml -i INVENTORY"
RESTART = "ansible-playbook playbooks/restart.yml -i INVENTORY"

# Longer lines are data, not messages.
_LINE = 4000
_FOUND = 240
# Lines of evidence, and characters of each.
_EVIDENCE, _SHOWN = 5, 500

_ESCAPES = re.compile(r"\x1b\[[0-9;:?]*[@-~]")
_CONTROL = dict.fromkeys([*range(32), *range(127, 160)], " ")
_DETAIL = re.compile(r"\d+\.\d+\.\d+\.\d+|GID|Gid|\bdev\b|\bhca\b|\broce\w*|\bmlx\d")


@dataclass(frozen=True)
class Cause:
    """What some lines mean. A `vague` cause steps back behind exact ones; a later line with `unless` takes it back."""

    id: str
    needed: str
    repair: str
    severity: str = "error"
    vague: bool = False
    unless: str = ""
    only_rdma: bool = False


_CHOOSE_GID = f"leave NCCL_IB_GID_INDEX out (NCCL chooses), then {FABRIC}"
GID = Cause("fabric.gid", "the RoCE v2 GID of the port's fabric address, on every HCA in use", _CHOOSE_GID)
PEER_GID = Cause("fabric.gid", "a RoCE v2 GID of the fabric address at the other end, whose GID is empty", _CHOOSE_GID)
LOCAL_GID = Cause(
    "fabric.gid",
    "GIDs of fabric addresses; link-local ones lead nowhere",
    f"give both halves of the cable an address, or leave that HCA out of NCCL_IB_HCA; then {FABRIC}",
)
GID_CHANGED = Cause(
    "fabric.gid",
    "a GID table that stays as it is while the engine runs",
    f"find what reconfigures the port (netplan, NetworkManager); {DOCTOR}",
    severity="warning",
)
PORT_ERROR = Cause(
    "fabric.port_state", "a link that stays up", "check the cable, and that the other end is up", severity="warning"
)
_PING = f"{DOCTOR} (pings every rail), then check cables and MTU, and which rail ends where"
PATH = Cause("fabric.path", "an answer from the remote GID: both must be ends of one rail", _PING)
RETRIES = Cause(
    "fabric.path", "an acknowledgement: the peer's end of this rail, with the same MTU and a GID of the fabric", _PING
)
CONNECT = Cause("fabric.rdma_path", "RoCE v2 GIDs of fabric addresses at both ends, and a path between them", DOCTOR)
TRANSFER = Cause(
    "fabric.rdma_path", "RDMA transfers without errors; the same NCCL and NCCL_* variables on all ranks", DOCTOR
)
FLUSHED = Cause("fabric.rdma_path", "the error before this one: the queue pair had already failed", DOCTOR, vague=True)
MEMLOCK = Cause(
    "fabric.memlock",
    "locked memory without limit (ulimit -l unlimited), and memory that can be pinned",
    f"ulimits.memlock: -1 in the recipe's container, then {RESTART}; if CmaFree exceeds CmaTotal in /proc/meminfo "
    "(kernel 7.0), boot with kho=off",
)
MEMORY = Cause("node.memory", "free memory", f"end other programs on the node; {DOCTOR}")
SHM = Cause("node.shm", "room in /dev/shm of the container", f"raise shm_gib of the recipe's container, then {RESTART}")
DISK = Cause("node.disk", "free space", f"free space on the node (df -h), then {RESTART}")
_FREE_SOCKETS = "leave NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME out of recipe overrides, check firewalls; " + DOCTOR
SOCKET = Cause("fabric.socket", "a socket interface whose address every rank reaches", _FREE_SOCKETS)
SOCKET_RETRY = Cause(
    SOCKET.id, SOCKET.needed, SOCKET.repair, "warning", vague=True, unless=r"Init COMPLETE|Connected all rings"
)
MIXED = Cause("fabric.socket", "ranks of one start only; others still knock at this port", RESTART)
RANK_MISSING = Cause(
    "fabric.socket",
    "all ranks at the rendezvous: running, and able to reach rank 0",
    f"{STATUS} tells which rank is missing, its log why; {DOCTOR}",
)
RANK_0 = Cause(
    "fabric.socket",
    "rank 0 at the rendezvous address, reachable from here",
    f"{STATUS} tells whether rank 0 runs; {_FREE_SOCKETS}",
)
VERBS = Cause("fabric.rdma", "libibverbs in the image", "use an image with libibverbs (rdma-core)", only_rdma=True)
TCP = Cause(
    "fabric.rdma",
    "RDMA (NET/IB); this is the silent fallback to TCP",
    f"give the container /dev/infiniband, leave NCCL_IB_DISABLE and NCCL_NET out of recipe overrides; {DOCTOR}",
    # NCCL may set up TCP first and then use RDMA.
    unless=r"NET/IB ?: Using \[|Using network \w{0,8}IB|via NET/IB",
    only_rdma=True,
)
UNHANDLED = Cause(
    "fabric.nccl",
    "the call that failed, which NCCL tells at NCCL_DEBUG=INFO",
    f"set NCCL_DEBUG=INFO in recipe overrides, {RESTART}, then {DOCTOR}",
    vague=True,
)
REMOTE = Cause("fabric.nccl", "a peer that lives: its log tells more", f"{STATUS}, then {DOCTOR}", vague=True)

_QP = r"(?:Call to )?ibv_modify_qp failed with (?:error )?"
_RETRY = r"(?=.{0,300}(?:error 12\b|status=12\b|RETRY_EXC_ERR))"

# A line belongs to the first row whose words (split at |) are all in it and whose pattern is found; what is shown
# starts there. Words are cheap and keep patterns off most lines; patterns have no unbounded gaps, so that no line can
# make them slow.
PATTERNS: Tuple[Tuple[str, str, Cause], ...] = (
    # Queue pairs that cannot be connected.
    (
        "ibv_modify_qp|local GID ::ffff:",
        _QP + r"(?:61\b|No data available)(?=.{0,300}remote GID ::(?![0-9a-f]))",
        PEER_GID,
    ),
    ("ibv_modify_qp", _QP + r"(?:61\b|19\b|22\b|No data available|No such device|Invalid argument)", GID),
    ("ibv_modify_qp", _QP + r"(?:110\b|101\b|113\b|Connection timed out|Network is unreach|No route to host)", PATH),
    ("ibv_modify_qp", _QP, CONNECT),
    ("Failed to modify QP|timed out", r"Failed to modify QP", PATH),
    ("Failed to modify QP", r"Failed to modify QP", CONNECT),
    ("Unable to Connect the HCA", r"Unable to Connect the HCA", CONNECT),
    ("Couldn't connect to remote QP", r"Couldn't connect to remote QP", CONNECT),
    # Tools of verbs print whatever errno is left over.
    ("read/write", r"(?:client|server) read/write: |Couldn't read/write remote address", CONNECT),
    # Transfers that fail: completion status 12 is no errno.
    ("Got completion|localGid fe80:", r"Got completion " + _RETRY, LOCAL_GID),
    ("Got completion", r"Got completion " + _RETRY, RETRIES),
    ("RETRY_EXC_ERR", r"\w{0,8}RETRY_EXC_ERR", RETRIES),
    ("ransport retry count", r"[Tt]ransport retry count(?:er)? exceeded", RETRIES),
    ("tatus 12", r"Failed status 12\b|status 12 \(Ib failure", RETRIES),
    ("0x81", r"(?:vend|vendor|vendor[_ ]err|vendor syndrome|syndrom):?[ =]0x81\b", RETRIES),
    ("Got completion", r"Got completion (?=.{0,300}(?:error 5\b|status=5\b|WR_FLUSH_ERR))", FLUSHED),
    ("Got completion", r"Got completion (?=.{0,200}with (?:error|status))", TRANSFER),
    ("Got CQE with error", r"Got CQE with error", TRANSFER),
    # Memory: errno 12.
    ("ibv_|Cannot allocate memory", r"(?:Call to )?\bibv_", MEMLOCK),
    ("Couldn't| MR", r"Couldn't (?:register|allocate) MR", MEMLOCK),
    ("Cannot allocate memory", r"(?:\[Errno 12\] )?Cannot allocate memory", MEMORY),
    # Files.
    ("No space left on device|/dev/shm", r"failed to extend |Error while creating |/dev/shm", SHM),
    ("No space left on device|fallocate", r"(?:Call to )?posix_fallocate failed", SHM),
    ("creating shared memory segment", r"Error while creating shared memory segment", SHM),
    ("No space left on device", r"(?:\[Errno 28\] )?No space left on device", DISK),
    # Sockets: NCCL's bootstrap, gloo, torch's rendezvous.
    ("socket interface found", r"Bootstrap ?: no socket interface found", SOCKET),
    ("listening interface found", r"No usable listening interface found", SOCKET),
    ("neither AF_INET", r"connecting to address .{0,80}neither AF_INET", SOCKET),
    ("onnect to ", r"[Cc]onnect to [^ ]{1,80} (?:failed ?:|returned )", SOCKET),
    ("Call to connect failed", r"Call to connect failed", SOCKET),
    ("Call to connect returned", r"Call to connect returned", SOCKET_RETRY),
    ("NCCL WARN|Bootstrap Root", r"Bootstrap Root", MIXED),
    ("NCCL WARN|ootstrap", r"[Bb]ootstrap.{0,80}(?:timeout|timed out)", SOCKET),
    ("onnectFullMesh failed", r"(?:Gloo )?connectFullMesh failed", SOCKET),
    ("Timed out after| joined", r"(?:DistStoreError: )?Timed out after \d{1,9} seconds waiting for", RANK_MISSING),
    ("client socket has", r"(?:DistNetworkError: )?The client socket has (?:timed out|failed)", RANK_0),
    ("ncclUniqueId|got error", r"setting up NCCL communicator", RANK_0),
    # RDMA that is not used.
    ("Failed to open libibverbs", r"Failed to open libibverbs", VERBS),
    ("Using network Socket", r"Using network Socket", TCP),
    ("NET/Socket", r"NET/Socket ?: Using|via NET/Socket", TCP),
    ("No device found", r"NET/IB ?: No device found", TCP),
    ("NCCL_IB_DISABLE", r"NCCL_IB_DISABLE set by environment to 1\b", TCP),
    # What happened meanwhile, and what remains.
    ("Got async event", r"Got async event ?: GID table change", GID_CHANGED),
    ("Got async event", r"Got async event ?: port error", PORT_ERROR),
    ("unhandled system error", r"NCCL [Ee]rror.{0,200}unhandled system error|unhandled system error", UNHANDLED),
    ("ncclSystemError", r"ncclSystemError", UNHANDLED),
    ("ncclRemoteError", r"ncclRemoteError", REMOTE),
)

_ROWS = tuple((tuple(words.split("|")), re.compile(pattern), cause) for words, pattern, cause in PATTERNS)


@dataclass
class _Seen:
    """The lines of one cause: how many, the most telling one, and some to show."""

    count: int
    detail: int
    told: str
    evidence: List[str]


def clean(line: str) -> str:
    """A line as it can be shown: without colours and control characters, not endless."""
    plain = _ESCAPES.sub("", line[:_LINE]).translate(_CONTROL)
    return plain.encode("utf-8", "replace").decode("utf-8").strip()


def match(lines: Sequence[str], host: str, rdma: bool = True) -> List[Finding]:
    """What the errors in the log of a host's rank mean: one finding for each cause. `rdma`: RDMA is wanted."""
    seen: Dict[Cause, _Seen] = {}
    for raw in lines:
        line = clean(str(raw))
        for cause in [cause for cause in seen if cause.unless and re.search(cause.unless, line)]:
            del seen[cause]
        for words, pattern, cause in _ROWS:
            found = pattern.search(line) if all(word in line for word in words) else None
            if found and (rdma or not cause.only_rdma):
                _add(seen, cause, line, line[found.start() :])
                break
    exact = [cause for _, _, cause in PATTERNS if cause in seen and not cause.vague]
    return [
        _finding(cause, seen[cause], host, [other for other in exact if other.id != cause.id])
        for cause in dict.fromkeys(cause for _, _, cause in PATTERNS)
        if cause in seen and not (cause.vague and cause.id in [other.id for other in exact])
    ]


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _add(seen: Dict[Cause, _Seen], cause: Cause, line: str, message: str) -> None:
    detail = len(_DETAIL.findall(message))
    entry = seen.setdefault(cause, _Seen(0, detail, message, []))
    entry.count += 1
    if detail > entry.detail:
        entry.detail, entry.told = detail, message
    if len(entry.evidence) < _EVIDENCE:
        entry.evidence.append(_short(line, _SHOWN))


def _finding(cause: Cause, seen: _Seen, host: str, exact: Sequence[Cause]) -> Finding:
    told = _short(seen.told, _FOUND) + (f" ({seen.count} times)" if seen.count > 1 else "")
    needed, repair, severity = cause.needed, cause.repair, cause.severity
    if cause.vague and exact:
        ids = ", ".join(dict.fromkeys(other.id for other in exact))
        needed, repair, severity = f"nothing of its own: see {ids}", exact[0].repair, "info"
    return Finding(cause.id, host, told, needed, repair, severity, "\n".join(seen.evidence))
