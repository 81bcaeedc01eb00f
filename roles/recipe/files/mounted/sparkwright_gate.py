# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware that asks for the API key on every path: `vllm serve --middleware` loads it by name.

vLLM's own check covers some prefixes only; others (such as /invocations, which generates) would be open. A file of its
own, mounted into the engine's container, so that it guards images of others as well as ours; standard library only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Says only that the server is up; probes ask it before anybody has a key.
OPEN_PATHS = frozenset({"/health"})


class KeyGate:
    """Answers 401 to every request without `Authorization: Bearer KEY`, with the key that the file holds now.

    Raises RuntimeError at start-up when there is no key: a gate without one would be open or shut for ever.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._file = os.environ.get("SPARKWRIGHT_API_KEY_FILE", "/run/secrets/sparkwright/api_key")
        self._key = ""
        if not self._read():
            raise RuntimeError(f"KeyGate: {self._file} is missing or empty; needed the API key")

    def _read(self) -> str:
        """The key, or the last one while its file cannot be read."""
        with suppress(OSError), open(self._file, encoding="ascii") as stream:
            self._key = stream.read().strip() or self._key
        return self._key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # "lifespan" is the server's own start and stop, not a request.
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope.get("headers", []) if name.lower() == b"authorization"]
        if len(given) == 1 and hmac.compare_digest(given[0], f"Bearer {self._read()}".encode()):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error": {"message": "needed the API key", "type": "Unauthorized", "code": 401}}'
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
