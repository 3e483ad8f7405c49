"""The page's routes: itself, for everyone; what it shows of the server, for admins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastapi import Response

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.console.actions import POINTS, RUNS
from pegboard.plugins.console.feed import Feed
from pegboard.plugins.console.page import page
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.events import EventStream
from pegboard.toolkit.http.levels import ADMIN, PUBLIC
from pegboard.toolkit.http.routing import api_router
from pegboard.toolkit.text.dotted_trees import leaves, origin_of

if TYPE_CHECKING:
    from fastapi import APIRouter

    from pegboard.core.interfaces.client import EngineClient


class Routes:
    """The routes. `origins` cites what set each key of the config, by its path."""

    def __init__(self, client: EngineClient, origins: Mapping[str, str]) -> None:
        self._client = client
        self._origins = origins
        self._feed = Feed(client)

    def router(self) -> APIRouter:
        """Return them. The page's own are not documented: they change with it."""
        router = api_router(include_in_schema=False)
        router.get("/", summary="The console", dependencies=[PUBLIC])(self.page)
        for name, summary, answer in (
            ("events", "Figures and steps as they change", self.events),
            ("runs", "The largest runs of cached tokens", self.runs),
            ("about", "The config, the model, and who takes part where", self.about),
        ):
            router.get(f"/console/{name}", summary=summary, dependencies=[ADMIN])(answer)
        return router

    async def page(self) -> Response:
        return page()

    async def events(self) -> Response:
        viewer = self._feed.open()
        return EventStream(viewer.frames(), close=lambda: self._feed.close(viewer), done=b"")

    async def runs(self) -> Response:
        return json_response(await self._client.control(RUNS))

    async def about(self) -> Response:
        told = await self._client.server_info()
        try:
            points = (await self._client.control(POINTS))["points"]
        except InvalidRequest:
            points = []
        info = self._client.info
        model = {name: getattr(info, name) for name in _OF_THE_MODEL}
        keys = [(path, value, origin_of(path, self._origins)) for path, value in leaves(told.get("config", {}))]
        return json_response(
            {"model": model, "config": keys, "points": points, "providers": info.providers, "stages": info.stages}
        )


_OF_THE_MODEL = (
    *("served_name", "path", "architecture", "dtype", "max_context_len", "max_total_tokens", "vocab_size", "version"),
    *("created", "features", "sampling_defaults"),
)
