# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The callback, fed with results as Ansible feeds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.callback import progress


class Clock:
    """A clock that moves only when the ticker waits, in steps that are a little too long."""

    def __init__(self, seconds: float, step: float = 1.05) -> None:
        self.now, self.end, self.step = 1000.0, 1000.0 + seconds, step

    def monotonic(self) -> float:
        return self.now

    def wait(self, _seconds: float) -> bool:
        self.now += self.step
        return self.now > self.end


def task(name: str = "Fetch", action: str = "ansible.builtin.command") -> Any:
    return SimpleNamespace(get_name=lambda: name, action=action)


def host(name: str) -> Any:
    return SimpleNamespace(get_name=lambda: name)


def result(name: str, **content: Any) -> Any:
    return SimpleNamespace(_host=host(name), _result=content)


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> progress.CallbackModule:
    made = progress.CallbackModule()
    made.shown = []
    monkeypatch.setattr(made, "_display", SimpleNamespace(display=made.shown.append))
    return made


def tick(
    callback: Any, seconds: float, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> list[str]:
    clock = Clock(seconds)
    monkeypatch.setattr(progress, "time", clock)
    callback._since = clock.now
    callback._tick(clock)
    return capfd.readouterr().out.splitlines()


def test_a_line_every_ten_seconds(
    callback: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    callback.v2_playbook_on_task_start(task("Fetch"), False)
    for name in ("spark2", "spark1"):
        callback.v2_runner_on_start(host(name), task())
    lines = tick(callback, 615, monkeypatch, capfd)
    assert len(lines) == 58, "also where the beat drifts over a second"
    assert lines[0] == "  ... Fetch: spark1, spark2 (10 s)"


@pytest.mark.parametrize("ended", ["v2_runner_on_ok", "v2_runner_on_failed", "v2_runner_on_skipped"])
def test_only_hosts_that_still_run(
    ended: str, callback: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    callback.v2_playbook_on_task_start(task(), False)
    for name in ("spark1", "spark2"):
        callback.v2_runner_on_start(host(name), task())
    getattr(callback, ended)(result("spark1"))
    assert tick(callback, 12, monkeypatch, capfd) == ["  ... Fetch: spark2 (10 s)"]
    callback.v2_runner_on_unreachable(result("spark2"))
    assert tick(callback, 60, monkeypatch, capfd) == []


def test_a_short_task_says_nothing(
    callback: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    callback.v2_playbook_on_task_start(task(), False)
    callback.v2_runner_on_start(host("spark1"), task())
    assert tick(callback, 9, monkeypatch, capfd) == []


def test_engine_wait_tells_more_itself(
    callback: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    callback.v2_playbook_on_task_start(task(), False)
    callback.v2_runner_on_start(host("spark1"), task(action="sparkwright.dsv41.engine_wait"))
    assert tick(callback, 60, monkeypatch, capfd) == []


@pytest.mark.parametrize(
    ("results", "shown"),
    [
        ([result("a", summary=["PASS: 1"])], ["PASS: 1"]),
        ([result("a", summary=["one", "two"]), result("b", summary=["two", "three"])], ["one", "two", "three"]),
        ([result("a", summary=["secret"], _ansible_no_log=True)], []),
        ([result("a")], []),
        ([result("a", summary=None)], []),
        # Another module may use the same name.
        ([result("a", summary="text")], []),
        ([result("a", summary={"x": 1})], []),
    ],
)
def test_the_summary_comes_at_the_end(results: list[Any], shown: list[str], callback: Any) -> None:
    callback.v2_playbook_on_start(None)
    for each in results:
        callback.v2_runner_on_ok(each)
        assert callback.shown == []
    callback.v2_playbook_on_stats(None)
    assert callback.shown == shown


def test_two_playbooks_of_one_command(callback: Any) -> None:
    for number in (1, 2):
        callback.v2_playbook_on_start(None)
        assert not callback._ended.is_set(), "the second one has a beat too"
        callback.v2_runner_on_ok(result("a", summary=[f"line {number}"]))
        callback.v2_playbook_on_stats(None)
    assert callback.shown == ["line 1", "line 2"]


def test_it_is_opt_in_and_changes_no_other_output() -> None:
    assert progress.CallbackModule.CALLBACK_TYPE == "aggregate"
    assert progress.CallbackModule.CALLBACK_NEEDS_ENABLED
