# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""Probes with stand-ins for the tools, which note how they are called; ping also as it is, on loopback."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.modules import fabric_probe

REAL_PATH = os.environ["PATH"]
ANSWERS = "3 packets transmitted, 3 received, 0% packet loss, time 400ms\n"
SILENT = "3 packets transmitted, 0 received, 100% packet loss, time 400ms\n"
PASSED = "819200 bytes in 0.01 seconds = 1147.07 Mbit/sec\n100 iters in 0.01 seconds = 57.13 usec/iter\n"
FAST = " 1048576    35000            0.00               98.03             0.012345\n"
NOT_YET = "Couldn't connect to 10.77.0.2:18600\n"


def rail(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "rail": number,
        "peer": "spark2",
        "netdev": f"enp{number}",
        "hca": f"mlx5_{number}",
        "port": 1,
        "gid_index": 3,
        "mtu": 9000,
        "path_mtu": 4096,
        "rate_gbps": 200.0,
        "local": f"10.77.{number}.1",
        "remote": f"10.77.{number}.2",
        "serves": True,
        "tcp_port": 18600 + number,
        **changes,
    }


@pytest.fixture
def probe(run_module: Callable[..., Any], commands: Any) -> Callable[..., Any]:
    """The module with rails; a deadline of 2 s keeps failures short."""

    def run(*rails: dict[str, Any], **options: Any) -> Any:
        result = run_module(fabric_probe.main, rails=list(rails), **{"deadline_s": 2, **options})
        assert not result["changed"] and not result.get("failed")
        return result["results"]

    return run


@pytest.fixture
def tools(commands: Any) -> Any:
    """All three tools, and all is well."""
    commands.add("ping", {"*": (0, ANSWERS, "")})
    commands.add("ibv_rc_pingpong", {"*": (0, PASSED, "")})
    commands.add("ib_write_bw", {"*": (0, FAST, "")})
    return commands


def script(commands: Any, name: str, *lines: str) -> None:
    """A stand-in that does more than answer from a table."""
    path = commands.directory / name
    note = f"printf '%s\\n' \"$*\" >> {commands.directory}/{name}.calls"
    path.write_text("\n".join(["#!/bin/sh", f"PATH={REAL_PATH}", note, *lines]) + "\n")
    path.chmod(0o755)


PINGPONG = "-dmlx5_{0} -i1 -g3 -p1860{0} -m4096 -n100 -s4096"


def test_one_end_serves_and_the_other_calls(probe: Callable[..., Any], tools: Any) -> None:
    results = probe(rail(0), rail(1, serves=False))
    assert [(result["kind"], result["rail"], result["peer"], result["ok"]) for result in results] == [
        (kind, number, "spark2", True) for kind in ("ping", "rdma") for number in (0, 1)
    ]
    assert sorted(tools.calls("ibv_rc_pingpong")) == [PINGPONG.format(0), PINGPONG.format(1) + " 10.77.1.2"]
    assert sorted(tools.calls("ping")) == [
        f"-n -c3 -i0.2 -W2 -Mdo -s8972 -Ienp{number} 10.77.{number}.2" for number in (0, 1)
    ]
    assert tools.calls("ib_write_bw") == []


def test_check_mode_probes_too(probe: Callable[..., Any], tools: Any) -> None:
    """R15."""
    assert probe(rail(), check=True) == probe(rail(), check=False)
    assert len(tools.calls("ibv_rc_pingpong")) == 2


def test_only_what_is_wanted(probe: Callable[..., Any], tools: Any) -> None:
    assert [result["kind"] for result in probe(rail(), rdma=False)] == ["ping"]
    assert tools.calls("ibv_rc_pingpong") == []


def test_no_rails_no_probes(probe: Callable[..., Any], commands: Any) -> None:
    assert probe() == []


def test_missing_tools_are_named(probe: Callable[..., Any], commands: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # AnsibleModule also looks into the usual directories of the system.
    monkeypatch.setattr(fabric_probe.AnsibleModule, "get_bin_path", lambda module, name: None)
    results = probe(rail(), bandwidth=True)
    assert [(result["kind"], result["ok"], result["tool"], result["package"]) for result in results] == [
        ("tool", False, "ping", "iputils-ping"),
        ("tool", False, "ibv_rc_pingpong", "ibverbs-utils"),
        ("tool", False, "ib_write_bw", "perftest"),
    ]
    assert [result["tool"] for result in probe(rail(), rdma=False)] == ["ping"]


def test_pings_go_on_without_rdma_tools(
    probe: Callable[..., Any], commands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.add("ping", {"*": (1, SILENT, "")})
    real = fabric_probe.AnsibleModule.get_bin_path
    only = lambda module, name: real(module, name) if name == "ping" else None  # noqa: E731
    monkeypatch.setattr(fabric_probe.AnsibleModule, "get_bin_path", only)
    tool, ping = probe(rail())
    assert (tool["tool"], ping["kind"], ping["ok"]) == ("ibv_rc_pingpong", "ping", False)
    assert ping["evidence"] == SILENT.strip()


def test_a_failing_rail_does_not_hide_another(probe: Callable[..., Any], tools: Any) -> None:
    bad = PINGPONG.format(0)
    tools.add("ibv_rc_pingpong", {bad: (1, "", "Failed to modify QP to RTR\n"), "*": (0, PASSED, "")})
    results = [result for result in probe(rail(0), rail(1)) if result["kind"] == "rdma"]
    assert [(result["rail"], result["ok"]) for result in results] == [(0, False), (1, True)]
    assert "Failed to modify QP to RTR" in results[0]["detail"], "standard error is read too"


def test_errors_come_last(probe: Callable[..., Any], tools: Any) -> None:
    """They are written first, and the end of all is the evidence."""
    script(tools, "ibv_rc_pingpong", "echo reason >&2", "for n in 1 2 3 4 5 6 7 8; do echo banner; done", "exit 1")
    assert probe(rail())[-1]["evidence"].splitlines()[-1] == "reason"
    script(tools, "ibv_rc_pingpong", "echo reason >&2", "exec sleep 60")
    assert probe(rail(), deadline_s=1)[-1]["detail"].endswith("it hangs: reason")


def test_the_caller_waits_until_the_peer_serves(probe: Callable[..., Any], tools: Any) -> None:
    twice = f"[ $(wc -l < {tools.directory}/ibv_rc_pingpong.calls) -gt 2 ]"
    script(tools, "ibv_rc_pingpong", f'if {twice}; then echo "{PASSED}"; else echo "{NOT_YET}"; exit 1; fi')
    results = probe(rail(serves=False), deadline_s=20)
    assert results[-1]["ok"] and len(tools.calls("ibv_rc_pingpong")) == 3


def test_the_caller_gives_up_at_its_deadline(probe: Callable[..., Any], tools: Any) -> None:
    tools.add("ibv_rc_pingpong", {"*": (1, "", NOT_YET)})
    started = time.monotonic()
    result = probe(rail(serves=False))[-1]
    assert 1.5 < time.monotonic() - started < 10
    assert not result["ok"] and NOT_YET.strip() in result["detail"]


def test_another_failure_is_not_tried_again(probe: Callable[..., Any], tools: Any) -> None:
    tools.add("ibv_rc_pingpong", {"*": (1, "", "Failed to modify QP to RTR\n")})
    assert not probe(rail(serves=False), deadline_s=20)[-1]["ok"]
    assert len(tools.calls("ibv_rc_pingpong")) == 1


@pytest.mark.parametrize(
    ("serves", "detail"), [(True, "the peer did not call"), (False, "it hangs: connected")], ids=["serves", "calls"]
)
def test_an_end_that_hangs_is_killed(serves: bool, detail: str, probe: Callable[..., Any], tools: Any) -> None:
    script(tools, "ibv_rc_pingpong", "" if serves else "echo connected", "exec sleep 60")
    started = time.monotonic()
    result = probe(rail(serves=serves), deadline_s=1)[-1]
    assert time.monotonic() - started < 10
    assert not result["ok"] and result["detail"].endswith(detail)


def test_a_ping_that_hangs_is_killed(probe: Callable[..., Any], tools: Any) -> None:
    script(tools, "ping", "exec sleep 60")
    results = probe(rail(), deadline_s=1)
    assert [(result["kind"], result["ok"]) for result in results] == [("ping", False), ("rdma", True)]


def test_rails_are_probed_at_the_same_time(probe: Callable[..., Any], tools: Any) -> None:
    """An end that serves waits for its peer; the other rails must not wait for it."""
    other = f"{tools.directory}/other"
    script(
        tools,
        "ibv_rc_pingpong",
        f'case "$1" in *0) n=0; while [ ! -e {other} ]; do n=$((n+1)); [ $n -gt 40 ] && exit 1; sleep 0.2; done ;;',
        f"*) : > {other} ;; esac",
        f'echo "{PASSED}"',
    )
    assert all(result["ok"] for result in probe(rail(0), rail(1), deadline_s=20))


def test_bandwidth_of_one_rail_after_the_other(probe: Callable[..., Any], tools: Any) -> None:
    results = probe(rail(1, serves=False), rail(0), rdma=False, bandwidth=True, bandwidth_s=5, min_ratio=0.5)
    assert [(result["kind"], result["rail"]) for result in results[2:]] == [("bandwidth", 0), ("bandwidth", 1)]
    assert [(result["ok"], result["gbps"], result["needed_gbps"]) for result in results[2:]] == [
        (False, 98.03, 100.0)
    ] * 2
    call = "-d mlx5_{0} -i 1 -x 3 -p 1860{0} -s 1048576 -D 5 -F --report_gbits"
    assert tools.calls("ib_write_bw") == [call.format(0), call.format(1) + " 10.77.1.2"], "in the order of all ranks"


def test_tools_speak_english(probe: Callable[..., Any], tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Any other that is installed everywhere.
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    script(tools, "ping", f'[ "$LC_ALL" = C ] && echo "{ANSWERS}" || echo "3 Pakete empfangen"')
    assert probe(rail())[0]["ok"]


@pytest.mark.skipif(not shutil.which("ping", path=REAL_PATH), reason="ping (iputils-ping) is not installed here")
def test_a_real_ping(probe: Callable[..., Any], tools: Any) -> None:
    real = shutil.which("ping", path=REAL_PATH)
    (tools.directory / "ping").unlink()
    (tools.directory / "ping").symlink_to(str(real))
    mtu = int(Path("/sys/class/net/lo/mtu").read_text())
    good = probe(rail(netdev="lo", remote="127.0.0.1", mtu=9000), rdma=False)[0]
    assert good["ok"], good
    long = probe(rail(netdev="lo", remote="127.0.0.1", mtu=mtu), rdma=False)[0]
    assert not long["ok"] and re.match(r"local error: message too long", long["detail"])
