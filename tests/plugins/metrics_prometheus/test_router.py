"""The route, on an engine that answers what it is told to; and the counting of HTTP requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.interfaces.api_router import ApiContext, ApiRouter
from pegboard.core.registry.registry import Registry
from pegboard.plugins.metrics_prometheus import router as module
from pegboard.plugins.metrics_prometheus.hooks import RENDER, MetricsHooks
from pegboard.plugins.metrics_prometheus.options import MetricsOptions
from pegboard.plugins.metrics_prometheus.router import MetricsRouter
from pegboard.toolkit.http.app import build_app

SCHEDULER = "# HELP x Some.\n# TYPE x gauge\nx 7.0\n"


def application(client: FakeEngineClient) -> FastAPI:
    """An application with two APIs and the hooks, as the server builds it."""
    ctx = ApiContext(client=client, max_body_bytes=1000)
    record = Registry.discover(()).get("api", "native")
    assert record is not None
    native: ApiRouter = record.load()(record.options_model()(), ctx)
    app = build_app([("native", native), ("metrics", MetricsRouter(MetricsOptions(), ctx))], max_body_bytes=1000)

    @app.get("/things/{name}")
    async def things(name: str) -> None:
        if name == "broken":
            raise RuntimeError("a bug")

    hooks = MetricsHooks()
    hooks.configure(SimpleNamespace(apis=[SimpleNamespace(use="native"), SimpleNamespace(use="metrics")]))
    hooks.register_routes(app)
    return app


def client_with_metrics() -> FakeEngineClient:
    client = FakeEngineClient()
    client.control_answers[RENDER] = {"text": SCHEDULER}
    return client


def read(done: Exchange) -> dict[tuple[str, ...], float]:
    """Every series by its name and label values. Raises where the page is not valid."""
    assert done.status == 200
    assert done.headers["content-type"].startswith("text/plain; version=")
    text = done.body.decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family stands there twice"
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_both_processes_on_one_page() -> None:
    async def scene() -> dict[tuple[str, ...], float]:
        return read(await call(application(client_with_metrics()), "GET", "/metrics"))

    page = asyncio.run(scene())
    assert page["pegboard_up",] == 1
    assert page["x",] == 7
    assert page["pegboard_http_requests_in_flight",] == 1
    assert page["pegboard_api_process_resident_memory_bytes",] > 0


def test_requests_by_route_and_status() -> None:
    async def scene() -> dict[tuple[str, ...], float]:
        app = application(client_with_metrics())
        for path in ("/health", "/health", "/things/a", "/things/b", "/nowhere", "/wp-admin"):
            await call(app, "GET", path)
        await call(app, "POST", "/generate", {"text": "Hi"})
        await call(app, "POST", "/generate", {"text": ""})
        await call(app, "POST", "/generate", {"text": "x" * 2000})
        with pytest.raises(RuntimeError):
            await call(app, "GET", "/things/broken")
        return read(await call(app, "GET", "/metrics"))

    page = asyncio.run(scene())
    counted = {key[1:]: value for key, value in page.items() if key[0] == "pegboard_http_requests_total"}
    # A body that is too large is refused before anybody looks for a route.
    assert counted == {
        ("/health", "200"): 2,
        ("/things/{name}", "200"): 2,
        ("/things/{name}", "500"): 1,
        ("/generate", "200"): 1,
        ("/generate", "400"): 1,
        ("unknown", "413"): 1,
        ("unknown", "404"): 2,
    }


def test_who_leaves_is_counted() -> None:
    async def scene() -> dict[tuple[str, ...], float]:
        client = client_with_metrics()
        client.stall_at = 0
        app = application(client)
        exchange = Exchange(app, "POST", "/generate", b'{"text": "Hi"}')
        await client.submitted.wait()
        during = read(await call(app, "GET", "/metrics"))
        assert during["pegboard_http_requests_in_flight",] == 2
        exchange.leave()
        await exchange.end()
        return read(await call(app, "GET", "/metrics"))

    page = asyncio.run(scene())
    assert page["pegboard_http_requests_total", "/generate", "499"] == 1
    assert page["pegboard_http_requests_in_flight",] == 1


def test_without_a_scheduler() -> None:
    async def scene() -> dict[tuple[str, ...], float]:
        return read(await call(application(FakeEngineClient()), "GET", "/metrics"))

    page = asyncio.run(scene())
    assert page["pegboard_up",] == 0
    assert ("x",) not in page
    assert page["pegboard_http_requests_in_flight",] == 1


class SlowClient(FakeEngineClient):
    """Answers a control action when it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def control(self, action: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        self.controls.append((action, args or {}))
        await self.gate.wait()
        return {"text": SCHEDULER}


def test_a_scheduler_that_is_busy_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)

    async def scene() -> tuple[SlowClient, list[float]]:
        client = SlowClient()
        app = application(client)
        ups = []
        for _ in range(3):
            ups.append(read(await call(app, "GET", "/metrics"))["pegboard_up",])
        asked = len(client.controls)
        assert asked == 1, "questions pile up in front of a scheduler that is busy"
        client.gate.set()
        monkeypatch.setattr(module, "PATIENCE_S", 10.0)
        ups.append(read(await call(app, "GET", "/metrics"))["pegboard_up",])
        await call(app, "GET", "/metrics")
        return client, ups

    client, ups = asyncio.run(scene())
    assert ups == [0, 0, 0, 1]
    assert len(client.controls) >= 2, "a new scrape asks anew"


def test_without_hooks_there_is_the_scheduler_alone() -> None:
    async def scene() -> dict[tuple[str, ...], float]:
        ctx = ApiContext(client=client_with_metrics(), max_body_bytes=1000)
        app = build_app([("metrics", MetricsRouter(MetricsOptions(), ctx))], max_body_bytes=1000)
        return read(await call(app, "GET", "/metrics"))

    assert asyncio.run(scene()) == {("pegboard_up",): 1, ("x",): 7}
