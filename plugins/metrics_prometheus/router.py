"""GET /metrics."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from pegboard.core.interfaces.api_router import ApiContext, ApiRouter
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.metrics_prometheus.hooks import RENDER
from pegboard.plugins.metrics_prometheus.http_metrics import HttpMetrics
from pegboard.plugins.metrics_prometheus.media import MediaCollector
from pegboard.plugins.metrics_prometheus.options import MetricsOptions
from pegboard.toolkit.http.levels import ADMIN, PUBLIC, USER
from pegboard.toolkit.http.routing import api_router
from pegboard.toolkit.media.service import service_of

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""How long the scheduler may take to answer. It does so between two steps."""

_LEVELS = {"public": PUBLIC, "user": USER, "admin": ADMIN}
_UP = "# HELP pegboard_up Whether the scheduler answered.\n# TYPE pegboard_up gauge\npegboard_up {:d}\n"


class MetricsRouter(ApiRouter[MetricsOptions]):
    """What the scheduler counts and what the HTTP server counts, as one page.

    Scrapes that come while the scheduler is being asked wait for the same answer, so that it is never asked twice at
    once, however many scrape and however long it takes.
    """

    def __init__(self, options: MetricsOptions, ctx: ApiContext) -> None:
        super().__init__(options, ctx)
        self._asking: asyncio.Task[str | None] | None = None

    def routes(self) -> APIRouter:
        content = {"text/plain": {"schema": {"type": "string"}}}
        text: dict[int | str, Any] = {200: {"description": "The metrics.", "content": content}}
        router = api_router(tags=["metrics"], dependencies=[_LEVELS[self.options.level]])
        summary = "Metrics in Prometheus' text format"
        router.get("/metrics", summary=summary, response_class=PlainTextResponse, responses=text)(self.metrics)
        return router

    async def metrics(self, request: Request) -> Response:
        scheduler = await self._scheduler()
        http = HttpMetrics.of(request.app)
        parts = [_UP.format(scheduler is not None), scheduler or "", self._media()]
        parts.append("" if http is None else http.render())
        return Response("".join(parts), media_type=CONTENT_TYPE_LATEST)

    def _media(self) -> str:
        """Return what this process knows of media; nothing of a model that takes none."""
        service = service_of(self.client)
        if service is None:
            return ""
        return MediaCollector(self.client.info.served_name, service.reader.kinds, service.figures()).render()

    async def _scheduler(self) -> str | None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="metrics of the scheduler")
        try:
            return await asyncio.wait_for(asyncio.shield(self._asking), PATIENCE_S)
        except TimeoutError:
            return None

    async def _ask(self) -> str | None:
        try:
            return str((await self.client.control(RENDER))["text"])
        except (InvalidRequest, KeyError) as error:
            logger.debug("no metrics of the scheduler: %s", error)
            return None
