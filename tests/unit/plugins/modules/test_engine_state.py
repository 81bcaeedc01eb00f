# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module with a docker that gives recorded answers, and a real HTTP server as the endpoint."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.modules import engine_state

NAME = "sparkwright-lab-r0"
INSPECT, LOGS, TOP = f"container inspect {NAME}", f"logs --timestamps --tail 20 {NAME}", f"top {NAME} -eo pid"
LOG = (
    0,
    "2026-11-29T21:01:45.284641959Z INFO 11-29 21:02:01 api_server.py:1210] vLLM API server version 0.32.0\n"
    "2026-11-29T21:01:45.349065145Z INFO 11-29 21:02:03 launcher.py:37] Route: /health\n",
    "2026-11-29T21:01:45.304361725Z \rLoading safetensors checkpoint shards:  50%"
    "\rLoading safetensors checkpoint shards: 100%\n",
)
NONE = (1, "[]\n", f"Error response from daemon: No such container: {NAME}\n")
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?\n"


@pytest.fixture
def state(run_module: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def read(**options: Any) -> dict[str, Any]:
        result = run_module(engine_state.main, container=NAME, host="spark1", **options)
        assert not result["changed"]
        return result["state"]  # type: ignore[no-any-return]

    return read


def test_a_running_container(commands: Any, recorded: Any, state: Any, tmp_path: Path) -> None:
    log = tmp_path / "json.log"
    log.write_text("x" * 321)
    inspected = json.loads(recorded("container-running"))
    inspected[0]["LogPath"] = str(log)
    answers = {INSPECT: (0, json.dumps(inspected), ""), LOGS: LOG, TOP: (0, f"PID\n{os.getpid()}\n", "")}
    commands.add("docker", answers)
    read = state()
    assert read.pop("cpu_s") >= 0.0
    assert read == {
        "host": "spark1",
        "exists": True,
        "running": True,
        "status": "running",
        "exit_code": 0,
        "started_at": "2026-11-29T21:01:45.285624144Z",
        "plan": "00112233aabbccdd",
        "image": "sparkwright/tiny:0123456789ab",
        "log_bytes": 321,
        "log_tail": [
            "INFO 11-29 21:02:01 api_server.py:1210] vLLM API server version 0.32.0",
            "Loading safetensors checkpoint shards: 100%",
            "INFO 11-29 21:02:03 launcher.py:37] Route: /health",
        ],
        "healthy": None,
    }


@pytest.mark.parametrize(
    ("name", "status", "code", "plan"),
    [("container-exited", "exited", 3, "ffeeddcc44556677"), ("container-created", "created", 0, "")],
)
def test_a_container_that_does_not_run(
    name: str, status: str, code: int, plan: str, commands: Any, recorded: Any, state: Any
) -> None:
    commands.add("docker", {INSPECT: (0, recorded(name), ""), LOGS: LOG})
    read = state(health_url="http://127.0.0.1:9/health")
    assert (read["exists"], read["running"], read["healthy"]) == (True, False, None)
    assert (read["status"], read["exit_code"], read["plan"]) == (status, code, plan)
    # The log of the recording is not on this machine: a log that was rotated away reads as empty.
    assert (read["log_bytes"], read["cpu_s"]) == (0, 0.0)
    assert commands.calls("docker") == [INSPECT, LOGS]


def test_no_container(commands: Any, state: Any) -> None:
    commands.add("docker", {INSPECT: NONE})
    assert state() == {"host": "spark1", "exists": False, "running": False}


def test_no_docker_yet(commands: Any, state: Any) -> None:
    """Check mode on a bare node."""
    assert state(check=True) == {"host": "spark1", "exists": False, "running": False}


def test_an_engine_that_is_down_is_no_missing_container(commands: Any, run_module: Any) -> None:
    commands.add("docker", {INSPECT: (1, "[]\n", DOWN)})
    result = run_module(engine_state.main, container=NAME, host="spark1")
    assert result["failed"] and DOWN.strip() in result["msg"]


def test_the_container_ends_between_two_questions(commands: Any, recorded: Any, state: Any) -> None:
    gone = (1, "", "Error response from daemon: Container 3901 is not running\n")
    commands.add("docker", {INSPECT: (0, recorded("container-running"), ""), LOGS: LOG, TOP: gone})
    assert state()["cpu_s"] == 0.0


def test_lines_is_passed_on(commands: Any, recorded: Any, state: Any) -> None:
    logs = LOGS.replace("20", "1", 1)
    commands.add("docker", {INSPECT: (0, recorded("container-exited"), ""), logs: LOG})
    assert len(state(lines=1)["log_tail"]) == 1


@pytest.fixture
def endpoint() -> Iterator[Callable[[bytes], str]]:
    """A server that says the given bytes to every request."""
    servers = []

    def start(answer: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/health"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False),
        (b"SSH-2.0-OpenSSH_9.6\r\n", False),
        (b"", False),
    ],
)
def test_healthy(
    answer: bytes, expected: bool, endpoint: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert engine_state.healthy(endpoint(answer)) is expected


def test_a_port_that_is_closed_is_not_healthy() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert engine_state.healthy(f"http://127.0.0.1:{free.getsockname()[1]}/health") is False


def test_no_url_is_neither_healthy_nor_ill() -> None:
    assert engine_state.healthy("") is None


def test_cpu_seconds_counts_this_process() -> None:
    before = engine_state.cpu_seconds([str(os.getpid())])
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert before < engine_state.cpu_seconds([str(os.getpid())]) < before + 5
    assert engine_state.cpu_seconds(["999999999"]) == 0.0
