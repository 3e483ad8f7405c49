"""What an operator may ask of a server while it runs."""

from __future__ import annotations

import gc
import logging
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_native.bodies import Done, answers, optional_body, refuse_unsupported, takes
from pegboard.plugins.api_native.profiling import ProfileBody
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import RequestModel, parse_body
from pegboard.toolkit.http.levels import ADMIN


class AbortBody(RequestModel):
    """Body of `/abort_request`."""

    rid: str = ""
    """The request to abort; that of a batch aborts all its parts."""
    abort_all: bool = False


class PauseBody(RequestModel):
    """Body of `/pause_generation`; there need not be one."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
    """What becomes of the requests that are there: `abort` ends them, `in_place` leaves them as they are, with their
    memory, `retract` puts those that run back into the queue, so that their memory is free for others."""


class LoggingBody(RequestModel):
    """Body of `/configure_logging`: what is left out stays as it is."""

    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """How much is logged, by both processes."""
    log_requests: bool | None = None
    """Whether there is a line for each request that has ended."""
    log_requests_level: int | None = None
    log_requests_format: str | None = None
    dump_requests_folder: str | None = None
    dump_requests_threshold: int | None = None
    crash_dump_folder: str | None = None


_UNSUPPORTED = (
    "log_requests_level",
    "log_requests_format",
    "dump_requests_folder",
    "dump_requests_threshold",
    "crash_dump_folder",
)


class Administration:
    """The routes. Those that stand for an action of the scheduler answer what that answers."""

    def __init__(self, ctx: ApiContext) -> None:
        self._client = ctx.client

    def add_to(self, router: APIRouter) -> None:
        admin: dict[str, Any] = {"dependencies": [ADMIN]}
        action = {**admin, **answers(Done, 404)}
        busy = {**admin, **answers(Done, 403, 404, 409)}
        flush = "Drop all cached prefixes; 400 while requests run"
        # The second is vLLM's.
        for path in ("/flush_cache", "/reset_prefix_cache"):
            router.post(path, summary=flush, **admin, **answers(Done))(self.flush_cache)
        docs = {**takes(AbortBody, {"rid": "my-request"}), **admin, **answers(Done)}
        router.post("/abort_request", summary="Abort a request, or all", **docs)(self.abort_request)
        docs = {**takes(PauseBody, required=False), **action}
        router.post("/pause_generation", summary="Start no more steps; requests wait", **docs)(self.pause)
        router.post("/continue_generation", summary="Take up steps again", **action)(self.go_on)
        docs = {**takes(LoggingBody), **action}
        router.post("/configure_logging", summary="Change what is logged", **docs)(self.configure_logging)
        freeze = "Collect garbage, and never look again at what is left"
        router.post("/freeze_gc", summary=freeze, **action)(self.freeze_gc)
        docs = {**takes(ProfileBody, required=False), **busy}
        router.post("/start_profile", summary="Begin a trace of the scheduler process", **docs)(self.start_profile)
        router.post("/stop_profile", summary="End the trace and write it", **busy)(self.stop_profile)

    async def flush_cache(self) -> Response:
        if await self._client.flush_cache():
            return json_response({"success": True, "message": "the cache is empty"})
        raise InvalidRequest("the cache is in use: requests are waiting or running", code="busy")

    async def abort_request(self, request: Request) -> Response:
        body = await parse_body(request, AbortBody)
        if not body.rid and not body.abort_all:
            raise InvalidRequest("rid or abort_all is needed", param="rid")
        await self._client.abort(body.rid, all_requests=body.abort_all)
        return json_response({"success": True})

    async def pause(self, request: Request) -> Response:
        body = await optional_body(request, PauseBody)
        return await self._act("pause_generation", {"mode": body.mode}, "generation is paused")

    async def go_on(self) -> Response:
        return await self._act("continue_generation", {}, "generation goes on")

    async def configure_logging(self, request: Request) -> Response:
        body = await parse_body(request, LoggingBody)
        refuse_unsupported(body, _UNSUPPORTED)
        chosen = body.model_dump(include={"log_level", "log_requests"}, exclude_none=True)
        answer = await self._client.control("configure_logging", chosen)
        if body.log_level is not None:
            # The scheduler's process has done so; this is the other one.
            logging.getLogger().setLevel(body.log_level.upper())
        return json_response({"success": True, **answer})

    async def freeze_gc(self) -> Response:
        answer = await self._client.control("freeze_gc")
        gc.collect()
        gc.freeze()
        return json_response({"success": True, **answer})

    async def start_profile(self, request: Request) -> Response:
        body = await optional_body(request, ProfileBody)
        return await self._act("start_profile", body.arguments())

    async def stop_profile(self) -> Response:
        return await self._act("stop_profile", {})

    async def _act(self, action: str, args: dict[str, object], message: str = "") -> Response:
        answer = await self._client.control(action, args)
        return json_response({"success": True, **({"message": message} if message else {}), **answer})
