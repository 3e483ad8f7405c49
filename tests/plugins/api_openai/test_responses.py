"""/v1/responses on a scripted engine. Answers and events are read by the types of OpenAI's own client, strictly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FAILURE, SCRIPT, FakeEngineClient, FakeStream
from pegboard.core.interfaces.sampling import Grammar
from tests.plugins.api_anthropic.parsers import fake_parsers
from tests.plugins.api_openai import asking
from tests.plugins.api_openai.asking import ask, make_app

TEXT = "".join(SCRIPT)
PATH = "/v1/responses"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}
CALLS = ("((add it", ' up))Well [[add|{"a"', ': 1}]][[add|{"a": 2}]]')
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def create(**more: Any) -> tuple[dict[str, Any], FakeEngineClient]:
    settings = {name: more.pop(name) for name in ("script", "context") if name in more}
    answer, client = asking.post(PATH, {"input": "Hi", **more}, **settings)
    Response.model_validate_json(json.dumps(answer), strict=True)
    return answer, client


def frames(done: Exchange) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name, numbered from 0."""
    found = []
    for block in done.body.decode().split("\n\n"):
        if block:
            name, data = block.split("\n")
            one = json.loads(data.removeprefix("data: "))
            assert name == f"event: {one['type']}"
            EVENT.validate_json(json.dumps(one), strict=True)
            found.append(one)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def stream(*, body: dict[str, Any] | None = None, **settings: Any) -> list[dict[str, Any]]:
    done, _ = ask("POST", PATH, {"input": "Hi", "stream": True, **(body or {})}, **settings)
    assert done.status == 200, done.body
    return frames(done)


def prompt_of(client: FakeEngineClient) -> str:
    return str(client.requests[-1].prompt)


# ---- whole answers -----------------------------------------------------------------------------------------------


def test_response() -> None:
    body, client = create(instructions="Be brief", max_output_tokens=9, temperature=0.5, metadata={"a": "b"})
    request = client.requests[0]
    assert request.prompt == "system: Be brief\nuser: Hi\nassistant:"
    assert (request.sampling.max_new_tokens, request.sampling.temperature) == (9, 0.5)
    assert body["id"] == request.rid
    assert (body["status"], body["object"], body["metadata"]) == ("completed", "response", {"a": "b"})
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    assert body["usage"] == {
        "input_tokens": len(str(request.prompt)),
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": len(TEXT),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(str(request.prompt)) + len(TEXT),
    }


def test_calls_and_thinking_are_items_of_their_own() -> None:
    body, _ = create(tools=[TOOL], script=CALLS, context=fake_parsers())
    thinking, message, *calls = body["output"]
    assert (thinking["type"], thinking["content"][0]["text"]) == ("reasoning", "add it up")
    assert message["content"][0]["text"] == "Well "
    assert [(one["type"], one["name"], one["arguments"]) for one in calls] == [
        ("function_call", "add", '{"a": 1}'),
        ("function_call", "add", '{"a": 2}'),
    ]
    assert all(one["status"] == "completed" for one in body["output"])
    assert len({one["id"] for one in body["output"]} | {one["call_id"] for one in calls}) == 6
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == len("add it up")


def test_tool_choice() -> None:
    _, client = create(tools=[TOOL], tool_choice={"type": "function", "name": "add"}, context=fake_parsers())
    assert client.requests[0].sampling.grammar == Grammar("regex", "add False")


def test_formats() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    assert create(text={"format": form})[1].requests[0].sampling.grammar == Grammar("json_schema", '{"type":"object"}')
    _, client = create(text={"format": {"type": "json_object"}})
    assert client.requests[0].sampling.grammar == Grammar("json_object")


def test_logprobs() -> None:
    body, _ = create(top_logprobs=1, include=["message.output_text.logprobs"])
    entries = body["output"][0]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in entries) == TEXT
    assert [one["token"] for one in entries[0]["top_logprobs"]] == ["A"]
    events = stream(body={"top_logprobs": 1})
    told = [entry for one in events if one["type"].endswith("text.delta") for entry in one["logprobs"]]
    assert told == entries


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_logprobs_are_of_the_text_and_of_nothing_else(size: int) -> None:
    """Not of thinking, calls or their markers; whole, and in pieces of any length."""
    text = '((Hm. four))Four (is) it. [[add|{"a": "is"}]]So [it] is.'
    script = tuple(text[at : at + size] for at in range(0, len(text), size))
    more: dict[str, Any] = {"tools": [TOOL], "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    body, _ = create(script=script, context=fake_parsers(), **more)
    messages = [one["content"][0] for one in body["output"] if one["type"] == "message"]
    assert [one["text"] for one in messages] == ["Four (is) it. ", "So [it] is."]
    for part in messages:
        assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
    events = stream(body=more, script=script, context=fake_parsers())
    told = [entry for one in events if one["type"].endswith("output_text.delta") for entry in one["logprobs"]]
    assert told == [entry for part in messages for entry in part["logprobs"]]


def test_too_long_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    _end_with(monkeypatch, {"type": "length"})
    body, _ = create()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    assert stream()[-1]["type"] == "response.incomplete"


def _end_with(monkeypatch: pytest.MonkeyPatch, reason: dict[str, Any]) -> None:
    chunks = FakeStream._chunks

    async def other_end(self: FakeStream) -> Any:
        async for chunk in chunks(self):
            chunk.finish_reason = chunk.finish_reason and reason
            yield chunk

    monkeypatch.setattr(FakeStream, "_chunks", other_end)


# ---- conversations -----------------------------------------------------------------------------------------------


def test_items_of_all_kinds() -> None:
    items = [
        {"role": "developer", "content": "Be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2 + 2"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "sum"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ]
    template = (
        "{% for one in messages %}[{{ one.role }}|{{ one.name }}|{{ one.content }}|{{ one.reasoning_content }}|"
        "{% for call in one.tool_calls %}{{ call.function.name }} {{ call.function.arguments.a }}{% endfor %}]"
        "{% endfor %}"
    )
    _, client = asking.post(PATH, {"input": items}, tokenizer=asking.FakeTokenizer(template=template))
    assert prompt_of(client) == "[system||Be brief||][user||2 + 2||][assistant||Let me|sum|add 2][tool|add|4||]"


async def told(app: Any, **body: Any) -> dict[str, Any]:
    done = await call(app, "POST", PATH, {"input": "Hi", **body})
    assert done.status == 200, done.body
    found: dict[str, Any] = done.json()
    return found


def test_responses_follow_on_each_other() -> None:
    async def scene() -> None:
        client = FakeEngineClient(script=("Yes.",))
        app = make_app(client)
        first = await told(app, instructions="Be brief")
        second = await told(app, input="Sure?", previous_response_id=first["id"])
        assert prompt_of(client) == "user: Hi\nassistant: Yes.\nuser: Sure?\nassistant:", "instructions are not kept"
        assert second["previous_response_id"] == first["id"]
        gone = await call(app, "DELETE", f"{PATH}/{first['id']}")
        assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
        await told(app, input="Really?", previous_response_id=second["id"])
        assert prompt_of(client).startswith("user: Hi\nassistant: Yes.\nuser: Sure?"), "who follows on has it all"
        done = await call(app, "POST", PATH, {"input": "a", "previous_response_id": first["id"]})
        assert (done.status, done.json()["error"]["param"]) == (400, "previous_response_id")

    asyncio.run(scene())


def test_calls_can_be_answered_by_what_follows_on() -> None:
    async def scene() -> None:
        client = FakeEngineClient(script=CALLS)
        app = make_app(client, **fake_parsers())
        first = await told(app, tools=[TOOL])
        call_id = first["output"][2]["call_id"]
        output = {"type": "function_call_output", "call_id": call_id, "output": "3"}
        await told(app, input=[output], previous_response_id=first["id"], tools=[TOOL])
        assert prompt_of(client).endswith("tool: 3\nassistant:")

    asyncio.run(scene())


def test_what_is_kept_can_be_fetched() -> None:
    async def scene() -> None:
        app = make_app(FakeEngineClient())
        kept = await told(app)
        assert (await call(app, "GET", f"{PATH}/{kept['id']}")).json() == kept
        fleeting = await told(app, store=False)
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            done = await call(app, method, f"{PATH}/{fleeting['id']}{path}")
            assert (done.status, done.json()["error"]["code"]) == (404, "response_not_found")
        ended = await call(app, "POST", f"{PATH}/{kept['id']}/cancel")
        assert ended.status == 400
        assert "completed" in ended.json()["error"]["message"]

    asyncio.run(scene())


def test_streams_are_kept_too() -> None:
    async def scene() -> None:
        app = make_app(FakeEngineClient())
        last = frames(await call(app, "POST", PATH, {"input": "Hi", "stream": True}))[-1]
        assert (await call(app, "GET", f"{PATH}/{last['response']['id']}")).json() == last["response"]

    asyncio.run(scene())


def test_what_is_kept_is_bounded() -> None:
    async def scene(number: int, size: int) -> list[int]:
        app = make_app(FakeEngineClient(), options={"stored_responses": number, "stored_bytes": size})
        ids = [(await told(app))["id"] for _ in range(4)]
        return [(await call(app, "GET", f"{PATH}/{one}")).status or 0 for one in ids]

    assert asyncio.run(scene(2, 10**6)) == [404, 404, 200, 200]
    assert asyncio.run(scene(0, 10**6)) == [404] * 4
    statuses = asyncio.run(scene(100, 16_000))
    assert statuses == sorted(statuses, reverse=True)
    assert statuses[0] == 404
    assert statuses[-1] == 200


def test_cancel() -> None:
    async def scene() -> None:
        client = FakeEngineClient(stall_at=1)
        app = make_app(client)
        exchange = Exchange(app, "POST", PATH, b'{"input": "Hi", "stream": true}')
        await exchange.until(lambda one: SCRIPT[0].encode() in one.body)
        identity = client.requests[0].rid
        assert (await call(app, "GET", f"{PATH}/{identity}")).json()["status"] == "in_progress"
        assert (await call(app, "DELETE", f"{PATH}/{identity}")).status == 400
        done = await call(app, "POST", f"{PATH}/{identity}/cancel")
        assert done.json()["status"] == "cancelled"
        assert client.abort_calls == [(identity, False)]
        client.release.set()
        await exchange.end()

    asyncio.run(scene())


def test_what_was_aborted_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    _end_with(monkeypatch, {"type": "abort", "status": 499})
    assert create()[0]["status"] == "cancelled"


def test_who_leaves_leaves_nothing() -> None:
    async def scene() -> None:
        client = FakeEngineClient(stall_at=1)
        app = make_app(client)
        exchange = Exchange(app, "POST", PATH, b'{"input": "Hi", "stream": true}')
        await exchange.until(lambda one: SCRIPT[0].encode() in one.body)
        exchange.leave()
        await exchange.end()
        assert client.aborted == [client.requests[0].rid]
        assert (await call(app, "GET", f"{PATH}/{client.requests[0].rid}")).status == 404

    asyncio.run(scene())


# ---- streams -----------------------------------------------------------------------------------------------------


def test_stream() -> None:
    events = stream()
    assert [one["type"] for one in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(SCRIPT),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[2]["item"]["content"] == []
    assert [one["delta"] for one in events[4:7]] == list(SCRIPT)
    assert events[7]["text"] == TEXT
    whole = events[-1]["response"]
    assert whole["output"] == [events[-2]["item"]]
    assert events[-2]["item"]["id"] == events[4]["item_id"]
    assert whole["usage"]["output_tokens"] == len(TEXT)


def test_stream_of_calls_and_thinking() -> None:
    events = stream(body={"tools": [TOOL]}, script=CALLS, context=fake_parsers())
    steps = [one["type"].removeprefix("response.") for one in events]
    distinct = [one for i, one in enumerate(steps) if i == 0 or steps[i - 1] != one]
    call_steps = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert distinct == [
        "created",
        "in_progress",
        *["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"],
        *["content_part.done", "output_item.done"],
        *["output_item.added", "content_part.added", "output_text.delta", "output_text.done"],
        *["content_part.done", "output_item.done"],
        *call_steps,
        *call_steps,
        "completed",
    ]
    done = [one["item"] for one in events if one["type"].endswith("output_item.done")]
    assert events[-1]["response"]["output"] == done
    for index, item in enumerate(done):
        own = [one for one in events if one.get("output_index") == index]
        assert {one.get("item_id", item["id"]) for one in own} == {item["id"]}
        text = "".join(one["delta"] for one in own if one["type"].endswith(".delta"))
        assert text == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    assert [one["arguments"] for one in events if one["type"].endswith("arguments.done")] == ['{"a": 1}', '{"a": 2}']


def test_an_empty_answer_is_a_message() -> None:
    assert create(script=("",))[0]["output"][0]["content"][0]["text"] == ""


def test_failure_in_a_stream_is_an_event() -> None:
    last = stream(fail_at=1)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": FAILURE}
    assert last["response"]["output"][0]["content"][0]["text"] == SCRIPT[0]
