"""Routes with which operators load and unload adapters, as SGLang has them, and as vLLM has them below /v1."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastapi import Request, Response
from pydantic import BaseModel, Field

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.adapters.options import MAX_NAME
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import RequestModel, parse_body
from pegboard.toolkit.http.levels import ADMIN
from pegboard.toolkit.http.openapi import body_docs, error_responses, json_answer
from pegboard.toolkit.http.routing import api_router

if TYPE_CHECKING:
    from fastapi import APIRouter

    from pegboard.core.interfaces.client import EngineClient
    from pegboard.plugins.adapters.frontend import KnownAdapters

_NAME = rf"^[^\s:]{{1,{MAX_NAME}}}$"
_FIRST_LOOK, _LONGEST_LOOK = 0.01, 0.2
"""Seconds between two looks how far something is."""


class LoadBody(RequestModel):
    """An adapter to load."""

    lora_name: str = Field(pattern=_NAME)
    """How requests call it."""
    lora_path: str = Field(min_length=1, max_length=4096)
    """Its directory, below one of `adapters.directories`."""
    pinned: bool = False
    """Keep its slot on the device once it has one."""
    replace: bool = False
    """Take the place of an adapter with this name, whose requests end with what they have."""
    load_inplace: bool = False
    """The same, as vLLM calls it."""


class UnloadBody(RequestModel):
    """An adapter to unload."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME)
    timeout: float = Field(default=60.0, ge=0, le=3600)
    """Seconds to wait until the last request has ended that uses it; then the answer is 409, and it goes on leaving."""
    force: bool = False
    """End the requests that use it, with status 503. One that is leaving already can be named, too."""
    lora_int_id: int | None = None
    """Of vLLM; without meaning here."""


class Changed(BaseModel):
    """It has been done; `loaded_adapters` are all that requests may have now, by name, with their directories."""

    success: bool
    message: str
    loaded_adapters: dict[str, str]


class Routes:
    """The routes. `known` learns of each change."""

    def __init__(self, client: EngineClient, known: KnownAdapters) -> None:
        self._client = client
        self._known = known
        self._loads: set[asyncio.Task[None]] = set()

    def router(self) -> APIRouter:
        router = api_router(tags=["adapters"], dependencies=[ADMIN])
        answer, errors = json_answer(Changed), error_responses(400, 404, 409)
        for base in ("", "/v1"):
            for path, what, body, run in (
                ("load_lora_adapter", "Load an adapter", LoadBody, self.load),
                ("unload_lora_adapter", "Unload an adapter", UnloadBody, self.unload),
            ):
                docs = body_docs(body, {})
                del docs["requestBody"]["content"]["application/json"]["example"]
                router.post(f"{base}/{path}", summary=what, openapi_extra=docs, responses={**answer, **errors})(run)
        return router

    async def load(self, request: Request) -> Response:
        body = await parse_body(request, LoadBody)
        if body.lora_name in self._client.info.names and body.lora_name not in self._known.names:
            raise InvalidRequest(f"{body.lora_name!r} is the model's own name", param="lora_name")
        args = {"name": body.lora_name, "path": body.lora_path, "pinned": body.pinned}
        begun = await self._client.control("load_adapter", {**args, "replace": body.replace or body.load_inplace})
        task = asyncio.ensure_future(self._loaded(begun["uid"]))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        # Its end is noted also where the client leaves.
        await asyncio.shield(task)
        return await self._changed(f"the adapter {body.lora_name!r} is loaded")

    async def _loaded(self, uid: object) -> None:
        """Wait for the end of a load. Requests may name the adapter meanwhile, and wait, too. Raises InvalidRequest."""
        await self._refresh()
        state = await self._followed(uid, "loading")
        if state["state"] == "failed":
            await self._refresh()
            raise InvalidRequest(str(state["error"]), param="lora_path", code="adapter_failed")

    async def unload(self, request: Request) -> Response:
        body = await parse_body(request, UnloadBody)
        begun = await self._client.control("unload_adapter", {"name": body.lora_name, "force": body.force})
        await self._refresh()
        state = await self._followed(begun["uid"], "leaving", body.timeout)
        if state["state"] == "leaving":
            raise InvalidRequest(
                f"the adapter {body.lora_name!r} takes no more requests, and is gone when the {state['users']} that "
                "use it have ended; if generation is paused, continue it",
                param="lora_name",
                code="adapter_in_use",
                status=409,
            )
        return await self._changed(f"the adapter {body.lora_name!r} is unloaded")

    async def _followed(self, uid: object, state: str, most: float = float("inf")) -> Mapping[str, object]:
        """Return what the load of this number has become, once it is in another state or after `most` seconds."""
        end, pause = time.monotonic() + most, _FIRST_LOOK
        while True:
            found = await self._client.control("adapter_state", {"uid": uid})
            left = end - time.monotonic()
            if found["state"] != state or left <= 0:
                return found
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_LOOK)

    async def _changed(self, message: str) -> Response:
        ready = await self._refresh()
        return json_response({"success": True, "message": message, "loaded_adapters": ready})

    async def _refresh(self) -> dict[str, str]:
        """Learn which adapters requests may name; return those that are loaded."""
        told = await self._client.control("list_adapters")
        self._known.learn({adapter["name"]: adapter["path"] for adapter in told["adapters"]})
        return {adapter["name"]: adapter["path"] for adapter in told["adapters"] if adapter["state"] == "ready"}
