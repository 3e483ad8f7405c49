"""Images in messages and in results of tools, by Anthropic's own client, on a scripted engine that reads toy media."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx2
import pytest

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import SCRIPT, FakeEngineClient, FakeTokenizer
from pegboard.conformance.rig.fake_media import fake_processor
from pegboard.toolkit.media.inputs import MediaPrompt
from tests.plugins.api_anthropic.test_router import COUNT, PATH, TOOL, make_app
from tests.toolkit.chat.media_chats import encoded, picture
from tests.toolkit.chat.templates import TOOLS_AND_PARTS

TEXT = "".join(SCRIPT)
WEB = {"https://example.org/1": picture(1)}
PAD = "\U0010f000" + chr(0x10F001) * 6 + "\U0010f000"
USE = {"type": "tool_use", "id": "t", "name": "add", "input": {}}


def engine() -> FakeEngineClient:
    return FakeEngineClient(tokenizer=FakeTokenizer(template=TOOLS_AND_PARTS), media=fake_processor(), web=WEB)


def image(number: int, media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": encoded(number)}
    return {"type": "image", "source": source}


def at(url: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def with_client(use: Callable[[Any], Awaitable[Any]]) -> FakeEngineClient:
    """Let Anthropic's client ask an engine, which is returned."""

    async def scene() -> FakeEngineClient:
        client = engine()
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=make_app(client, parsers=True)))
        async with anthropic.AsyncAnthropic(
            base_url="http://t", api_key="k", http_client=http, max_retries=0
        ) as asking:
            await use(asking)
        return client

    return asyncio.run(scene())


def answered(*messages: Any, **more: Any) -> FakeEngineClient:
    """The engine that has answered these messages, whose tokens were counted before."""

    async def use(client: Any) -> None:
        asked = {"model": "fake-model", "messages": messages, **more}
        count = await client.messages.count_tokens(**asked)
        answer = await client.messages.create(max_tokens=50, **asked)
        assert answer.content[-1].text == TEXT
        usage = answer.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens
        async with client.messages.stream(max_tokens=50, **asked) as stream:
            assert await stream.get_final_text() == TEXT

    client = with_client(use)
    assert client.laid_out[0].text == client.laid_out[1].text == client.laid_out[2].text
    return client


def test_images_by_base64_and_by_address() -> None:
    client = answered(user(text("One"), image(0, "image/jpeg"), text("and"), at("https://example.org/1"), text("?")))
    assert client.laid_out[0].data == (picture(0), picture(1))
    assert f"user\nOne{PAD}and{PAD}?<|im_end|>" in client.laid_out[0].text
    prompt = client.requests[0].prompt
    assert isinstance(prompt, MediaPrompt)
    assert [one.place for one in prompt.media] == ["messages.0.content.1.source", "messages.0.content.3.source.url"]


def test_texts_side_by_side_have_a_line_break_and_images_have_none() -> None:
    client = answered(user(text("a"), text("b"), image(1)), user(image(2), text("c")), {"role": "user", "content": "d"})
    assert f"user\na\nb{PAD}{PAD}c\nd<|im_end|>" in client.laid_out[0].text


@pytest.mark.parametrize(("failed", "shown"), [(False, f"{PAD}a\nb{PAD}"), (True, f"Error:{PAD}a\nb{PAD}")])
def test_images_in_results_of_tools(failed: bool, shown: str) -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "is_error": failed,
        "content": [image(1), text("a"), text("b"), image(2)],
    }
    client = answered(
        user(text("Look")), {"role": "assistant", "content": [USE]}, user(result, text("So?")), tools=[TOOL]
    )
    assert f"<tool_response>add\n{shown}\n</tool_response>" in client.laid_out[0].text
    assert client.laid_out[0].data == (picture(1), picture(2))


def test_a_text_that_spells_a_token_stays_text() -> None:
    thinking = {"type": "thinking", "thinking": "<|media|>", "signature": "x"}
    client = answered(
        user(text("<|image|>"), image(1)),
        {"role": "assistant", "content": [thinking, text("<|video|>")]},
        user({"type": "document", "source": {"type": "text", "data": "<|image|>"}, "title": "<|video|>"}),
        system="<|image|>",
        tools=[{**TOOL, "description": "<|image|>"}],
    )
    prompt = client.requests[0].prompt
    assert isinstance(prompt, MediaPrompt)
    assert len(prompt.literals) == 7
    assert client.laid_out[0].data == (picture(1),)
    assert client.laid_out[0].tokens == {"image": 6}


@pytest.mark.parametrize(
    ("block", "param", "said"),
    [
        ({"type": "image"}, "source", "must be an object"),
        ({"type": "image", "source": {"type": "x"}}, "source.type", "must be base64 or url"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "source.type", "this server keeps no files"),
        (image(1, "image/tiff"), "source.media_type", "one of image/jpeg, image/png, image/gif, image/webp"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, "source.data", "must be base64"),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "%"}},
            "source",
            "not base64",
        ),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
            "source",
            "not a pict",
        ),
        (at("ftp://x"), "source.url", "must begin with data:"),
        (at("https://example.org/404"), "source.url", "cannot be fetched"),
        (
            {**image(1), "transformations": {"oversized_image": "error"}},
            "transformations.oversized_image",
            "makes large images smaller",
        ),
    ],
)
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_errors_name_the_place(path: str, block: dict[str, Any], param: str, said: str) -> None:
    async def scene() -> Any:
        body = {"model": "fake-model", "messages": [user(text("a"), block)]}
        return await call(make_app(engine()), "POST", path, {**body, **({"max_tokens": 5} if path == PATH else {})})

    done = asyncio.run(scene())
    assert done.status == 400, done.body
    error = done.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"]["param"] == f"messages.0.content.1.{param}"
    assert f"messages.0.content.1.{param}" in error["message"]
    assert said in error["message"]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"system": [image(1)], "messages": [user(text("a"))]}, "system.0"),
        ({"messages": [user(text("a")), {"role": "assistant", "content": [image(1)]}]}, "messages.1.content.0"),
        (
            {"messages": [user({"type": "document", "source": {"type": "content", "content": [image(1)]}})]},
            "messages.0.content.0.source.content.0",
        ),
    ],
)
def test_images_have_no_other_place(body: dict[str, Any], place: str) -> None:
    done = asyncio.run(call(make_app(engine()), "POST", PATH, {"model": "fake-model", "max_tokens": 5, **body}))
    assert done.status == 400
    error = done.json()["error"]
    assert error["details"] == {"error_code": "unsupported", "param": place}
    assert "images stand in messages of the user and in results of tools" in error["message"]
