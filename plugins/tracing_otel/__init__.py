"""OpenTelemetry traces of requests, sent to a collector."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="tracing_otel",
    version="0.1.0",
    other_servers="pegboard.plugins.tracing_otel:other_servers.yaml",
    summary="traces of requests by OTLP: HTTP, gates, queue, prefill, decode, within the client's own trace",
    fields={"server": "pegboard.plugins.tracing_otel.options:TracingFields"},
    hooks=("pegboard.plugins.tracing_otel.hooks:TracingHooks",),
)
