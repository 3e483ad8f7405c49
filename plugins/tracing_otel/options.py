"""The key of the config that traces add."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import field_validator

from pegboard.core.interfaces.options import SectionFields


class TracingFields(SectionFields):
    """Keys of `server`."""

    otlp_traces_endpoint: str | None = None
    """Where traces of requests are sent by OTLP over HTTP, such as http://collector:4318; unset: none are made. The
    variables OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER and OTEL_SERVICE_NAME count, as OpenTelemetry has them."""

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"must be an http or https URL, such as http://collector:4318, got {value!r}")
        if parts.username is not None or parts.password is not None:
            raise ValueError("must have no user or password: put a key for the collector in OTEL_EXPORTER_OTLP_HEADERS")
        return value if parts.path.strip("/") else f"{value.rstrip('/')}/v1/traces"
