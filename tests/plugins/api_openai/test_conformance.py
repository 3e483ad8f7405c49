"""The suite of ApiRouter on the OpenAI-compatible routes."""

from __future__ import annotations

from pegboard.conformance.api_router import ApiRouterContract


class TestOpenAI(ApiRouterContract):
    provider = "openai"


class TestOpenAIWithMedia(ApiRouterContract):
    provider = "openai"
    takes_media = True
