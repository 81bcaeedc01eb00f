# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.module_utils import engine

State = dict[str, Any]


def up(host: str = "spark1", **more: Any) -> State:
    base = {"host": host, "exists": True, "running": True, "status": "running", "exit_code": 0, "plan": "aaaa"}
    return {**base, "log_bytes": 100, "log_tail": ["line"], "cpu_s": 10.0, "interval_s": 3, "healthy": None, **more}


def ended(host: str, code: int = 1, **more: Any) -> State:
    return up(host, running=False, status="exited", exit_code=code, **more)


GONE = {"host": "spark2", "exists": False, "running": False}


@pytest.mark.parametrize(
    ("second", "reasons"),
    [
        (up("spark2"), []),
        # Ranks that still load are left alone; engine_wait judges them.
        (up("spark2", healthy=False), []),
        (GONE, ["spark2: no container"]),
        ({}, ["spark2: no container"]),
        (ended("spark2", 137), ["spark2: container is exited (exit code 137)"]),
        (up("spark2", plan="bbbb"), ["spark2: runs plan bbbb, wanted aaaa"]),
        (up("spark2", plan=""), ["spark2: runs plan unknown, wanted aaaa"]),
    ],
)
def test_changes(second: State, reasons: list[str]) -> None:
    wanted = {"spark1": "aaaa", "spark2": "aaaa"}
    assert engine.changes({"spark1": up(), "spark2": second}, wanted) == reasons


def test_every_reason_is_told() -> None:
    states = {"spark1": ended("spark1", 0), "spark2": GONE}
    assert len(engine.changes(states, {"spark1": "a", "spark2": "a", "spark3": "a"})) == 3


def judge(*samples: dict[int, State], every: float = 10, deadline: float = 1000, stall: float = 60) -> engine.Verdict:
    return engine.judge(list(samples), [every * n for n in range(len(samples))], deadline, stall)


def both(n: int = 0, *, logs: bool = True, cpu: bool = True, **more: Any) -> dict[int, State]:
    """Sample n of two ranks of which the second one moves."""
    moving = {"log_bytes": 100 + n * logs, "cpu_s": 10.0 + 5 * n * cpu}
    return {0: up("spark1", healthy=False), 1: up("spark2", **moving, **more)}


@pytest.mark.parametrize(
    ("samples", "state", "words"),
    [
        ([both()], "progressing", "rank 0: line | rank 1: line"),
        ([both(n) for n in range(20)], "progressing", "190 s"),
        # Either a log line or CPU time is progress, on any rank (N4).
        ([both(n, cpu=False) for n in range(20)], "progressing", ""),
        ([both(n, logs=False) for n in range(20)], "progressing", ""),
        ([both(n, logs=False, cpu=False) for n in range(6)], "progressing", ""),
        (
            [both(n, logs=False, cpu=False) for n in range(7)],
            "stalled",
            "no log line and no CPU time on any rank for 60 s",
        ),
        # It moved, then stopped.
        ([*(both(n) for n in range(5)), *[both(4)] * 6], "stalled", "for 60 s"),
        ([*(both(n) for n in range(5)), *[both(4)] * 5], "progressing", ""),
        # A worker that polls is not progress.
        ([both(n, logs=False, cpu=False) | {0: up("spark1", cpu_s=10 + 0.1 * n)} for n in range(7)], "stalled", ""),
        # The other rank came late.
        ([{0: up()}] * 6 + [both()], "progressing", ""),
        # Over the deadline, whatever moves.
        ([both(n) for n in range(101)], "stalled", "not ready after 1000 s (deadline 1000 s)"),
        ([{0: up(healthy=True), 1: up("spark2")}], "ready", "ready after 0 s"),
        ([both(), {0: up(healthy=True), 1: up("spark2")}], "ready", "ready after 10 s"),
        # The death of one rank counts, even where the endpoint answers (N2).
        ([{0: up(healthy=True), 1: ended("spark2", 137)}], "dead", "rank 1 on spark2 exited with code 137:\nline"),
        ([{0: up(), 1: GONE}], "dead", "rank 1 on spark2: its container is gone"),
        ([{0: ended("spark1", 1, log_tail=[]), 1: up()}], "dead", "rank 0 on spark1 exited with code 1:\n(no log)"),
        # A node that misses a sample or two may be busy.
        ([{0: up(), 1: up("spark2", lost=2, error="timed out")}], "progressing", ""),
        (
            [{0: up(healthy=True), 1: up("spark2", lost=3, error="timed out")}],
            "dead",
            "rank 1 on spark2 does not answer: timed out",
        ),
    ],
)
def test_judge(samples: list[dict[int, State]], state: str, words: str) -> None:
    verdict = judge(*samples)
    assert (verdict.state, words in verdict.reason) == (state, True), verdict


def test_the_dead_rank_is_named() -> None:
    assert judge({0: up(), 1: ended("spark2")}).rank == 1
    assert judge({0: up(), 1: GONE}).rank == 1


def test_a_slow_start_is_left_alone() -> None:
    """N4: 40 minutes of tuning without HTTP, with a log that grows and a busy CPU."""
    samples = [both(n) for n in range(240)]
    assert judge(*samples, deadline=3600, stall=240).state == "progressing"


def test_the_last_lines_of_a_dead_rank_are_shown_whole() -> None:
    tail = [f"line {n}" for n in range(20)]
    reason = judge({0: up(), 1: ended("spark2", log_tail=tail)}).reason
    assert reason.endswith("\n".join(tail))


def test_a_long_line_is_cut() -> None:
    assert len(judge({0: up(log_tail=["x" * 10_000])}).reason) < 250


# What `docker logs --timestamps` wrote to its two streams for one container.
OUT = """\
2026-11-29T21:01:45.553042692Z INFO 11-29 21:02:01 api_server.py:1210] vLLM API server version 0.32.0
2026-11-29T21:01:45.588640834Z INFO 11-29 21:02:02 loader.py:1] Loading weights
"""
ERR = """\
2026-11-29T21:01:45.568419018Z Traceback (most recent call last):
2026-11-29T21:01:45.608739046Z RuntimeError: DistStoreError: 1/2 clients joined
"""
BAR = (
    "2026-11-29T21:01:45.304361725Z \rLoading safetensors checkpoint shards:  50%"
    "\rLoading safetensors checkpoint shards: 100%\n"
)


@pytest.mark.parametrize(
    ("out", "err", "lines", "starts"),
    [
        (OUT, ERR, 20, ["INFO", "Traceback", "INFO", "RuntimeError"]),
        (OUT, ERR, 2, ["INFO", "RuntimeError"]),
        (OUT, ERR, 0, []),
        ("", ERR, 20, ["Traceback", "RuntimeError"]),
        ("", "", 20, []),
        ("", BAR, 20, ["Loading safetensors checkpoint shards: 100%"]),
        ("2026-11-29T21:01:45.608739046Z \n", "", 20, [""]),
    ],
)
def test_merge_logs(out: str, err: str, lines: int, starts: list[str]) -> None:
    merged = engine.merge_logs(out, err, lines)
    assert len(merged) == len(starts)
    assert all(line.startswith(start) for line, start in zip(merged, starts, strict=True))


RANKS = [
    {"host": "spark1", "rank": 0, "container": "sparkwright-lab-r0"},
    {"host": "spark2", "rank": 1, "container": "sparkwright-lab-r1"},
]


@pytest.mark.parametrize(
    ("first", "second", "ids"),
    [
        (up(healthy=True), up("spark2"), []),
        (up(healthy=False), up("spark2"), ["engine.unhealthy"]),
        (up(healthy=True), None, ["node.unreachable"]),
        (up(healthy=True), GONE, ["engine.missing"]),
        (up(healthy=True), ended("spark2"), ["engine.dead"]),
        (ended("spark1"), GONE, ["engine.dead", "engine.missing"]),
        (None, None, ["node.unreachable", "node.unreachable"]),
    ],
)
def test_status_findings(first: State | None, second: State | None, ids: list[str]) -> None:
    states = {host: state for host, state in (("spark1", first), ("spark2", second)) if state}
    found = engine.status_findings(states, RANKS)
    assert [finding["id"] for finding in found] == ids
    assert all(finding["repair"] and finding["severity"] == "error" for finding in found)


def test_a_finding_shows_the_last_line_of_the_log() -> None:
    (found,) = engine.status_findings({"spark1": up(healthy=True), "spark2": ended("spark2", 3)}, RANKS)
    assert found["found"] == "rank 1 (sparkwright-lab-r1) is exited with exit code 3: line"
