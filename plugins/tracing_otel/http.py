"""In the API process: a span of each HTTP request that generates, as a child of the client's."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry import trace

from pegboard.core.interfaces.frontend import FrontendStage
from pegboard.plugins.tracing_otel.stage import NAME
from pegboard.plugins.tracing_otel.tracing import PROPAGATOR, Tracing
from pegboard.toolkit.http.watching import watched

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from starlette.types import ASGIApp, Receive, Scope, Send

    from pegboard.core.interfaces.client import EmbedRequest, GenerateRequest, ModelInfo

_HEADERS = (b"traceparent", b"tracestate")


@dataclass
class _Current:
    """The HTTP request that is being answered. Without a request for the engine it has no span in the end."""

    span: Span
    used: bool = False


_CURRENT: ContextVar[_Current | None] = ContextVar("traced_request", default=None)


class TraceFrontend(FrontendStage):
    """Tells the scheduler which span a request is below. Requests of a trace that is not sampled bring nothing."""

    name = NAME

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def prepare(self, request: GenerateRequest | EmbedRequest, length: int, info: ModelInfo) -> dict[str, str] | None:
        current = _CURRENT.get()
        if current is None or not current.span.get_span_context().trace_flags.sampled:
            return None
        current.used = True
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, trace.set_span_in_context(current.span))
        return carrier

    def figures(self, info: ModelInfo) -> dict[str, object]:
        return {f"spans_{outcome}_total": count for outcome, count in self._tracing.outbox.counts.items()}


class TraceMiddleware:
    """ASGI middleware around everything that answers. GETs, such as probes and scrapes, have no span."""

    passes_bodies = True

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracer = tracing.tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}
        span = self._tracer.start_span("POST", PROPAGATOR.extract(carrier), kind=trace.SpanKind.SERVER)
        current = _Current(span)
        token = _CURRENT.set(current)

        def done(status: int) -> None:
            _CURRENT.reset(token)
            if current.used:
                _end(span, scope, status)

        await watched(self._app, scope, receive, send, done)


def _end(span: Span, scope: Scope, status: int) -> None:
    route = str(getattr(scope.get("route"), "path", ""))
    span.update_name(f"POST {route}".rstrip())
    span.set_attributes({"http.request.method": "POST", "http.route": route, "http.response.status_code": status})
    if status >= 500:
        span.set_status(trace.StatusCode.ERROR)
    span.end()
