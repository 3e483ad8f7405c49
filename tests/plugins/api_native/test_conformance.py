"""The suite of ApiRouter on the native routes."""

from __future__ import annotations

from pegboard.core.testing.api_router import ApiRouterContract


class TestNative(ApiRouterContract):
    provider = "native"
