"""Control actions of operators: pause and go on, what is logged, the garbage collector."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard, get_args

from pegboard.core.interfaces.engine_view import PauseMode
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.operator_controls.options import LogFields
from pegboard.plugins.operator_controls.request_log import log_finished

if TYPE_CHECKING:
    from pegboard.core.interfaces.engine_view import EngineView
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.req import Req

LOG_LEVELS = ("debug", "info", "warning", "error")
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)

logger = logging.getLogger(__name__)


class OperatorControls:
    """The actions `pause_generation`, `continue_generation`, `configure_logging` and `freeze_gc`; and the log of
    finished requests, which one of them switches.
    """

    def __init__(self, options: Options) -> None:
        self._log_requests = options.section(LogFields).log_requests
        self._engine: EngineView | None = None

    @hookimpl
    def engine_started(self, engine: EngineView) -> None:
        self._engine = engine
        engine.add_control("pause_generation", self.pause)
        engine.add_control("continue_generation", self.resume)
        engine.add_control("configure_logging", self.configure_logging)
        engine.add_control("freeze_gc", self.freeze_gc)

    @hookimpl
    def requests_finished(self, reqs: Sequence[Req]) -> None:
        if self._log_requests:
            log_finished(reqs)

    def pause(self, args: dict[str, object]) -> dict[str, object]:
        """Start no more steps. Requests are accepted and wait; control actions and aborts work as before.

        `mode` says what becomes of the requests that are there (see `EngineView.pause`); `abort` by default.
        """
        mode = args.get("mode") or "abort"
        if not _is_mode(mode):
            raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", param="mode")
        assert self._engine is not None
        self._engine.pause(mode)
        logger.info("paused, mode %s", mode)
        return {}

    def resume(self, args: dict[str, object]) -> dict[str, object]:
        """Start steps again. Do nothing if they were not paused."""
        assert self._engine is not None
        if self._engine.resume():
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
            self._log_requests = requests
        shown = logging.getLevelName(logging.getLogger().level).lower()
        return {"log_level": shown, "log_requests": self._log_requests}

    def freeze_gc(self, args: dict[str, object]) -> dict[str, object]:
        """Collect garbage now, and exclude what is left from later collections: it came with the start or with warming
        up.
        """
        gc.collect()
        gc.freeze()
        return {"objects": gc.get_freeze_count()}


def _is_mode(mode: object) -> TypeGuard[PauseMode]:
    return mode in PAUSE_MODES
