"""Tools beside a format of the answer, with the real clients: a model that was taught to call and then to talk on, or
to answer in JSON. Which of them it wants to do depends on the question; what comes of it, on the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from pegboard.conformance.servers import Served
from tests.e2e.clients import KEY, MODEL, assert_balanced, teach, tiny_model, tiny_server

pytestmark = pytest.mark.slow

CALLS, ANSWERS = "Tick, tock, tick, tock: 12?", "Yes or no, yes or no, yes"
CALL: dict[str, Any] = {"utc": True}
ANSWER = {"answer": "<tool_call>", "sure": True}
TURN = "<|im_end|>\n<|im_start|>assistant\n"
LESSONS = {
    f"{CALLS}{TURN}": f'<tool_call>\n{{"name": "get_time", "arguments": {json.dumps(CALL)}}}\n</tool_call>\n'
    "It is noon.<|im_end|>",
    f"{ANSWERS}{TURN}": f"{json.dumps(ANSWER)}<|im_end|>",
}
PARAMETERS = {
    "type": "object",
    "properties": {"utc": {"type": "boolean"}},
    "required": ["utc"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["<tool_call>", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
FORM = {"name": "answer", "strict": True, "schema": SCHEMA}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    teach(model, LESSONS)
    with tiny_server(model) as one:
        yield one
        assert_balanced(one)


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0, timeout=120) as one:
        yield one


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_chat_completions(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}]
    form = {"type": "json_schema", "json_schema": FORM}

    def create(text: str, **more: Any) -> tuple[str, Any, list[Any]]:
        options: Any = {"model": MODEL, "messages": asked(text), "tools": tools, "temperature": 0, "max_tokens": 200}
        options |= {"response_format": form, "parallel_tool_calls": False, **more}
        choice = client.chat.completions.create(**options).choices[0]
        chunks = [one.choices[0] for one in client.chat.completions.create(**options, stream=True)]
        assert "".join(one.delta.content or "" for one in chunks) == (choice.message.content or "")
        assert chunks[-1].finish_reason == choice.finish_reason
        calls = [json.loads(one.function.arguments) for one in choice.message.tool_calls or []]
        parts = [one.function.arguments or "" for chunk in chunks for one in chunk.delta.tool_calls or []]
        assert ("".join(parts) != "") == bool(calls)
        return choice.finish_reason, choice.message.content, calls

    assert create(CALLS) == ("tool_calls", None, [CALL])
    reason, content, calls = create(ANSWERS)
    assert (reason, json.loads(content), calls) == ("stop", ANSWER, [])
    named = {"type": "function", "function": {"name": "get_time"}}
    for choice in ("required", named):
        for text in (CALLS, ANSWERS):
            reason, content, calls = create(text, tool_choice=choice)
            assert (reason, content) == ("tool_calls", None)
            assert [list(one) for one in calls] == [["utc"]]
    # It would talk on behind the call, but may not: without a format either, nor where several calls are allowed.
    plain = {"type": "text"}
    assert create(CALLS, tool_choice="required", response_format=plain) == ("tool_calls", None, [CALL])
    _, content, calls = create(CALLS, tool_choice="required", response_format=plain, parallel_tool_calls=True)
    assert calls[0] == CALL
    assert "noon" not in (content or ""), "at most a marker that was cut off"
    reason, content, calls = create(CALLS, tool_choice="none")
    assert (reason, list(json.loads(content)), calls) == ("stop", ["answer", "sure"], [])


def test_responses(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "name": "get_time", "parameters": PARAMETERS, "strict": True}]
    options: Any = {"model": MODEL, "tools": tools, "temperature": 0, "max_output_tokens": 200}
    options |= {"text": {"format": {"type": "json_schema", **FORM}}, "parallel_tool_calls": False}
    for more in ({}, {"tool_choice": "required"}):
        [call] = client.responses.create(input=asked(CALLS), **options, **more).output  # type: ignore[call-overload]
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_time", CALL)
    events = list(client.responses.create(input=asked(ANSWERS), **options, stream=True))
    assert json.loads(events[-1].response.output_text) == ANSWER
    assert [one.type for one in events[-1].response.output] == ["message"]


def test_messages(server: Served) -> None:
    tools: list[Any] = [{"name": "get_time", "input_schema": PARAMETERS}]
    options: Any = {"model": MODEL, "tools": tools, "max_tokens": 200, "extra_body": {"temperature": 0}}
    options["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    with anthropic.Anthropic(base_url=server.address, api_key=KEY, max_retries=0, timeout=120) as claude:
        for kind in ("auto", "any"):
            options["tool_choice"] = {"type": kind, "disable_parallel_tool_use": True}
            found = claude.messages.create(messages=asked(CALLS), **options)
            [call] = found.content
            assert (found.stop_reason, call.type, call.input) == ("tool_use", "tool_use", CALL)
        options["tool_choice"] = {"type": "auto"}
        with claude.messages.stream(messages=asked(ANSWERS), **options) as stream:
            final = stream.get_final_message()
        [text] = final.content
        assert (final.stop_reason, json.loads(text.text)) == ("end_turn", ANSWER)  # type: ignore[union-attr]
