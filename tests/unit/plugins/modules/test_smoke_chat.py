# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
"""The module against a real HTTP server on this machine that answers, refuses, lies, or says nothing."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkwright.dsv41.plugins.modules import smoke_chat

KEY = "sk-THEKEY0123456789"
REFUSED = (401, '{"error":"Unauthorized"}')


def completion(text: str) -> str:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]})


class Endpoint(http.server.ThreadingHTTPServer):
    """`keyed` and `open` are what requests with the right key, and all others, are answered with; None: nothing."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.keyed: tuple[int, str] | bytes | None = (200, completion("323"))
        self.open: tuple[int, str] | bytes | None = REFUSED
        self.seen: list[tuple[str, str, Any]] = []
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        given = self.headers.get("Authorization", "")
        self.server.seen.append((self.path, given, body))
        answer = self.server.keyed if given == f"Bearer {KEY}" else self.server.open
        if answer is None:
            self.server.ended.wait(30)
        elif isinstance(answer, bytes):
            self.wfile.write(answer)
        else:
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(answer[1].encode())))
            self.end_headers()
            self.wfile.write(answer[1].encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "api_key"
    path.write_text(f"{KEY}\n")
    return path


@pytest.fixture
def smoke(run_module: Callable[..., Any], endpoint: Endpoint, key_file: Path) -> Callable[..., Any]:
    def run(**options: Any) -> Any:
        base = {
            "url": endpoint.url,
            "model": "arith-exl3",
            "prompt": "What is 17*19? Reply with the integer only.",
            "expect": "323",
            "max_tokens": 8,
            "key_file": str(key_file),
            "key_command": "cat /key",
            "timeout_s": 10,
        }
        result = run_module(smoke_chat.main, **{**base, **options})
        assert KEY not in json.dumps(result), "the key is in the result"
        assert not result.get("changed")
        return result

    return run


def test_a_right_answer(smoke: Callable[..., Any], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    result = smoke()
    assert not result.get("failed")
    assert result["answer"] == "323"
    (line,) = result["summary"]
    assert line.startswith("PASS: 17*19 = 323 in ") and "cat /key | " in line
    # C3, C4: first without the key, on both paths that generate, then with it; the same question each time.
    assert [(path, given) for path, given, _ in endpoint.seen] == [
        ("/v1/chat/completions", ""),
        ("/invocations", ""),
        ("/v1/chat/completions", f"Bearer {KEY}"),
    ]
    bodies = [body for _, _, body in endpoint.seen]
    assert bodies[0] == bodies[1] == bodies[2]
    assert bodies[0]["temperature"] == 0 and bodies[0]["model"] == "arith-exl3"


@pytest.mark.parametrize(
    ("keyed", "opened", "words"),
    [
        ((200, completion("324")), REFUSED, "the answer is '324'; needed '323'"),
        ((200, completion("")), REFUSED, "the answer is ''; needed '323'"),
        ((200, "<html>It works!</html>"), REFUSED, "the answer is no chat completion: <html>It works!</html>"),
        (REFUSED, REFUSED, "the request was answered with 401"),
        ((500, "EngineDeadError"), REFUSED, "the request was answered with 500: EngineDeadError"),
        ((404, '{"message":"The model `x` does not exist."}'), REFUSED, "The model `x` does not exist."),
        # C3, C4: an endpoint that needs no key must fail, although its answer is right.
        ((200, completion("323")), (200, completion("323")), "without the API key was answered with 200; needed 401"),
        ((200, completion("323")), (404, ""), "without the API key was answered with 404; needed 401"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", REFUSED, "no answer: SSH-2.0-OpenSSH_9.6"),
        (b"", REFUSED, "no answer: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{", REFUSED, "no answer: IncompleteRead"),
    ],
)
def test_what_is_wrong_is_told(
    keyed: Any, opened: Any, words: str, smoke: Callable[..., Any], endpoint: Endpoint
) -> None:
    endpoint.keyed, endpoint.open = keyed, opened
    result = smoke()
    assert result["failed"] and words in result["msg"]
    assert endpoint.url in result["msg"] and "repair: ansible-playbook playbooks/restart.yml" in result["msg"]
    assert "summary" not in result


def test_an_endpoint_that_never_answers(smoke: Callable[..., Any], endpoint: Endpoint) -> None:
    """N2: it takes requests, refuses those without a key, and generates nothing."""
    endpoint.keyed = None
    started = time.monotonic()
    result = smoke(timeout_s=1)
    assert result["failed"] and "no answer: timed out" in result["msg"]
    assert time.monotonic() - started < 10


def test_nothing_listens(smoke: Callable[..., Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        result = smoke(url=f"http://127.0.0.1:{free.getsockname()[1]}/v1")
    assert result["failed"] and "Connection refused" in result["msg"]
    assert "without the API key" not in result["msg"], "one problem, told once"


@pytest.mark.parametrize("content", ["", "\n", f"{KEY}\nmore\n", f"{KEY} more", f"{KEY}é", "sk-\x00"])
def test_a_file_that_holds_no_key(content: str, smoke: Callable[..., Any], key_file: Path, endpoint: Endpoint) -> None:
    """Its content is in no message, and nothing is sent."""
    key_file.write_text(content)
    result = smoke()
    assert result["failed"] and f"{key_file} does not hold one API key" in result["msg"]
    assert endpoint.seen == []


def test_a_file_in_another_encoding(smoke: Callable[..., Any], key_file: Path) -> None:
    key_file.write_bytes(KEY.encode() + b"\xff\xfe")
    assert "does not hold one API key" in smoke()["msg"]


def test_no_file(smoke: Callable[..., Any], key_file: Path) -> None:
    key_file.unlink()
    result = smoke()
    assert result["failed"] and "cannot read the API key" in result["msg"]


def test_a_huge_answer_is_cut(smoke: Callable[..., Any], endpoint: Endpoint) -> None:
    endpoint.keyed = (500, "x" * 1_000_000)
    assert len(json.dumps(smoke())) < 10_000


def test_check_mode_sends_nothing(smoke: Callable[..., Any], endpoint: Endpoint) -> None:
    assert smoke(check=True)["skipped"]
    assert endpoint.seen == []
