"""Metrics of each adapter, for a plugin that keeps metrics. Importing this module imports prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pegboard.plugins.adapters.store import Totals

if TYPE_CHECKING:
    from collections.abc import Callable

    from pegboard.plugins.adapters.store import Adapter, AdapterStore

_GAUGES: tuple[tuple[str, str, Callable[[Adapter], float]], ...] = (
    ("requests_running", "Requests that run with the adapter.", lambda one: len(one.holders)),
    ("requests", "Requests with the adapter that have not ended.", lambda one: one.users),
    ("on_host", "1 if the adapter is in the host's memory.", lambda one: one.kept),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Totals], float]], ...] = (
    ("requests_finished", "Requests with the adapter that have ended.", lambda one: one.requests),
    ("requests_refused", "Requests that ended because the adapter could not be read.", lambda one: one.refused),
    ("prompt_tokens", "Tokens of their prompts.", lambda one: one.prompt_tokens),
    ("generation_tokens", "Tokens that were generated for them.", lambda one: one.generation_tokens),
)


class AdapterMetrics(Collector):
    """What requests do with each adapter that they may have now, and the totals of each name, with the label `adapter`.
    Totals go on if another adapter gets the name.
    """

    def __init__(self, store: AdapterStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        adapters = list(self._store.names.items())
        for name, text, value in _GAUGES:
            gauges = GaugeMetricFamily(f"pegboard_adapter_{name}", text, labels=["adapter"])
            for adapter, one in adapters:
                gauges.add_metric([adapter], value(one))
            yield gauges
        none = Totals()
        kept = {name: none for name, _ in adapters} | self._store.totals
        for name, text, total in _COUNTERS:
            counters = CounterMetricFamily(f"pegboard_adapter_{name}", text, labels=["adapter"])
            for adapter, totals in kept.items():
                counters.add_metric([adapter], total(totals))
            yield counters
