"""Control actions of operators: pause and go on, what is logged, the garbage collector."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.core.engine.time_stats import log_finished
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import AbortRequest

if TYPE_CHECKING:
    from pegboard.core.interfaces.engine_view import Control
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.scheduler import Scheduler

LOG_LEVELS = ("debug", "info", "warning", "error")
PAUSE_MODES = ("abort", "retract", "in_place")

logger = logging.getLogger(__name__)


class RequestLog:
    """A line in the log per finished request while it is `on`; a hook `requests_finished`."""

    def __init__(self, *, on: bool) -> None:
        self.on = on

    def __call__(self, reqs: Sequence[Req]) -> None:
        if self.on:
            log_finished(reqs)


class Operation:
    """What an operator may ask of a scheduler while it runs."""

    def __init__(self, scheduler: Scheduler, request_log: RequestLog) -> None:
        self._scheduler = scheduler
        self._request_log = request_log

    def controls(self) -> dict[str, Control]:
        """Return its actions, for the scheduler's table."""
        return {
            "pause_generation": self.pause,
            "continue_generation": self.go_on,
            "configure_logging": self.configure_logging,
            "freeze_gc": self.freeze_gc,
        }

    def pause(self, args: dict[str, object]) -> dict[str, object]:
        """Start no more steps. Requests are taken and wait; control actions and aborts work as ever.

        `mode` says what becomes of the requests that are there: `abort` (the default) ends all of them, `in_place`
        leaves them as they are, `retract` puts those that run back into the queue, output kept, so that their memory is
        free. Pausing what is paused does what the mode says once more.
        """
        mode = args.get("mode") or "abort"
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", param="mode")
        scheduler = self._scheduler
        scheduler.paused = True
        if mode == "abort":
            scheduler.receive([AbortRequest(all_requests=True)])
        elif mode == "retract":
            self._retract_all()
        logger.info("paused, mode %s", mode)
        return {}

    def go_on(self, args: dict[str, object]) -> dict[str, object]:
        """Take up steps again. Nothing happens where they were not paused."""
        if self._scheduler.paused:
            self._scheduler.paused = False
            logger.info("not paused any more")
        return {}

    def configure_logging(self, args: dict[str, object]) -> dict[str, object]:
        """Change `log_level` and `log_requests` of the config, as far as they are given, in this process."""
        level, requests = args.get("log_level"), args.get("log_requests")
        if level is not None and level not in LOG_LEVELS:
            raise InvalidRequest(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {level!r}", param="log_level")
        if requests is not None and not isinstance(requests, bool):
            raise InvalidRequest(f"log_requests must be true or false, got {requests!r}", param="log_requests")
        if level is not None:
            logging.getLogger().setLevel(level.upper())
        if requests is not None:
            self._request_log.on = requests
        shown = logging.getLevelName(logging.getLogger().level).lower()
        return {"log_level": shown, "log_requests": self._request_log.on}

    def freeze_gc(self, args: dict[str, object]) -> dict[str, object]:
        """Collect garbage now, and never look at what is left again: it came with the start or with warming up."""
        gc.collect()
        gc.freeze()
        return {"objects": gc.get_freeze_count()}

    def _retract_all(self) -> None:
        scheduler, planner = self._scheduler, self._scheduler.planner
        flight, scheduler.loop.flight = scheduler.loop.flight, None
        if flight is not None:
            scheduler.settle(flight)
        planner.abandon()
        chunked = [] if planner.chunked is None else [planner.chunked]
        # Each goes to the head of the queue, so the first to run is the last to go.
        for req in [*chunked, *reversed([*planner.running.reqs, *planner.holding])]:
            planner.retract(req)
