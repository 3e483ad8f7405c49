"""The suite of ApiRouter on the Anthropic-compatible routes."""

from __future__ import annotations

from pegboard.conformance.api_router import ApiRouterContract


class TestAnthropic(ApiRouterContract):
    provider = "anthropic"


class TestAnthropicWithMedia(ApiRouterContract):
    provider = "anthropic"
    takes_media = True
