"""The gate, driven as an ASGI server drives it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "roles/recipe/files/mounted"))

from sparkwright_gate import KeyGate

KEY = "sk-right"


@pytest.fixture(autouse=True)
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "api_key"
    path.write_text(f"{KEY}\n")
    monkeypatch.setenv("SPARKWRIGHT_API_KEY_FILE", str(path))
    return path


def ask(path: str, headers: list[tuple[bytes, bytes]], kind: str = "http") -> list[Any]:
    """What is sent to the client: the application's own answer is the string "app"."""
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
def test_every_path_needs_the_key(path: str) -> None:
    for headers in ([], [(b"authorization", b"Bearer sk-wrong")], [(b"authorization", b"sk-right")], RIGHT * 2):
        assert ask(path, headers)[0]["status"] == 401
    assert ask(path, RIGHT) == ["app"]


def test_health_and_lifespan_are_open() -> None:
    assert ask("/health", []) == ["app"]
    assert ask("", [], "lifespan") == ["app"]


def test_a_websocket_is_closed() -> None:
    assert ask("/v1/realtime", [], "websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask("/v1/realtime", RIGHT, "websocket") == ["app"]


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_without_a_key_it_does_not_start(key_file: Path, content: str | None) -> None:
    key_file.unlink() if content is None else key_file.write_text(content)
    with pytest.raises(RuntimeError, match="api_key is missing or empty; needed the API key"):
        KeyGate(lambda scope, receive, send: asyncio.sleep(0))


def test_a_new_key_counts_at_once_and_a_lost_one_leaves_the_old(key_file: Path) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("app")

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    async def receive() -> Any:
        return {}

    gate = KeyGate(app)

    def status(key: bytes) -> Any:
        sent.clear()
        scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", b"Bearer " + key)]}
        asyncio.run(gate(scope, receive, send))
        return sent[0]

    key_file.write_text("sk-new\n")
    assert (status(b"sk-right"), status(b"sk-new")) == (401, "app")
    key_file.unlink()
    assert (status(b""), status(b"sk-new")) == (401, "app")
