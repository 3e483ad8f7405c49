"""Agents' loops with the real clients: a model that was taught to think, to say something, to call two tools at once,
and to answer when it has their results, of its own accord and without any grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic import beta_tool

from pegboard.conformance.servers import Served
from tests.e2e.clients import KEY, MODEL, Both, assert_balanced, teach, tiny_model, tiny_server

pytestmark = pytest.mark.slow

THOUGHT, WORDS, END = "Two calls.", "Let me look.", "It is sunny, and noon."
CALLS: dict[str, dict[str, Any]] = {"get_weather": {"city": "Rome"}, "get_time": {"utc": True}}
RESULTS = {"get_weather": "sunny", "get_time": "noon"}
QUESTION: Any = [{"role": "user", "content": "What weather, what time?"}]
TURN = "<|im_end|>\n<|im_start|>assistant\n"
LESSONS = {
    f"<|im_start|>user\n{QUESTION[0]['content']}{TURN}": f"<think>\n{THOUGHT}\n</think>\n\n{WORDS}"
    + "".join(
        f'\n<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in CALLS.items()
    )
    + "<|im_end|>",
    f"<tool_response>\n{RESULTS['get_time']}\n</tool_response>{TURN}": f"{END}<|im_end|>",
}
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "get_time": {
        "type": "object",
        "properties": {"utc": {"type": "boolean"}},
        "required": ["utc"],
        "additionalProperties": False,
    },
}
STRICT = [False, True]
"""Whether calls have to fit their schemas, by a grammar that begins where a call does."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    teach(model, LESSONS)
    with tiny_server(model) as one:
        yield one
        assert_balanced(one)


@pytest.fixture(params=["sync", "async"])
def chat(server: Served, request: pytest.FixtureRequest) -> Iterator[Both]:
    cls: Any = openai.OpenAI if request.param == "sync" else openai.AsyncOpenAI
    both = Both(cls(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0, timeout=120))
    yield both
    both.close()


@pytest.fixture(params=["sync", "async"])
def claude(server: Served, request: pytest.FixtureRequest) -> Iterator[Both]:
    cls: Any = anthropic.Anthropic if request.param == "sync" else anthropic.AsyncAnthropic
    both = Both(cls(base_url=server.address, api_key=KEY, max_retries=0, timeout=120))
    yield both
    both.close()


# ---- chat completions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", STRICT)
def test_chat_completions(chat: Both, strict: bool) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]
    options: Any = {"model": MODEL, "temperature": 0, "max_tokens": 400, "tools": tools}
    create = chat.client.chat.completions.create
    choice = chat.wait(create(**options, messages=QUESTION)).choices[0]
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert (message.content.strip(), message.reasoning_content.strip()) == (WORDS, THOUGHT)
    assert {one.function.name: json.loads(one.function.arguments) for one in message.tool_calls} == CALLS

    chunks = chat.items(create(**options, messages=QUESTION, stream=True))
    deltas = [one.choices[0].delta for one in chunks]
    assert "".join(one.content or "" for one in deltas) == message.content
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in deltas) == message.reasoning_content
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for call in (call for one in deltas for call in one.tool_calls or []):
        names[call.index] = names.get(call.index, "") + (call.function.name or "")
        arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert {names[i]: json.loads(arguments[i]) for i in names} == CALLS
    assert sum(bool(one.tool_calls) for one in deltas) > 4, "arguments come as they are written"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    told = [
        {"role": "tool", "tool_call_id": one.id, "content": RESULTS[one.function.name]} for one in message.tool_calls
    ]
    last = chat.wait(create(**options, messages=[*QUESTION, message, *told])).choices[0]
    assert (last.message.content, last.message.tool_calls, last.finish_reason) == (END, None, "stop")


def test_one_call_at_a_time(chat: Both) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in SCHEMAS.items()]
    options: Any = {"model": MODEL, "temperature": 0, "max_tokens": 400, "tools": tools, "messages": QUESTION}
    choice = chat.wait(chat.client.chat.completions.create(**options, parallel_tool_calls=False)).choices[0]
    assert [one.function.name for one in choice.message.tool_calls] == ["get_weather"]
    silent = chat.wait(chat.client.chat.completions.create(**options, tool_choice="none")).choices[0]
    assert silent.message.tool_calls is None
    assert silent.finish_reason == "stop"
    assert silent.message.content.count("<tool_call>") == 2


# ---- responses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", STRICT)
def test_responses(chat: Both, strict: bool) -> None:
    tools = [
        {"type": "function", "name": name, "parameters": schema, "strict": strict} for name, schema in SCHEMAS.items()
    ]
    options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 400, "tools": tools}
    create = chat.client.responses.create
    first = chat.wait(create(**options, input=QUESTION))
    assert first.status == "completed"
    assert first.output_text.strip() == WORDS
    calls = [one for one in first.output if one.type == "function_call"]
    assert {one.name: json.loads(one.arguments) for one in calls} == CALLS

    events = chat.items(create(**options, input=QUESTION, stream=True))
    done = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert [json.loads(one.arguments) for one in done] == list(CALLS.values())
    assert events[-1].type == "response.completed"
    assert [one.type for one in events[-1].response.output] == [one.type for one in first.output]

    results = [{"type": "function_call_output", "call_id": one.call_id, "output": RESULTS[one.name]} for one in calls]
    stateless = chat.wait(create(**options, input=[*QUESTION, *first.output, *results]))
    assert stateless.output_text == END
    stateful = chat.wait(create(**options, input=results, previous_response_id=first.id))
    assert stateful.output_text == END
    references = [{"type": "item_reference", "id": one.id} for one in first.output]
    assert chat.wait(create(**options, input=[*QUESTION, *references, *results])).output_text == END


# ---- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", STRICT)
def test_messages(claude: Both, strict: bool) -> None:
    tools = [{"name": name, "input_schema": schema, "strict": strict} for name, schema in SCHEMAS.items()]
    options: Any = {"model": MODEL, "max_tokens": 400, "tools": tools, "extra_body": {"temperature": 0}}
    first = claude.wait(claude.client.messages.create(**options, messages=QUESTION))
    assert first.stop_reason == "tool_use"
    thought, words, *calls = first.content
    assert (thought.thinking.strip(), words.text.strip()) == (THOUGHT, WORDS)
    assert {one.name: one.input for one in calls} == CALLS

    with claude.inside(claude.client.messages.stream(**options, messages=QUESTION)) as stream:
        events = claude.items(stream)
        final = claude.wait(stream.get_final_message())
    assert [{**one.to_dict(), "id": ""} for one in final.content] == [
        {**one.to_dict(), "id": ""} for one in first.content
    ]
    assert sum(one.type == "input_json" for one in events) > 4, "arguments come as they are written"

    results = [{"type": "tool_result", "tool_use_id": one.id, "content": RESULTS[one.name]} for one in calls]
    conversation = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = claude.wait(claude.client.messages.create(**options, messages=conversation))
    assert [one.to_dict() for one in last.content] == [{"type": "text", "text": END}]
    assert last.stop_reason == "end_turn"


def test_the_tool_runner(server: Served) -> None:
    """Anthropic's own loop: it calls Python functions, and goes on until nothing is to be called any more."""
    called = []

    @beta_tool
    def get_weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        called.append(("city", city))
        return "sunny"

    @beta_tool
    def get_time(utc: bool) -> str:
        """The time.

        Args:
            utc: Whether there.
        """
        called.append(("utc", str(utc)))
        return "noon"

    with anthropic.Anthropic(base_url=server.address, api_key=KEY, max_retries=0, timeout=120) as client:
        runner = client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=400,
            tools=[get_weather, get_time],
            messages=QUESTION,
            extra_body={"temperature": 0},
        )
        last = runner.until_done()
    assert called == [("city", "Rome"), ("utc", "True")]
    assert [one.text for one in last.content if one.type == "text"] == [END]
