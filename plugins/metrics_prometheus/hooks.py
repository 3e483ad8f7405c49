"""The hooks: those of the scheduler process fill the collector, the one of the API process counts HTTP requests.

A plugin's hooks are there whether or not its API is chosen, so they ask the config first; without `metrics` under
`apis` nothing is imported and a step costs the calls of two empty methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.hooks import hookimpl

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.core.interfaces.client import ModelInfo
    from pegboard.core.interfaces.engine_view import EngineView
    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.metrics_prometheus.collector import SchedulerCollector

PROVIDER = "metrics"
RENDER = "metrics_prometheus.render"
"""The control action that answers the scheduler's metrics as `text`."""


class MetricsHooks:
    """Hooks of both processes."""

    def __init__(self) -> None:
        self._wanted = False
        self._collector: SchedulerCollector | None = None

    @hookimpl
    def configure(self, config: Any) -> None:
        self._wanted = any(api.use == PROVIDER for api in config.apis)

    # ---- scheduler process ----------------------------------------------------------------------------------------

    @hookimpl
    def engine_started(self, info: ModelInfo, engine: EngineView) -> None:
        if not self._wanted:
            return
        from prometheus_client import CollectorRegistry, ProcessCollector
        from prometheus_client.exposition import generate_latest

        from pegboard.plugins.metrics_prometheus.collector import SchedulerCollector
        from pegboard.plugins.metrics_prometheus.families import PREFIX

        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(namespace=f"{PREFIX}scheduler", registry=registry)
        self._collector = SchedulerCollector(info.served_name, engine.stats)
        registry.register(self._collector)
        engine.call_hook("register_metrics", registry=registry)
        engine.add_control(RENDER, lambda args: {"text": generate_latest(registry).decode()})

    @hookimpl
    def batch_committed(self, batch: ScheduleBatch) -> None:
        if self._collector is not None:
            self._collector.batch_committed(batch)

    @hookimpl
    def requests_finished(self, reqs: Sequence[Req]) -> None:
        if self._collector is not None:
            self._collector.requests_finished(reqs)

    # ---- API process ----------------------------------------------------------------------------------------------

    @hookimpl
    def register_routes(self, app: FastAPI) -> None:
        if not self._wanted:
            return
        from pegboard.plugins.metrics_prometheus.http_metrics import HttpMetrics

        HttpMetrics().watch(app)
