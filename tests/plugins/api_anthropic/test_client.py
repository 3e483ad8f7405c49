"""Anthropic's own client on a scripted engine, for what a running server seldom does: being full, and failing amid an
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx2
import pytest

from pegboard.conformance.fake_client import FAILURE, SCRIPT, FakeEngineClient
from pegboard.core.interfaces.errors import InvalidRequest
from tests.plugins.api_anthropic.test_router import MESSAGES, make_app

OPTIONS: Any = {"model": "fake-model", "max_tokens": 100, "messages": MESSAGES}


def with_client(use: Callable[[anthropic.AsyncAnthropic], Awaitable[Any]], **settings: Any) -> Any:
    """What `use` makes of a client whose server has an engine of these settings."""

    async def scene() -> Any:
        transport = httpx2.ASGITransport(app=make_app(FakeEngineClient(**settings)))
        http = httpx2.AsyncClient(transport=transport)
        async with anthropic.AsyncAnthropic(
            base_url="http://test", api_key="k", http_client=http, max_retries=0
        ) as client:
            return await use(client)

    return asyncio.run(scene())


def test_a_full_queue_is_overload() -> None:
    async def use(client: anthropic.AsyncAnthropic) -> None:
        with pytest.raises(anthropic.OverloadedError) as caught:
            await client.messages.create(**OPTIONS)
        assert (caught.value.type, caught.value.error_code) == ("overloaded_error", "queue_full")
        assert caught.value.response.headers["retry-after"] == "1"

    with_client(use, refuse=InvalidRequest("12 requests wait", status=503, code="queue_full"))


def test_not_ready_is_unavailable() -> None:
    async def use(client: anthropic.AsyncAnthropic) -> None:
        with pytest.raises(anthropic.ServiceUnavailableError) as caught:
            await client.messages.create(**OPTIONS, stream=True)
        assert caught.value.error_code == "not_ready"

    with_client(use, refuse=InvalidRequest("starting", status=503, code="not_ready"))


def test_a_failure_amid_a_stream_is_raised() -> None:
    async def use(client: anthropic.AsyncAnthropic) -> None:
        read = []

        async def read_all() -> None:
            async with client.messages.stream(**OPTIONS) as stream:
                async for text in stream.text_stream:
                    read.append(text)

        with pytest.raises(anthropic.APIStatusError, match=FAILURE) as caught:
            await read_all()
        assert read == [SCRIPT[0]]
        assert caught.value.type == "api_error"
        assert caught.value.error_code == "engine_failed"

    with_client(use, fail_at=1)


def test_a_whole_stream() -> None:
    async def use(client: anthropic.AsyncAnthropic) -> None:
        async with client.messages.stream(**OPTIONS) as stream:
            final = await stream.get_final_message()
        assert await stream.get_final_text() == "".join(SCRIPT)
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", len("".join(SCRIPT)))
        assert stream.request_id

    with_client(use)
