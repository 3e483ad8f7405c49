"""Histogram against prometheus_client's own."""

from __future__ import annotations

import numpy as np
import prometheus_client
import pytest

from pegboard.plugins.metrics_prometheus.histogram import Histogram

BOUNDS = (0.1, 0.25, 1.0, 4.0)


def oracle(values: list[float]) -> tuple[list[float], float]:
    """Cumulative counts and sum, by the library that defines what they mean."""
    registry = prometheus_client.CollectorRegistry()
    reference = prometheus_client.Histogram("x", "x", buckets=BOUNDS, registry=registry)
    for value in values:
        reference.observe(value)
    [family] = registry.collect()
    counts = [sample.value for sample in family.samples if sample.name == "x_bucket"]
    return counts, next(sample.value for sample in family.samples if sample.name == "x_sum")


def drawn(n: int) -> list[float]:
    values = np.random.default_rng(n).exponential(1.0, n).tolist()
    return [*values, *BOUNDS, 0.0, 100.0]


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("n", [0, 1, 500])
def test_counts_and_sum(n: int, batch: bool) -> None:
    values = drawn(n)
    histogram = Histogram(BOUNDS)
    if batch:
        histogram.observe_many(np.array(values))
    else:
        for value in values:
            histogram.observe(value)
    counts, total = oracle(values)
    assert [count for _, count in histogram.buckets()] == counts
    assert histogram.total == pytest.approx(total)
    assert [name for name, _ in histogram.buckets()] == ["0.1", "0.25", "1.0", "4.0", "+Inf"]


def test_both_ways_add_up() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.2)
    histogram.observe_many(np.array([0.2, 3.0]))
    histogram.observe_many(np.array([3.0]))
    assert [count for _, count in histogram.buckets()] == [0, 2, 2, 4, 4]


def test_nan_is_no_value() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe_many(np.array([np.nan, 0.2, np.nan]))
    histogram.observe_many(np.array([np.nan]))
    histogram.observe_many(np.array([]))
    assert histogram.buckets()[-1] == ("+Inf", 1)
    assert histogram.total == 0.2
