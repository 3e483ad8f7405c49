"""The suite of ApiRouter on the Anthropic-compatible routes."""

from __future__ import annotations

from pegboard.core.testing.api_router import ApiRouterContract


class TestAnthropic(ApiRouterContract):
    provider = "anthropic"
