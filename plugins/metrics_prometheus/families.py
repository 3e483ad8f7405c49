"""Families: metrics of one model, made of plain values when a scraper asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from pegboard.plugins.metrics_prometheus.histogram import Histogram

V = TypeVar("V")
_Values: TypeAlias = V | Mapping[str, V]

PREFIX = "pegboard_"


class Families:
    """Makes metrics with the label `model_name`. Where values come by name, each is a series, and `label` is that of
    the names.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def counter(self, name: str, text: str, values: _Values[float], label: str = "") -> Metric:
        """Return a counter; `name` is without prefix and `_total`."""
        family = CounterMetricFamily(PREFIX + name, text, labels=_names(label))
        for labels, value in self._series(values):
            family.add_metric(labels, value)
        return family

    def gauge(self, name: str, text: str, values: _Values[float], label: str = "") -> Metric:
        """Return a gauge; `name` is without prefix."""
        family = GaugeMetricFamily(PREFIX + name, text, labels=_names(label))
        for labels, value in self._series(values):
            family.add_metric(labels, value)
        return family

    def histogram(self, name: str, text: str, values: _Values[Histogram], label: str = "") -> Metric:
        """Return a histogram; `name` is without prefix."""
        family = HistogramMetricFamily(PREFIX + name, text, labels=_names(label))
        for labels, value in self._series(values):
            family.add_metric(labels, value.buckets(), value.total)
        return family

    def _series(self, values: _Values[V]) -> Iterator[tuple[list[str], V]]:
        """Label values and value of each series; one value alone has no label of its own."""
        if isinstance(values, Mapping):
            yield from (([self.model_name, str(name)], value) for name, value in values.items())
        else:
            yield [self.model_name], values


def _names(label: str) -> list[str]:
    return ["model_name", label] if label else ["model_name"]
