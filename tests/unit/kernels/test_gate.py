"""The gate, driven as an ASGI server drives it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sparkwright_kernels.vllm_plugin.gate import KeyGate

KEY = "sk-right"


def ask(
    monkeypatch: pytest.MonkeyPatch, path: str, headers: list[tuple[bytes, bytes]], kind: str = "http"
) -> list[Any]:
    """What is sent to the client: the application's own answer is the string "app"."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("app")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    asyncio.run(KeyGate(app)({"type": kind, "path": path, "headers": headers}, receive, send))
    return sent


RIGHT = [(b"Authorization", b"Bearer sk-right")]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/invocations", "/tokenize", "/metrics", "/docs", "/health/x"]
)
def test_every_path_needs_the_key(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    for headers in ([], [(b"authorization", b"Bearer sk-wrong")], [(b"authorization", b"sk-right")], RIGHT * 2):
        assert ask(monkeypatch, path, headers)[0]["status"] == 401
    assert ask(monkeypatch, path, RIGHT) == ["app"]


def test_health_and_lifespan_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, "/health", []) == ["app"]
    assert ask(monkeypatch, "", [], "lifespan") == ["app"]


def test_a_websocket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, "/v1/realtime", [], "websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask(monkeypatch, "/v1/realtime", RIGHT, "websocket") == ["app"]


def test_without_a_key_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is empty"):
        KeyGate(lambda scope, receive, send: asyncio.sleep(0))
