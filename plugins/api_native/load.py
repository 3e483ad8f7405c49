"""How busy the server is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response
from pydantic import RootModel

from pegboard.core.interfaces.api_router import ApiContext
from pegboard.plugins.api_native.bodies import Described, answers
from pegboard.toolkit.http.answers import json_response


class BriefLoad(Described):
    """How busy an engine is."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class BriefLoads(RootModel[list[BriefLoad]]):
    """How busy the engines are."""


class Load(BriefLoad):
    """How busy an engine is, and how full."""

    timestamp: float
    """Seconds since 1970."""
    num_running_reqs: int
    num_used_tokens: int
    """Tokens of KV that requests hold, or that they keep the cache from dropping."""
    max_total_num_tokens: int
    token_usage: float
    """Used, of all."""


class TotalLoad(Described):
    """All engines together."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float


class Loads(Described):
    """How busy the engines are."""

    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: TotalLoad


class ServerLoad(Described):
    """How busy the server is, in vLLM's words."""

    server_load: int
    """Requests that the engines have, waiting ones included."""


class LoadRoutes:
    """The routes."""

    def __init__(self, ctx: ApiContext) -> None:
        self._client = ctx.client

    def add_to(self, router: APIRouter) -> None:
        router.get("/v1/loads", summary="Requests and tokens per engine", **answers(Loads))(self.loads)
        brief = "Requests and tokens per engine, as a bare list"
        router.get("/get_load", summary=brief, **answers(BriefLoads))(self.get_load)
        router.get("/load", summary="Requests of all engines, as one number", **answers(ServerLoad))(self.load)

    async def loads(self) -> Response:
        load = await self._full()
        together = {
            "total_running_reqs": load["num_running_reqs"],
            "total_waiting_reqs": load["num_waiting_reqs"],
            "total_reqs": load["num_reqs"],
            "avg_token_usage": load["token_usage"],
        }
        about = {"timestamp": load["timestamp"], "version": self._client.info.version, "dp_rank_count": 1}
        return json_response({**about, "loads": [load], "aggregate": together})

    async def get_load(self) -> Response:
        load = await self._full()
        return json_response([{name: load[name] for name in BriefLoad.model_fields}])

    async def load(self) -> Response:
        return json_response({"server_load": (await self._full())["num_reqs"]})

    async def _full(self) -> dict[str, Any]:
        return full_load((await self._client.server_info()).get("scheduler", {}), time.time())


def full_load(scheduler: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return one engine's load, from its scheduler's counters."""
    running = scheduler.get("running_requests", 0)
    waiting = scheduler.get("waiting_requests", 0) + scheduler.get("blocked_requests", 0)
    used = scheduler.get("held_tokens", 0) + scheduler.get("locked_tokens", 0)
    total = scheduler.get("total_tokens", 0)
    return {
        "dp_rank": 0,
        "timestamp": now,
        "num_reqs": waiting + running,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_tokens": used,
        "num_used_tokens": used,
        "max_total_num_tokens": total,
        "token_usage": used / total if total else 0.0,
    }
