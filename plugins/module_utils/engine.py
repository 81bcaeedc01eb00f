# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Judgements about running ranks: whether to keep them, whether a start makes progress, whether a cluster is whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence

from ansible_collections.sparkwright.dsv41.plugins.module_utils.findings import Finding

PLAN_LABEL = "sparkwright.plan"
START = "ansible-playbook playbooks/start.yml -i INVENTORY"
RESTART = "ansible-playbook playbooks/restart.yml -i INVENTORY"
# Samples in a row that may fail before a rank counts as lost: a node that loads weights can be slow to answer.
LOST = 3


@dataclass(frozen=True)
class Verdict:
    """`state` is ready, progressing, stalled or dead; `reason` names the rank and what was seen."""

    state: str
    reason: str
    rank: Optional[int] = None


def changes(states: Mapping[str, Mapping[str, Any]], hashes: Mapping[str, str]) -> List[str]:
    """Why the ranks must be started anew; empty when every one runs what the plan says.

    `states` maps host to the answer of engine_state, `hashes` maps host to the hash of its rank in the plan.
    One reason is enough to restart all: a lone rank cannot rejoin. Whether the endpoint answers is not asked here:
    ranks that run the plan may still be starting, and engine_wait judges that.
    """
    reasons = []
    for host, wanted in hashes.items():
        state = states.get(host, {})
        if not state.get("exists"):
            reasons.append(f"{host}: no container")
        elif not state.get("running"):
            reasons.append(f"{host}: container is {state.get('status')} (exit code {state.get('exit_code')})")
        elif state.get("plan") != wanted:
            reasons.append(f"{host}: runs plan {state.get('plan') or 'unknown'}, wanted {wanted}")
    return reasons


def merge_logs(out: str, err: str, lines: int) -> List[str]:
    """The last lines of `docker logs --timestamps`: its two streams in order of time, progress bars at their end."""
    entries = [line.partition(" ") for text in (out, err) for line in text.split("\n") if line]
    texts = [text.rstrip("\r").rpartition("\r")[2] for _, _, text in sorted(entries, key=lambda entry: entry[0])]
    return texts[max(0, len(texts) - lines) :]


def _line(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "..."


def judge(
    history: Sequence[Mapping[int, Mapping[str, Any]]], seconds: Sequence[float], deadline_s: float, stall_s: float
) -> Verdict:
    """Judge a start by progress.

    `history` holds, oldest first, one mapping rank -> engine_state answer per sample, taken at `seconds` since the
    start of the wait. A dead rank ends the wait at once; a flat log with an idle CPU on every rank for `stall_s`
    is a stall; a slow start that still moves is left alone until `deadline_s`. `lost` in a sample counts the attempts
    in a row that got no answer since, `error` says why.
    """
    latest = history[-1]
    for rank, state in sorted(latest.items()):
        if state.get("lost", 0) >= LOST:
            return Verdict("dead", f"rank {rank} on {state.get('host')} does not answer: {state.get('error')}", rank)
        if not state.get("exists"):
            return Verdict("dead", f"rank {rank} on {state.get('host')}: its container is gone", rank)
        if not state.get("running"):
            tail = "\n".join(state.get("log_tail") or ["(no log)"])
            code = state.get("exit_code")
            return Verdict("dead", f"rank {rank} on {state.get('host')} exited with code {code}:\n{tail}", rank)
    if any(state.get("healthy") for state in latest.values()):
        return Verdict("ready", f"ready after {seconds[-1]:.0f} s")
    moved = seconds[0]
    for older, newer, at in zip(history, history[1:], seconds[1:]):
        if any(_moved(older.get(rank), state) for rank, state in newer.items()):
            moved = at
    idle = seconds[-1] - moved
    shown = " | ".join(
        f"rank {rank}: {_line((state.get('log_tail') or ['starting'])[-1])}" for rank, state in sorted(latest.items())
    )
    if idle >= stall_s:
        return Verdict("stalled", f"no log line and no CPU time on any rank for {idle:.0f} s; last seen: {shown}")
    if seconds[-1] >= deadline_s:
        return Verdict("stalled", f"not ready after {seconds[-1]:.0f} s (deadline {deadline_s:.0f} s): {shown}")
    return Verdict("progressing", f"{seconds[-1]:.0f} s: {shown}")


def _moved(older: Optional[Mapping[str, Any]], newer: Mapping[str, Any]) -> bool:
    if older is None:
        return True
    # Idle workers poll: a tenth of one core is not progress.
    busy = float(newer.get("cpu_s", 0)) - float(older.get("cpu_s", 0)) > 0.1 * float(newer.get("interval_s", 10))
    return busy or newer.get("log_bytes") != older.get("log_bytes")


def status_findings(
    states: Mapping[str, Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]
) -> List[Dict[str, Any]]:
    """What is wrong with a cluster that should be serving; a host without a state is unreachable."""
    found: List[Finding] = []
    for rank in ranks:
        host = str(rank["host"])
        name = f"rank {rank['rank']} ({rank['container']})"
        state = states.get(host)
        if not state:
            found.append(Finding("node.unreachable", host, "no answer", "SSH access", "check power and network"))
        elif not state.get("exists"):
            found.append(Finding("engine.missing", host, f"{name}: no container", "running", START))
        elif not state.get("running"):
            tail = (state.get("log_tail") or ["no log"])[-1]
            seen = f"{name} is {state.get('status')} with exit code {state.get('exit_code')}: {_line(tail)}"
            found.append(Finding("engine.dead", host, seen, "running", START))
        elif state.get("healthy") is False:
            found.append(Finding("engine.unhealthy", host, f"{name}: the endpoint does not answer", "200", RESTART))
    return [finding.to_dict() for finding in found]
