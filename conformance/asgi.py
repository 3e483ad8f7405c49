"""One HTTP exchange with an ASGI application, without a server, in which the client may leave at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

Application = Callable[[Any, Any, Any], Awaitable[Any]]

PATIENCE = 10.0
"""Seconds after which a test that waits for something counts it as never happening."""


class Exchange:
    """A request under way. `status`, `headers` and `body` fill as the application answers."""

    def __init__(
        self,
        app: Application,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        announce_length: bool = True,
        key: str = "",
    ) -> None:
        path, _, query = path.partition("?")
        self.path = path
        headers = [(b"content-type", b"application/json"), (b"host", b"test")]
        if key:
            headers.append((b"authorization", f"Bearer {key}".encode()))
        if announce_length:
            headers.append((b"content-length", str(len(body)).encode()))
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self._request = [{"type": "http.request", "body": body, "more_body": False}]
        self._left = asyncio.Event()
        self._news = asyncio.Condition()
        self._task = asyncio.ensure_future(app(self._scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._request:
            return self._request.pop(0)
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._left.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            if not message.get("more_body", False):
                self.complete = True
                self._left.set()
        async with self._news:
            self._news.notify_all()

    def leave(self) -> None:
        """Close the connection, as a client does."""
        self._left.set()

    async def until(self, condition: Callable[[Exchange], bool]) -> None:
        """Wait for a state of the answer. Raises TimeoutError where it does not come."""
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(lambda: condition(self)), PATIENCE)

    async def end(self) -> Exchange:
        """Wait until the application is through. Raises what it raised."""
        await asyncio.wait_for(self._task, PATIENCE)
        return self

    def json(self) -> Any:
        """Return the body. Raises ValueError where it is not JSON."""
        return json.loads(self.body)

    def events(self) -> list[str]:
        """Return the data of a stream's server-sent events."""
        return [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line.startswith("data: ")]


async def call(app: Application, method: str, path: str, body: Any = None) -> Exchange:
    """Return a whole exchange; `body` is bytes, or anything that JSON can say."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return await Exchange(app, method, path, data).end()


def strings(data: Any) -> str:
    """Return all strings of a JSON value, one per line."""
    if isinstance(data, str):
        return data + "\n"
    if isinstance(data, dict):
        return "".join(map(strings, data.values()))
    return "".join(map(strings, data)) if isinstance(data, list) else ""
