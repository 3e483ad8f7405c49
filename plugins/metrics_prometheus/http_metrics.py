"""HTTP requests, counted in the API process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.exposition import generate_latest

from pegboard.toolkit.http.watching import watched

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

UNKNOWN = "unknown"
"""The label of paths that no route has: clients that try them must not decide how many series there are."""


class HttpMetrics:
    """Counts what an application answers. The application's state holds it, for the route that shows it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(namespace="pegboard_api", registry=self._registry)
        self.requests = Counter(
            "pegboard_http_requests",
            "HTTP requests by route and status; 499 where the client left before an answer.",
            ("route", "status"),
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "pegboard_http_requests_in_flight", "HTTP requests that are being answered.", registry=self._registry
        )

    def watch(self, app: FastAPI) -> None:
        """Count what this application answers from now on; it must not have answered anything yet."""
        app.state.pegboard_http_metrics = self
        app.add_middleware(_Counting, metrics=self)

    @staticmethod
    def of(app: FastAPI) -> HttpMetrics | None:
        """Return the one that watches this application."""
        return getattr(app.state, "pegboard_http_metrics", None)

    def render(self) -> str:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class _Counting:
    """ASGI middleware around everything that answers."""

    passes_bodies = True

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        def done(status: int) -> None:
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(_route(scope), str(status)).inc()

        self._metrics.in_flight.inc()
        await watched(self._app, scope, receive, send, done)


def _route(scope: Scope) -> str:
    """Return the route's own path, with the names of its parameters in place of their values."""
    return str(getattr(scope.get("route"), "path", UNKNOWN))
