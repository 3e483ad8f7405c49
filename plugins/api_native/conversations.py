"""/open_session and /close_session."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.api_router import ApiContext
from pegboard.plugins.api_native.bodies import Done, answers, takes
from pegboard.plugins.sessions_in_memory.api import sessions_of
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import RequestModel, parse_body
from pegboard.toolkit.http.levels import principal_of


class OpenSessionBody(RequestModel):
    """Body of `/open_session`."""

    capacity_of_str_len: int = 0
    """Most tokens that the session keeps, of all its turns together; 0, or more than it allows: what the server says.
    """
    session_id: str = ""
    """Its id; a new one where none is given."""
    timeout: float | None = None
    """Seconds without a turn after which it is closed, at most those of the server."""
    streaming: bool = False
    """Taken, and without effect: every session can be appended to."""


class CloseSessionBody(RequestModel):
    """Body of `/close_session`."""

    session_id: str


class Conversations:
    """The routes. What turns are is said with `SessionStore`."""

    def __init__(self, ctx: ApiContext) -> None:
        self._sessions = sessions_of(ctx)

    def add_to(self, router: APIRouter) -> None:
        docs = {**takes(OpenSessionBody, {"capacity_of_str_len": 1000}), **answers({"type": "string"}, 409, 429)}
        router.post("/open_session", summary="Begin a conversation that requests continue; its id", **docs)(self.open)
        docs = {**takes(CloseSessionBody), **answers(Done, 404)}
        router.post("/close_session", summary="Forget a conversation", **docs)(self.close)

    async def open(self, request: Request) -> Response:
        body = await parse_body(request, OpenSessionBody)
        capacity, principal = body.capacity_of_str_len, principal_of(request)
        name = self._sessions.open(body.session_id, capacity=capacity, timeout=body.timeout, principal=principal)
        return json_response(name)

    async def close(self, request: Request) -> Response:
        self._sessions.close((await parse_body(request, CloseSessionBody)).session_id)
        return json_response({"success": True})
