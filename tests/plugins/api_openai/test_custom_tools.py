"""Custom tools of /v1/responses, and `allowed_tools`. Answers and events are read by OpenAI's own types, strictly."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.api_openai.responses.custom import InputReader
from tests.plugins.api_anthropic.parsers import fake_parsers
from tests.plugins.api_openai.asking import CHAT, MESSAGES, FakeTokenizer, make_app, post, refused
from tests.plugins.api_openai.test_responses import PATH, TOOL, create, prompt_of, stream, told

CODE = 'print("é\\n")\n\t😀 </x>'
RUN = {"type": "custom", "name": "run", "description": "Runs Python"}
ADD = {"type": "function", "function": {"name": "add"}}
NOW = {"type": "function", "function": {"name": "now"}}
SHOW_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"


def calling(arguments: str) -> dict[str, Any]:
    return {"script": (f"Well [[run|{arguments}", "]]"), "context": fake_parsers()}


# ---- custom tools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ascii_only", [True, False])
def test_custom_calls(ascii_only: bool) -> None:
    arguments = json.dumps({"input": CODE}, ensure_ascii=ascii_only)
    body, client = create(tools=[RUN, TOOL], **calling(arguments))
    assert body["tools"][0] == {**RUN, "format": {"type": "text"}}
    found = body["output"][1]
    assert found | {"id": "", "call_id": ""} == {
        "id": "",
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "",
        "name": "run",
        "input": CODE,
    }
    assert client.requests[0].sampling.skip_special_tokens is False
    events = stream(body={"tools": [RUN, TOOL]}, **calling(arguments))
    own = [one for one in events if one.get("output_index") == 1]
    assert own[0]["item"]["input"] == ""
    deltas = [one["delta"] for one in own if one["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == CODE
    assert own[-2]["type"] == "response.custom_tool_call_input.done"
    assert own[-2]["input"] == own[-1]["item"]["input"] == CODE


def test_custom_calls_go_back_to_the_model() -> None:
    template = (
        "{% for one in messages %}{{ one.role }}:{{ one.content }}{% for call in one.tool_calls %}"
        "{{ call.function.name }}({{ call.function.arguments.input }}){% endfor %};{% endfor %}"
    )

    async def scene() -> None:
        client = FakeEngineClient(tokenizer=FakeTokenizer(template=template), **_script(json.dumps({"input": CODE})))
        app = make_app(client, **fake_parsers())
        first = await told(app, tools=[RUN])
        found = first["output"][1]
        output = {"type": "custom_tool_call_output", "call_id": found["call_id"], "output": "1"}
        for items in ([found, output], [{"id": found["id"]}, output]):
            await told(app, input=items, tools=[RUN])
            assert prompt_of(client) == f"assistant:run({CODE});tool:1;"
        await told(app, input=[output], tools=[RUN], previous_response_id=first["id"])
        assert prompt_of(client).endswith(f"assistant:Well run({CODE});tool:1;")

    asyncio.run(scene())


def _script(arguments: str) -> dict[str, Any]:
    return {"script": calling(arguments)["script"]}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"code": "a"}', '{"code": "a"}'),
        ('{"code": 1, "input": "a"}', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "a", "more": 1}', "a"),
        ("{}", "{}"),
        ('{"input": ""}', ""),
        ('{ "input" : "a"', "a"),
        ('{"input": "a\\ud83d b\\ude00"}', "a\ufffd b\ufffd"),
        ('{"input": "\\ud83d b"}', "\ufffd b"),
        ('{"input": "\\ud83d\\n"}', "\ufffd\n"),
        ('{"input": "\\u1"}', "\\u1"),
        ('{"input": "\\q"}', "\\q"),
        ('{"input": "a\\u00', "a"),
        (" " * 200 + '{"input": "a"}', "a"),
        pytest.param("[" * 200_000, "[" * 200_000, id="deep"),
    ],
)
def test_whatever_a_model_writes_is_an_input(arguments: str, text: str) -> None:
    for size in (1, 3, 1000) if len(arguments) < 1000 else (50_000,):
        reader = InputReader()
        pieces = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join([*pieces, reader.finish()]) == text


def test_inputs_are_read_however_they_are_cut() -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice('ab"\\\n\u2028é😀/\x01u') for _ in range(rng.randrange(20)))
        arguments = json.dumps({"input": text}, ensure_ascii=rng.random() < 0.5)
        reader, read, at = InputReader(), "", 0
        while at < len(arguments):
            size = rng.randrange(1, 9)
            read += reader.feed(arguments[at : at + size])
            at += size
        assert read + reader.finish() == text


def test_a_custom_tool_can_be_forced() -> None:
    choice = {"type": "custom", "name": "run"}
    body, client = create(tools=[TOOL, RUN], tool_choice=choice, **calling('{"input": "a"}'))
    assert client.requests[0].sampling.grammar == Grammar("regex", "run False")
    assert body["tool_choice"] == choice


def test_custom_tools_that_are_refused() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    for tools, param in (
        ([TOOL, {**RUN, "format": lark}], "tools.1.format"),
        ([{**RUN, "format": 5}], "tools.0.format"),
        ([{**RUN, "name": ""}], "tools.0.name"),
        ([{**RUN, "name": "add"}, TOOL], "tools.1.name"),
    ):
        assert refused(PATH, {"input": "Hi", "tools": tools}, context=fake_parsers())["param"] == param
    chat = {"messages": MESSAGES, "tools": [{"type": "custom", "custom": {"name": "run"}}]}
    assert refused(CHAT, chat, context=fake_parsers())["param"] == "tools.0.type"


# ---- allowed tools -----------------------------------------------------------------------------------------------


def test_allowed_tools_of_responses() -> None:
    other = {**TOOL, "name": "now"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "run"}]}
    body, client = create(tools=[TOOL, RUN, other], tool_choice=choice, **calling('{"input": "a"}'))
    assert client.requests[0].sampling.grammar == Grammar("regex", "any True")
    assert body["tool_choice"] == choice
    assert [one["name"] for one in body["tools"]] == ["add", "run", "now"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered(mode: str) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NOW]}}
    body = {"messages": MESSAGES, "tools": [ADD, NOW], "tool_choice": allowed}
    _, client = post(CHAT, body, context=fake_parsers(), tokenizer=FakeTokenizer(template=SHOW_TOOLS))
    assert client.requests[0].prompt == "now;"
    assert (client.requests[0].sampling.grammar is not None) == (mode == "required")
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "add"}]}
    tools = [{"type": "function", "name": name} for name in ("add", "now")]
    body = {"input": "Hi", "tools": tools, "tool_choice": flat}
    _, client = post(PATH, body, context=fake_parsers(), tokenizer=FakeTokenizer(template=SHOW_TOOLS))
    assert client.requests[0].prompt == "add;"


def test_odd_allowed_tools() -> None:
    for said, param in (
        (None, "allowed_tools"),
        ({"mode": "none", "tools": [NOW]}, "allowed_tools.mode"),
        ({"mode": "auto", "tools": NOW}, "allowed_tools.tools"),
        ({"mode": "auto", "tools": [5]}, "allowed_tools.tools.0"),
        ({"mode": "auto", "tools": [NOW, {"type": "mcp"}]}, "allowed_tools.tools.1.type"),
        ({"mode": "auto", "tools": [{"type": "function", "name": "now"}]}, "allowed_tools.tools.0.function"),
        ({"mode": "auto", "tools": [{**NOW, "function": {"name": "x"}}]}, "allowed_tools.tools.0.function.name"),
        ({"mode": "required", "tools": []}, "allowed_tools.tools"),
        ({"mode": "auto", "tools": [NOW] * 129}, "allowed_tools.tools"),
    ):  # fmt: skip
        body = {
            "messages": MESSAGES,
            "tools": [ADD, NOW],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": said},
        }
        assert refused(CHAT, body, context=fake_parsers())["param"] == f"tool_choice.{param}"
    body = {"messages": MESSAGES, "tools": [ADD]}
    none = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    _, client = post(CHAT, {**body, "tool_choice": none}, tokenizer=FakeTokenizer(template=SHOW_TOOLS))
    assert client.requests[0].prompt == ""
