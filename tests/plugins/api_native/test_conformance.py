"""The suite of ApiRouter on the native routes."""

from __future__ import annotations

from pegboard.conformance.api_router import ApiRouterContract


class TestNative(ApiRouterContract):
    provider = "native"


class TestNativeWithMedia(ApiRouterContract):
    provider = "native"
    takes_media = True
