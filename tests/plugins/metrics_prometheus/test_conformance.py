"""The suite of ApiRouter on the metrics route."""

from __future__ import annotations

from pegboard.conformance.api_router import ApiRouterContract


class TestMetrics(ApiRouterContract):
    provider = "metrics"
