"""Metrics of each adapter, for a plugin that keeps metrics. Importing this module imports prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable

    from pegboard.plugins.adapters.store import Adapter, AdapterStore

_GAUGES: tuple[tuple[str, str, Callable[[Adapter], float]], ...] = (
    ("requests_running", "Requests that run with the adapter.", lambda one: len(one.holders)),
    ("requests", "Requests with the adapter that have not ended.", lambda one: one.users),
    ("on_host", "1 if the adapter is in the host's memory.", lambda one: one.kept),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Adapter], float]], ...] = (
    ("requests_finished", "Requests with the adapter that have ended.", lambda one: one.totals.requests),
    ("prompt_tokens", "Tokens of their prompts.", lambda one: one.totals.prompt_tokens),
    ("generation_tokens", "Tokens that were generated for them.", lambda one: one.totals.generation_tokens),
)


class AdapterMetrics(Collector):
    """What requests of each adapter do that requests may have now, with the label `adapter`."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        adapters = list(self._store.names.items())
        for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, value in metrics:
                family = kind(f"pegboard_adapter_{name}", text, labels=["adapter"])
                for adapter, one in adapters:
                    family.add_metric([adapter], value(one))
                yield family
