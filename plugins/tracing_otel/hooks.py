"""The hooks: without an endpoint in the config nothing is imported, and each costs the call of an empty method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.tracing_otel.options import TracingFields
from pegboard.plugins.tracing_otel.stage import PARENT, TraceStage

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pegboard.core.interfaces.frontend import FrontendStage
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import Stage
    from pegboard.plugins.tracing_otel.tracing import Tracing


class TracingHooks:
    """Hooks of both processes."""

    def __init__(self, options: Options) -> None:
        self._endpoint = options.section(TracingFields).otlp_traces_endpoint
        self._tracing: Tracing | None = None

    @hookimpl
    def configure(self) -> None:
        if self._endpoint is None:
            return
        try:
            from pegboard.plugins.tracing_otel.tracing import Tracing
        except ModuleNotFoundError as error:
            text = f"traces need {error.name}; install it: pip install 'pegboard[otel]'"
            raise ConfigError(Problem("server.otlp_traces_endpoint", text)) from error
        self._tracing = Tracing(self._endpoint)

    @hookimpl
    def shutdown(self) -> None:
        if self._tracing is not None:
            self._tracing.outbox.close()

    # ---- scheduler process ----------------------------------------------------------------------------------------

    @hookimpl
    def pipeline_stages(self) -> list[Stage]:
        return [] if self._tracing is None else [TraceStage(self._tracing.outbox)]

    @hookimpl
    def requests_finished(self, reqs: Sequence[Req]) -> None:
        if self._tracing is not None:
            for req in reqs:
                if (parent := PARENT.peek(req)) is not None:
                    self._tracing.finished(req, parent)

    @hookimpl
    def register_metrics(self, registry: Any) -> None:
        if self._tracing is not None:
            from pegboard.plugins.tracing_otel.metrics import SpanCounts

            registry.register(SpanCounts(self._tracing.outbox.counts))

    # ---- API process ----------------------------------------------------------------------------------------------

    @hookimpl
    def frontend_stages(self) -> list[FrontendStage]:
        if self._tracing is None:
            return []
        from pegboard.plugins.tracing_otel.http import TraceFrontend

        return [TraceFrontend(self._tracing)]

    @hookimpl
    def register_routes(self, app: FastAPI) -> None:
        if self._tracing is not None:
            from pegboard.plugins.tracing_otel.http import TraceMiddleware

            app.add_middleware(TraceMiddleware, tracing=self._tracing)
