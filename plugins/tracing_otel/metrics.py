"""What became of the spans of the scheduler process, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class SpanCounts(Collector):
    """The counts of an outbox."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        text = "Spans of requests in the scheduler process, by outcome: sent, failed, dropped."
        family = CounterMetricFamily("pegboard_trace_spans", text, labels=["outcome"])
        for outcome, count in self._counts.items():
            family.add_metric([outcome], count)
        yield family
