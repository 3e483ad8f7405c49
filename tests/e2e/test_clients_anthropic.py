"""The real `anthropic` client, sync and async, against a running server. The model is random: see the other module."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from pegboard.conformance.servers import Served
from tests.e2e.clients import (
    ADMIN_KEY,
    CONTEXT,
    KEY,
    MODEL,
    Both,
    assert_balanced,
    counters,
    idle,
    tiny_model,
    tiny_server,
)

pytestmark = pytest.mark.slow

HELLO: Any = [{"role": "user", "content": "hello"}]


def asked(extra: Any = None, **changes: Any) -> Any:
    """Arguments of `create`: greedy, unless `extra`, the fields that the client has no names for, says otherwise."""
    standard = {"model": MODEL, "messages": HELLO, "max_tokens": 12}
    return {**standard, **changes, "extra_body": {"temperature": 0, **(extra or {})}}


ENDLESS: Any = asked({"ignore_eos": True}, max_tokens=CONTEXT)
"""Some seconds of work at least, if nobody stops it."""

TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "The weather in a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    {
        "name": "get_time",
        "input_schema": {
            "type": "object",
            "properties": {"utc": {"type": "boolean"}},
            "required": ["utc"],
            "additionalProperties": False,
        },
    },
]
INPUTS: Any = {"get_weather": [{"city": "Paris"}, {"city": "Rome"}], "get_time": [{"utc": True}, {"utc": False}]}


class Sky(StrEnum):
    CLEAR = "clear"
    GREY = "grey"


class Weather(BaseModel):
    """Bounded everywhere, so that a random model comes to an end of it."""

    sky: Sky
    warm: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_server(tiny_model(tmp_path_factory.mktemp("model"))) as one:
        yield one


def make(server: Served, kind: str = "sync", **settings: Any) -> Both:
    cls: Any = anthropic.Anthropic if kind == "sync" else anthropic.AsyncAnthropic
    settings = {"api_key": KEY, "max_retries": 0, "timeout": 120, **settings}
    return Both(cls(base_url=server.address, **settings))


@pytest.fixture(params=["sync", "async"])
def both(server: Served, request: pytest.FixtureRequest) -> Iterator[Both]:
    one = make(server, request.param)
    yield one
    one.close()


@pytest.fixture
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.address, api_key=KEY, max_retries=0, timeout=120) as one:
        yield one


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


# ---- messages -----------------------------------------------------------------------------------------------------


def test_messages_whole_and_streamed(both: Both) -> None:
    create = both.client.messages.create
    whole = both.wait(create(**asked(system="Be terse.")))
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", MODEL)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    assert whole._request_id
    events = both.items(create(**asked(system=[{"type": "text", "text": "Be terse."}]), stream=True))
    kinds = [one.type for one in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(one.delta.text for one in events[2:-3]) == text_of(whole)
    start, end = events[0].message.usage, events[-2].usage
    assert (
        start.input_tokens + start.cache_read_input_tokens
        == both.wait(both.client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be terse.")).input_tokens
    )
    assert start.cache_read_input_tokens > 0, "the same prompt was there before"
    assert end.output_tokens == 12
    assert events[-2].delta.stop_reason == "max_tokens"


def test_the_stream_helper(both: Both) -> None:
    whole = both.wait(both.client.messages.create(**asked()))
    with both.inside(both.client.messages.stream(**asked())) as stream:
        pieces = both.items(stream.text_stream)
        final = both.wait(stream.get_final_message())
    assert "".join(pieces) == text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) > 0


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(**asked(max_tokens=40)))
    stop = text[5:7]
    stopped = client.messages.create(**asked(max_tokens=40), stop_sequences=["never there", stop])
    assert text_of(stopped) == text[: text.index(stop)]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_that_has_begun_is_continued(server: Served, client: anthropic.Anthropic) -> None:
    begun: Any = [*HELLO, {"role": "assistant", "content": "the quick"}]
    answer = client.messages.create(**asked(messages=begun))
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe quick"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    same = httpx.post(f"{server.address}/v1/completions", json=body, headers={"x-api-key": KEY}, timeout=60).json()
    assert text_of(answer) == same["choices"][0]["text"]
    assert answer.usage.cache_read_input_tokens is not None
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == same["usage"]["prompt_tokens"]


def test_the_context_ends(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "the quick brown fox " * 100}]
    counted = client.messages.count_tokens(model=MODEL, messages=long).input_tokens
    fill: Any = [{"role": "user", "content": "the quick brown fox " * (100 * (CONTEXT - 40) // counted)}]
    answer = client.messages.create(**asked({"ignore_eos": True}, messages=fill, max_tokens=CONTEXT))
    assert answer.stop_reason == "model_context_window_exceeded"


# ---- structured outputs, tools, thinking ----------------------------------------------------------------------------


def test_parsed_answers(both: Both) -> None:
    options = asked({"temperature": 1.0}, max_tokens=500)
    parsed = both.wait(both.client.messages.parse(**options, output_format=Weather))
    assert isinstance(parsed.parsed_output, Weather)
    with both.inside(both.client.messages.stream(**options, output_format=Weather)) as stream:
        final = both.wait(stream.get_final_message())
    assert isinstance(final.parsed_output, Weather)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_time"}])
def test_calls_that_are_demanded(both: Both, choice: Any) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    for seed in range(3):
        options = asked({"temperature": 1.0, "seed": seed}, max_tokens=500, tools=TOOLS, tool_choice=choice)
        whole = both.wait(both.client.messages.create(**options))
        [call] = [block for block in whole.content if block.type == "tool_use"]
        assert call.input in INPUTS[call.name]
        assert call.name == choice.get("name", call.name)
        assert whole.stop_reason == "tool_use"
        with both.inside(both.client.messages.stream(**options)) as stream:
            both.items(stream)
            final = both.wait(stream.get_final_message())
        assert [(one.name, one.input) for one in final.content if one.type == "tool_use"] == [(call.name, call.input)]
        assert final.stop_reason == "tool_use"


def test_results_of_tools_are_read(client: anthropic.Anthropic) -> None:
    options = asked({"temperature": 1.0}, max_tokens=500, tools=TOOLS)
    first = client.messages.create(**options, tool_choice={"type": "tool", "name": "get_time"})
    [call] = [block for block in first.content if block.type == "tool_use"]
    told: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "noon"}]}
    conversation: Any = [*HELLO, {"role": "assistant", "content": first.content}, told]
    second = client.messages.create(**{**options, "messages": conversation})
    assert (second.usage.cache_read_input_tokens or 0) > 0, "the conversation so far was read before"
    counted = client.messages.count_tokens(model=MODEL, messages=conversation, tools=TOOLS).input_tokens
    assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) == counted
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.2\.content\.0\.tool_use_id"):
        client.messages.create(**{**options, "messages": [*HELLO, {"role": "assistant", "content": "Hm."}, told]})


def test_thinking(both: Both) -> None:
    options = asked({"regex": "<think>\n[a-z]{5}\n</think>\n\n[A-Z]{5}"}, max_tokens=300)
    thinking = {"type": "enabled", "budget_tokens": 100}
    whole = both.wait(both.client.messages.create(**options, thinking=thinking))
    thought, text = whole.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert thought.thinking.strip().islower()
    assert text.text.strip().isupper()
    with both.inside(both.client.messages.stream(**options, thinking=thinking)) as stream:
        final = both.wait(stream.get_final_message())
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    # Blocks go back as they came.
    conversation = [*HELLO, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "And?"}]
    assert both.wait(both.client.messages.create(**asked(messages=conversation))).content


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra": {"temperature": 1.5}}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ({"extra": {"regex": "a("}}, "regex"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "schema"),
        ({"messages": [{"role": "user", "content": "x " * CONTEXT}]}, str(CONTEXT)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(client: anthropic.Anthropic, changes: dict[str, Any], words: str, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**asked(**changes), stream=stream)
    assert caught.value.type == "invalid_request_error"
    assert words in (caught.value.api_message or "")
    assert caught.value.request_id


def test_other_errors(server: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude") as missing:
        client.messages.create(**asked(model="claude-opus"))
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        client.with_options(api_key=ADMIN_KEY).messages.batches.list()
    with pytest.raises(anthropic.APIStatusError) as large:
        client.messages.create(**asked(messages=[{"role": "user", "content": "x" * 300_000}]))
    assert (large.value.status_code, large.value.body["error"]["type"]) == (413, "request_too_large")  # type: ignore[index]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_wrong_keys(server: Served, kind: str) -> None:
    both = make(server, kind, api_key="sk-wrong")
    try:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            both.wait(both.client.messages.create(**asked()))
        assert caught.value.type == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            both.wait(both.client.messages.count_tokens(model=MODEL, messages=HELLO))
    finally:
        both.close()


# ---- leaving ------------------------------------------------------------------------------------------------------


def test_timeouts(server: Served, both: Both) -> None:
    before = idle(server)["aborted"]
    with pytest.raises(anthropic.APITimeoutError):
        both.wait(both.client.with_options(timeout=1.0).messages.create(**ENDLESS))
    assert idle(server)["aborted"] == before + 1
    assert_balanced(server)


def test_closing_a_stream_aborts(server: Served, both: Both) -> None:
    before = idle(server)
    with both.inside(both.client.messages.stream(**ENDLESS)) as stream:
        iterator = stream.text_stream
        for _ in range(3):
            both.next(iterator)
        assert counters(server)["running_requests"] == 1
    after = idle(server)
    assert after["aborted"] == before["aborted"] + 1
    assert after["generated_tokens"] - before["generated_tokens"] < CONTEXT // 2, "it ran on"
    assert_balanced(server)


def test_many_at_once(server: Served, client: anthropic.Anthropic) -> None:
    """Whatever runs beside them, answers are those that they are alone."""

    def options(i: int) -> Any:
        return asked(messages=[{"role": "user", "content": f"number {i} " * (1 + i % 7)}])

    async def scene() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.address, api_key=KEY, max_retries=0) as many:

            async def one(i: int) -> str:
                if i % 2:
                    async with many.messages.stream(**options(i)) as stream:
                        return await stream.get_final_text()
                return text_of(await many.messages.create(**options(i)))

            return await asyncio.gather(*map(one, range(16)))

    together = asyncio.run(scene())
    assert together == [text_of(client.messages.create(**options(i))) for i in range(16)]
    assert_balanced(server)
