"""How large a request body may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.web.front import write_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: refuses larger request bodies with 413, by what they announce and by what arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not announced.isdigit() or int(announced) > self._max:
            await write_error(scope, self._error())(scope, receive, send)
            return
        arrived = 0

        async def limited() -> Message:
            nonlocal arrived
            message = await receive()
            arrived += len(message.get("body", b""))
            if arrived > self._max:
                raise self._error()
            return message

        await self._app(scope, limited, send)

    def _error(self) -> InvalidRequest:
        return InvalidRequest(f"the body exceeds {self._max} bytes", status=413, code="body_too_large")
