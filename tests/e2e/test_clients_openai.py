"""The real `openai` client, sync and async, against a running server.

The model is random, so nothing here depends on what it says; whatever must be so is brought about by a grammar.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import openai
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
GREEDY: Any = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 12}
ENDLESS: Any = {"model": MODEL, "messages": HELLO, "max_tokens": CONTEXT, "extra_body": {"ignore_eos": True}}
"""Some seconds of work at least, if nobody stops it."""


class Unit(StrEnum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Weather(BaseModel):
    """Bounded everywhere, so that a random model comes to an end of it."""

    unit: Unit
    warm: bool
    sky: Unit | None


WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"utc": {"type": "boolean"}},
            "required": ["utc"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_server(tiny_model(tmp_path_factory.mktemp("model"))) as one:
        yield one


def make(server: Served, kind: str = "sync", **settings: Any) -> Both:
    cls: Any = openai.OpenAI if kind == "sync" else openai.AsyncOpenAI
    settings = {"api_key": KEY, "max_retries": 0, "timeout": 120, **settings}
    return Both(cls(base_url=f"{server.address}/v1", **settings))


@pytest.fixture(params=["sync", "async"])
def both(server: Served, request: pytest.FixtureRequest) -> Iterator[Both]:
    one = make(server, request.param)
    yield one
    one.close()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0, timeout=120) as one:
        yield one


def text_of(chunks: list[Any]) -> str:
    return "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)


# ---- models, chat and completions ---------------------------------------------------------------------------------


def test_models(both: Both) -> None:
    assert [model.id for model in both.items(both.client.models.list())] == [MODEL]
    assert both.wait(both.client.models.retrieve(MODEL)).id == MODEL


def test_chat_whole_and_streamed(both: Both) -> None:
    create = both.client.chat.completions.create
    whole = both.wait(create(**GREEDY))
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    chunks = both.items(create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [one.choices[0].finish_reason for one in chunks[:-1] if one.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_stream_helper_ends_with_the_whole_answer(both: Both) -> None:
    # The helper takes an answer that was cut off for an error.
    options = {**GREEDY, "max_tokens": 100, "extra_body": {"regex": "[a-z]{3,10}"}}
    whole = both.wait(both.client.chat.completions.create(**options))
    with both.inside(both.client.chat.completions.stream(**options)) as stream:
        events = both.items(stream)
        final = both.wait(stream.get_final_completion())
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert events[-1].type == "content.done"


def test_several_answers(client: openai.OpenAI) -> None:
    options = {**GREEDY, "temperature": 1.0, "n": 3, "seed": 7}
    first, again = (client.chat.completions.create(**options) for _ in range(2))
    texts = [one.message.content for one in first.choices]
    assert [one.index for one in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [one.message.content for one in again.choices]
    chunks = list(client.chat.completions.create(**options, stream=True))
    for index, text in enumerate(texts):
        pieces = [one.choices[0].delta.content or "" for one in chunks if one.choices[0].index == index]
        assert "".join(pieces) == text


def test_chat_logprobs(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    assert len(entries) == 12
    for entry in entries:
        assert [one.logprob for one in entry.top_logprobs] == sorted(one.logprob for one in entry.top_logprobs)[::-1]
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert sum(math.exp(one.logprob) for one in entry.top_logprobs) < 1.0
    streamed = [
        entry
        for chunk in client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [one.token for one in streamed] == [one.token for one in entries]


def test_completions(both: Both) -> None:
    create = both.client.completions.create
    options: Any = {"model": MODEL, "prompt": "the quick", "max_tokens": 6, "temperature": 0}
    whole = both.wait(create(**options, logprobs=2, echo=False))
    assert len(whole.choices[0].logprobs.tokens) == 6
    assert all(len(one) == 2 for one in whole.choices[0].logprobs.top_logprobs)
    assert "".join(one.choices[0].text for one in both.items(create(**options, stream=True))) == whole.choices[0].text
    assert both.wait(create(**options, echo=True)).choices[0].text == "the quick" + whole.choices[0].text
    several = both.wait(create(**{**options, "prompt": ["the quick", "one two"]}))
    assert [one.index for one in several.choices] == [0, 1]
    assert several.choices[0].text == whole.choices[0].text


def test_stop_strings(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(**{**GREEDY, "max_tokens": 40}).choices[0].message.content or ""
    stop = text[5:7]
    stopped = client.chat.completions.create(**{**GREEDY, "max_tokens": 40}, stop=[stop])
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


# ---- structured outputs --------------------------------------------------------------------------------------------


def test_parsed_answers(both: Both) -> None:
    options = {**GREEDY, "temperature": 1.0, "max_tokens": 500, "seed": 1}
    parsed = both.wait(both.client.chat.completions.parse(**options, response_format=Weather))
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    assert parsed.choices[0].finish_reason == "stop"
    with both.inside(both.client.chat.completions.stream(**options, response_format=Weather)) as stream:
        both.items(stream)
        final = both.wait(stream.get_final_completion())
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed


def test_several_parsed_answers(client: openai.OpenAI) -> None:
    options = {**GREEDY, "temperature": 1.0, "max_tokens": 500}
    parsed = client.chat.completions.parse(**options, response_format=Weather, n=4)
    assert all(isinstance(choice.message.parsed, Weather) for choice in parsed.choices)


def test_any_json(client: openai.OpenAI) -> None:
    options = {**GREEDY, "temperature": 1.0, "max_tokens": 1500, "stop": ["}"], "extra_body": {"no_stop_trim": True}}
    answer = client.chat.completions.create(**options, response_format={"type": "json_object"})
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")


# ---- tools --------------------------------------------------------------------------------------------------------

TOOLS: Any = [WEATHER_TOOL, TIME_TOOL]
CHECKS: dict[str, Any] = {
    "get_weather": lambda one: one["city"] in ("Paris", "Rome") and one["unit"] in ("celsius", "fahrenheit"),
    "get_time": lambda one: isinstance(one["utc"], bool),
}


def assert_call(name: str, arguments: str) -> None:
    """Arguments that the function's schema allows."""
    assert CHECKS[name](json.loads(arguments)), arguments


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ],
)
def test_calls_that_are_demanded(both: Both, choice: Any, names: set[str]) -> None:
    create = both.client.chat.completions.create
    options = {**GREEDY, "temperature": 1.0, "max_tokens": 500, "tools": TOOLS, "tool_choice": choice}
    options = {**options, "parallel_tool_calls": False}
    for seed in range(3):
        answer = both.wait(create(**options, seed=seed))
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name in names
        assert_call(call.function.name, call.function.arguments)
        assert answer.choices[0].finish_reason == "tool_calls"
        chunks = both.items(create(**options, seed=seed, stream=True))
        deltas = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
        assert {one.index for one in deltas} == {0}
        assert [one.id for one in deltas if one.id] == [deltas[0].id]
        assert deltas[0].function.name == call.function.name
        assert "".join(one.function.arguments or "" for one in deltas) == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_calls_that_are_parsed(both: Both) -> None:
    class get_time(BaseModel):  # noqa: N801 - the class's name is the function's
        utc: bool

    tools = [openai.pydantic_function_tool(get_time)]
    options = {**GREEDY, "temperature": 1.0, "max_tokens": 500, "tools": tools, "parallel_tool_calls": False}
    answer = both.wait(both.client.chat.completions.parse(**options, tool_choice="required"))
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, get_time)


def test_results_of_tools_are_read(client: openai.OpenAI) -> None:
    options = {**GREEDY, "temperature": 1.0, "max_tokens": 500, "tools": TOOLS}
    first = client.chat.completions.create(**options, tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    assert message.tool_calls
    told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    second = client.chat.completions.create(**{**options, "messages": [*HELLO, message, told]})
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens


def test_thinking_is_told_apart(both: Both) -> None:
    options = {**GREEDY, "max_tokens": 300}
    options["extra_body"] = {"regex": "<think>\n[a-z]{5}\n</think>\n\n[A-Z]{5}"}
    message = both.wait(both.client.chat.completions.create(**options)).choices[0].message
    assert message.content.strip().isupper()
    assert message.reasoning_content.strip().islower()
    chunks = both.items(both.client.chat.completions.create(**options, stream=True))
    deltas = [one.choices[0].delta for one in chunks]
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in deltas) == message.reasoning_content
    assert text_of(chunks) == message.content


# ---- embeddings ---------------------------------------------------------------------------------------------------


def test_embeddings(both: Both) -> None:
    create = both.client.embeddings.create
    texts = ["the quick brown fox", "one two three", "the quick brown fox"]
    packed = both.wait(create(model=MODEL, input=texts))
    plain = both.wait(create(model=MODEL, input=texts, encoding_format="float"))
    assert [one.index for one in packed.data] == [0, 1, 2]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(value * value for value in one.embedding) == pytest.approx(1.0, abs=1e-5)
    assert packed.data[0].embedding == pytest.approx(packed.data[2].embedding, abs=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0
    short = both.wait(create(model=MODEL, input="the quick brown fox", dimensions=8))
    assert len(short.data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError) as caught:
        both.wait(create(model=MODEL, input=""))
    assert caught.value.param == "input"


# ---- responses ----------------------------------------------------------------------------------------------------


def test_responses(both: Both) -> None:
    options: Any = {"model": MODEL, "input": "hello", "temperature": 0, "max_output_tokens": 12}
    whole = both.wait(both.client.responses.create(**options, instructions="Be terse."))
    assert whole.output_text
    assert whole.usage.output_tokens == 12
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = both.items(both.client.responses.create(**options, instructions="Be terse.", stream=True))
    assert events[0].type == "response.created"
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert [one.sequence_number for one in events] == list(range(len(events)))


def test_parsed_responses(both: Both) -> None:
    options: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 500}
    parsed = both.wait(both.client.responses.parse(**options, text_format=Weather))
    assert isinstance(parsed.output_parsed, Weather)
    assert parsed.status == "completed"
    with both.inside(both.client.responses.stream(**options, text_format=Weather)) as stream:
        both.items(stream)
        assert isinstance(both.wait(stream.get_final_response()).output_parsed, Weather)


def test_responses_call_tools(both: Both) -> None:
    tools = [{"type": "function", "strict": True, **one["function"]} for one in TOOLS]
    options: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 500, "tools": tools}
    answer = both.wait(both.client.responses.create(**options, tool_choice="required", parallel_tool_calls=False))
    [call] = [one for one in answer.output if one.type == "function_call"]
    assert_call(call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    told = {**options, "input": [{"role": "user", "content": "hello"}, call.to_dict(), result]}
    assert both.wait(both.client.responses.create(**told)).usage.input_tokens > answer.usage.input_tokens


def test_responses_are_told_again(both: Both) -> None:
    responses = both.client.responses
    options: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 12, "temperature": 0}
    events = both.items(responses.create(**options, stream=True))
    identity = events[-1].response.id
    assert both.items(responses.retrieve(identity, stream=True)) == events
    assert both.items(responses.retrieve(identity, stream=True, starting_after=6)) == events[7:]
    [item] = both.items(responses.input_items.list(identity))
    assert (item.role, item.content[0].text) == ("user", "hello")
    counted = both.wait(responses.input_tokens.count(model=MODEL, input="hello"))
    assert counted.input_tokens == events[-1].response.usage.input_tokens
    referring: Any = [{"type": "item_reference", "id": one} for one in (item.id, events[-1].response.output[0].id)]
    again = both.wait(responses.create(**{**options, "input": referring}))
    following = both.wait(responses.create(**{**options, "input": "."}, previous_response_id=identity))
    assert counted.input_tokens + 12 < again.usage.input_tokens < following.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="Item with id 'msg_1' not found"):
        both.wait(responses.create(**{**options, "input": [{"type": "item_reference", "id": "msg_1"}]}))


def test_custom_tools(both: Both) -> None:
    tools: Any = [{"type": "custom", "name": "run", "description": "Runs code"}]
    forced = {"tools": tools, "tool_choice": {"type": "custom", "name": "run"}}
    options: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 60, "temperature": 0, **forced}
    events = both.items(both.client.responses.create(**options, stream=True))
    [found] = events[-1].response.output
    assert (found.type, found.name) == ("custom_tool_call", "run")
    assert found.input
    deltas = [one.delta for one in events if one.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == found.input
    result = {"type": "custom_tool_call_output", "call_id": found.call_id, "output": "1"}
    said: Any = [{"role": "user", "content": "hello"}, found.to_dict(), result]
    answer = both.wait(both.client.responses.create(model=MODEL, input=said, tools=tools, max_output_tokens=5))
    assert answer.usage.input_tokens > events[-1].response.usage.input_tokens


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": 1000}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"extra_body": {"top_k": "many"}}, "top_k"),
        ({"extra_body": {"regex": "a(", "temperature": 0}}, None),
        ({"extra_body": {"regex": "a", "ebnf": 'root ::= "a"'}}, None),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]}, None),
        ({"tools": [WEATHER_TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(client: openai.OpenAI, changes: dict[str, Any], param: str | None, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**GREEDY, **changes}, stream=stream)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param
    assert param is None or caught.value.param == param


def test_what_does_not_exist(both: Both) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-5") as caught:
        both.wait(both.client.chat.completions.create(**{**GREEDY, "model": "gpt-5"}))
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        both.wait(both.client.models.retrieve("gpt-5"))
    # What the server does not offer is for admins as far as keys go.
    with pytest.raises(openai.NotFoundError, match="/v1/images/generations"):
        both.wait(both.client.with_options(api_key=ADMIN_KEY).images.generate(prompt="a cat"))


def test_too_much_to_read(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)) as caught:
        client.chat.completions.create(**{**GREEDY, "messages": [{"role": "user", "content": "x " * CONTEXT}]})
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as large:
        client.chat.completions.create(**{**GREEDY, "messages": [{"role": "user", "content": "x" * 300_000}]})
    assert large.value.status_code == 413


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_wrong_keys(server: Served, kind: str) -> None:
    both = make(server, kind, api_key="sk-wrong")
    try:
        with pytest.raises(openai.AuthenticationError):
            both.wait(both.client.chat.completions.create(**GREEDY))
        with pytest.raises(openai.AuthenticationError):
            both.items(both.client.chat.completions.create(**GREEDY, stream=True))
    finally:
        both.close()


def test_a_users_key_is_no_admins(server: Served, client: openai.OpenAI) -> None:
    address = f"{server.address}/flush_cache"
    with pytest.raises(openai.PermissionDeniedError):
        client.post(address, cast_to=object)
    idle(server)
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=ADMIN_KEY, max_retries=0) as admin:
        assert admin.chat.completions.create(**GREEDY).choices
        idle(server)
        admin.post(address, cast_to=object)


# ---- leaving ------------------------------------------------------------------------------------------------------


def test_timeouts(server: Served, both: Both) -> None:
    before = counters(server)["aborted"]
    with pytest.raises(openai.APITimeoutError):
        both.wait(both.client.with_options(timeout=1.0).chat.completions.create(**ENDLESS))
    assert idle(server)["aborted"] == before + 1
    assert_balanced(server)


def test_closing_a_stream_aborts(server: Served, both: Both) -> None:
    before = idle(server)
    stream = both.wait(both.client.chat.completions.create(**ENDLESS, stream=True))
    iterator = stream.__aiter__() if hasattr(stream, "__aiter__") else iter(stream)
    for _ in range(3):
        both.next(iterator)
    assert counters(server)["running_requests"] == 1
    both.wait(stream.close())
    after = idle(server)
    assert after["aborted"] == before["aborted"] + 1
    assert after["generated_tokens"] - before["generated_tokens"] < CONTEXT // 2, "it ran on"
    assert_balanced(server)


def test_cancelled_tasks_abort(server: Served) -> None:
    before = idle(server)["aborted"]

    async def scene() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:
            tasks = [asyncio.ensure_future(client.chat.completions.create(**ENDLESS)) for _ in range(4)]
            while (await asyncio.to_thread(counters, server))["running_requests"] < 4:
                pass
            for task in tasks[:3]:
                task.cancel()
            await asyncio.wait(tasks[:3])
            while (await asyncio.to_thread(counters, server))["running_requests"] > 1:
                pass
            assert not tasks[3].done()
            tasks[3].cancel()

    asyncio.run(scene())
    assert idle(server)["aborted"] == before + 4
    assert_balanced(server)


def test_many_at_once(server: Served, client: openai.OpenAI) -> None:
    """Whatever runs beside them, answers are those that they are alone."""
    prompts = [f"number {i} " * (1 + i % 7) for i in range(24)]

    def options(i: int) -> Any:
        return {**GREEDY, "messages": [{"role": "user", "content": prompts[i]}]}

    async def scene() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as many:

            async def one(i: int) -> str:
                if i % 2:
                    return text_of(
                        [chunk async for chunk in await many.chat.completions.create(**options(i), stream=True)]
                    )
                return (await many.chat.completions.create(**options(i))).choices[0].message.content or ""

            return await asyncio.gather(*map(one, range(len(prompts))))

    together = asyncio.run(scene())
    alone = [client.chat.completions.create(**options(i)).choices[0].message.content for i in range(len(prompts))]
    assert together == alone
    assert_balanced(server)
