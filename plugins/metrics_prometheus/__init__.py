"""Metrics for Prometheus: a route, and the hooks that fill it."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="metrics_prometheus",
    version="0.1.0",
    other_servers="pegboard.plugins.metrics_prometheus:other_servers.yaml",
    summary="GET /metrics for Prometheus; list `metrics` under `apis` to switch it on",
    providers=(
        Provider(
            contract="api",
            name="metrics",
            factory="pegboard.plugins.metrics_prometheus.router:MetricsRouter",
            config="pegboard.plugins.metrics_prometheus.options:MetricsOptions",
            summary="/metrics: counters, gauges and histograms of scheduler and HTTP server",
        ),
    ),
    hooks=("pegboard.plugins.metrics_prometheus.hooks:MetricsHooks",),
    extras={"prometheus_client": "pip install 'pegboard[prometheus]'"},
)
