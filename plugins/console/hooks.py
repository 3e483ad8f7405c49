"""The hooks: the scheduler's process notes steps and answers questions, the API process brings the page."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.console.actions import LOOK, MOST_RUNS, POINTS, RUNS
from pegboard.plugins.console.steps import Steps

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.core.interfaces.client import EngineClient
    from pegboard.core.interfaces.engine_view import EngineView

logger = logging.getLogger(__name__)


class Console:
    """Hooks of both processes. A step costs a call and a comparison while the page is not looked at."""

    def __init__(self) -> None:
        self._origins: Mapping[str, str] = {}
        self._steps = Steps()
        self._engine: EngineView | None = None

    @hookimpl
    def configure(self, origins: Mapping[str, str]) -> None:
        self._origins = origins

    # ---- scheduler process ----------------------------------------------------------------------------------------

    @hookimpl
    def engine_started(self, engine: EngineView) -> None:
        self._engine = engine
        engine.add_control(LOOK, self.look)
        engine.add_control(RUNS, self.runs)
        engine.add_control(POINTS, self.points)

    @hookimpl
    def batch_committed(self, batch: ScheduleBatch) -> None:
        self._steps.committed(batch)

    def look(self, args: dict[str, object]) -> dict[str, object]:
        """Answer figures, the steps after number `since`, the scheduler's time, and what tells it from its follower."""
        assert self._engine is not None
        since = args.get("since", 0)
        if not isinstance(since, int):
            raise InvalidRequest(f"since must be a number of a step, got {since!r}", param="since")
        steps = self._steps.since(since)
        return {"started": self._steps.started, "now": time.monotonic(), "stats": self._engine.stats(), "steps": steps}

    def runs(self, args: dict[str, object]) -> dict[str, object]:
        """Answer the largest runs of tokens that the prefix cache has."""
        assert self._engine is not None
        cache = self._engine.prefix_cache
        try:
            runs = [asdict(run) for run in cache.describe(MOST_RUNS)]
        except Exception:
            logger.exception("the prefix cache %s cannot be described", type(cache).__name__)
            runs = []
        return {"runs": runs, "cached_tokens": cache.cached_tokens, "page_size": cache.page_size}

    def points(self, args: dict[str, object]) -> dict[str, object]:
        """Answer who takes part where."""
        assert self._engine is not None
        return {"points": [asdict(point) for point in self._engine.points()]}

    # ---- API process ----------------------------------------------------------------------------------------------

    @hookimpl
    def register_routes(self, app: FastAPI, client: EngineClient) -> None:
        from pegboard.plugins.console.routes import Routes

        app.router.routes.extend(Routes(client, self._origins).router().routes)
