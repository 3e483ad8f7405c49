"""What a server exposes to Prometheus: each metric of the plugins' real registries, with the names of its labels."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pegboard.plugins.metrics_prometheus.collector import SchedulerCollector
from pegboard.plugins.metrics_prometheus.http_metrics import HttpMetrics
from pegboard.plugins.metrics_prometheus.media import ENCODES, MediaCollector
from pegboard.plugins.tracing_otel.metrics import SpanCounts

STATS: dict[str, object] = {
    ENCODES: 1,
    "plugin_failures_by": {"sampler": {"one": 1}},
    "tiers": {"written_tokens_total": 1, "host_tokens": 1},
    "gate_stats": {"session": {"open": 1, "seen_total": 1}},
    "stages": {"adapters": {"slot_retractions_total": 1, "slots_in_use": 1}},
    "policy": {"depth": 1},
}
"""Figures of the scheduler, as far as series come with them."""


def exposed() -> dict[str, set[str]]:
    """Return labels by the name of the sample, those that a scrape adds included."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SchedulerCollector("m", lambda: STATS))
    registry.register(SpanCounts({"sent": 1}))
    ProcessCollector(namespace="pegboard_scheduler", registry=registry)
    http = HttpMetrics()
    http.requests.labels("/generate", "200").inc()
    media = MediaCollector("m", ("image",), {"failures": {"too_large": 1}})
    page = generate_latest(registry).decode() + media.render() + http.render()
    found: dict[str, set[str]] = {"up": {"job", "instance"}, "pegboard_up": {"job", "instance"}}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    return found
