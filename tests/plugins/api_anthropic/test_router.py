"""Anthropic's formats, on a scripted engine. Answers are read by the types of Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FAILURE, SCRIPT, FakeEngineClient
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.api_anthropic.options import AnthropicOptions
from pegboard.plugins.api_anthropic.router import AnthropicRouter
from pegboard.toolkit.http.app import build_app
from tests.plugins.api_anthropic.parsers import fake_parsers

TEXT = "".join(SCRIPT)
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"model": "fake-model", "max_tokens": 1000, "messages": MESSAGES}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
TOOL = {"name": "add", "description": "Adds", "input_schema": {"type": "object", "properties": {"a": {}}}}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def make_app(client: FakeEngineClient, *, parsers: bool = True, ping_interval: float = 60.0) -> Any:
    ctx = ApiContext(client=client, max_body_bytes=10**6, **(fake_parsers() if parsers else {}))
    router = AnthropicRouter(AnthropicOptions(ping_interval=ping_interval), ctx)
    return build_app([("anthropic", router)], max_body_bytes=10**6)


def ask(path: str, body: Any, *, parsers: bool = True, **settings: Any) -> tuple[Exchange, FakeEngineClient]:
    async def scene() -> tuple[Exchange, FakeEngineClient]:
        client = FakeEngineClient(**settings)
        return await call(make_app(client, parsers=parsers), "POST", path, body), client

    return asyncio.run(scene())


def message(script: tuple[str, ...] = SCRIPT, **body: Any) -> tuple[Message, FakeEngineClient]:
    done, client = ask(PATH, {**BODY, **body}, script=script)
    assert done.status == 200, done.body
    assert done.headers["request-id"]
    # Strictly: the client itself takes whatever comes.
    Message.model_validate(done.json(), strict=True)
    return Message.model_validate(done.json()), client


def test_the_engine_learns_which_name_was_asked_for() -> None:
    _, client = message(model="/models/fake")
    assert client.requests[0].model == "/models/fake"
    assert client.info.named("/models/fake") == client.info.served_name


def frames(done: Exchange) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of a stream's events."""
    found = []
    for block in done.body.decode().split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def stream(script: tuple[str, ...] = SCRIPT, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each one valid."""
    done, _ = ask(PATH, {**BODY, "stream": True, **body}, script=script)
    assert done.status == 200, done.body
    assert done.headers["request-id"]
    found = frames(done)
    for name, data in found:
        assert data["type"] == name
        EVENT.validate_python(data)
    return [data for _, data in found]


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a stream's events describe; the order of the events is checked on the way."""
    blocks: list[dict[str, Any]] = []
    open_, partial = False, ""
    for event in events:
        if event["type"] == "content_block_start":
            assert not open_
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            open_, partial = True, ""
        elif event["type"] == "content_block_delta":
            assert open_
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            for kind, name in (
                ("text", "text_delta"),
                ("thinking", "thinking_delta"),
                ("signature", "signature_delta"),
            ):
                if delta["type"] == name:
                    blocks[-1][kind] += delta[kind]
            partial += delta.get("partial_json", "")
        elif event["type"] == "content_block_stop":
            assert open_
            assert event["index"] == len(blocks) - 1
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(partial)
            open_ = False
    assert not open_
    return blocks


# ---- answers ------------------------------------------------------------------------------------------------------


def test_message() -> None:
    found, client = message()
    assert (found.type, found.role, found.model) == ("message", "assistant", "fake-model")
    assert [block.to_dict() for block in found.content] == [{"type": "text", "text": TEXT}]
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
    prompt = "user: Hi\nassistant:"
    [request] = client.requests
    assert request.prompt == prompt
    assert request.rid == found.id
    assert not request.add_special_tokens
    assert request.sampling.max_new_tokens == 1000
    assert found.usage.input_tokens == len(prompt) - 2
    assert found.usage.cache_read_input_tokens == 2
    assert found.usage.output_tokens == len(TEXT)


def test_stream() -> None:
    events = stream()
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == len("user: Hi\nassistant:") - 2
    assert start["usage"]["cache_read_input_tokens"] == 2
    assert assembled(events) == [{"type": "text", "text": TEXT}]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(TEXT)


def test_an_answer_without_text_has_no_content() -> None:
    assert message(("",))[0].content == []
    assert [event["type"] for event in stream(("",))] == ["message_start", "message_delta", "message_stop"]


ANSWERS: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "text": ("Hello.", [{"type": "text", "text": "Hello."}], "end_turn"),
    "thinking": (
        "((Hm.))Yes.",
        [{"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}, {"type": "text", "text": "Yes."}],
        "end_turn",
    ),
    "a call": ('[[add|{"a": 1}]]', [{"type": "tool_use", "name": "add", "input": {"a": 1}}], "tool_use"),
    "all of it": (
        '((Hm.))I add:[[add|{"a": "x|y"}]][[add|{}]]',
        [
            {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
            {"type": "text", "text": "I add:"},
            {"type": "tool_use", "name": "add", "input": {"a": "x|y"}},
            {"type": "tool_use", "name": "add", "input": {}},
        ],
        "tool_use",
    ),
}


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    identities = [block.pop("id") for block in blocks if block["type"] == "tool_use"]
    assert all(one.startswith("toolu_") for one in identities)
    assert len(set(identities)) == len(identities)
    return blocks


@pytest.mark.parametrize(("text", "blocks", "reason"), ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_blocks(text: str, blocks: list[dict[str, Any]], reason: str, size: int) -> None:
    script = tuple(text[i : i + size] for i in range(0, len(text), size))
    found, _ = message(script, tools=[TOOL])
    assert without_ids([block.to_dict() for block in found.content]) == blocks
    assert found.stop_reason == reason
    events = stream(script, tools=[TOOL])
    assert without_ids(assembled(events)) == blocks
    assert events[-2]["delta"]["stop_reason"] == reason


def test_without_tools_nothing_is_a_call() -> None:
    found, _ = message(('[[add|{"a": 1}]]',))
    assert [block.type for block in found.content] == ["text"]
    found, _ = message(('[[add|{"a": 1}]]',), tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in found.content] == ["text"]


@pytest.mark.parametrize("kind", ["auto", "any"])
def test_one_call_where_calls_may_not_be_parallel(kind: str) -> None:
    choice = {"type": kind, "disable_parallel_tool_use": True}
    found, _ = message(('[[add|{"a": 1}]][[add|{"a": 2}]]',), tools=[TOOL], tool_choice=choice)
    assert [block.input for block in found.content if block.type == "tool_use"] == [{"a": 1}]


@pytest.mark.parametrize("arguments", ['{"a": Rome}', '{"a": "x"y}', "{oops"])
def test_a_call_whose_arguments_are_no_json_is_not_one_without_arguments(arguments: str) -> None:
    found, _ = message((f"[[add|{arguments}]]",), tools=[TOOL])
    [block] = found.content
    assert block.to_dict()["input"] == {"INVALID_JSON": arguments}


def test_a_call_that_is_cut_off_has_what_is_there() -> None:
    found, _ = message(('[[add|{"a": [1, 2, {"b": "some te',), tools=[TOOL])
    [block] = found.content
    assert block.to_dict()["input"] == {"a": [1, 2, {"b": "some te"}]}


def test_thinking_is_shown_or_not() -> None:
    script = ("((Hm.))", "Yes.")
    shown = {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    omitted = {"type": "thinking", "thinking": "", "signature": "unsigned"}
    for thinking, expected in (
        (None, [shown]),
        ({"type": "enabled", "budget_tokens": 10}, [shown]),
        ({"type": "adaptive"}, [shown]),
        ({"type": "adaptive", "display": "omitted"}, [omitted]),
        ({"type": "disabled"}, []),
    ):
        blocks = [*expected, {"type": "text", "text": "Yes."}]
        found, _ = message(script, thinking=thinking)
        assert [block.to_dict() for block in found.content] == blocks
        assert assembled(stream(script, thinking=thinking)) == blocks


def test_a_budget_of_thinking_reaches_an_engine_that_has_them() -> None:
    body = {**BODY, "thinking": {"type": "enabled", "budget_tokens": 7}}
    for features, tokens in ((("thought_budget",), 7), ((), None)):
        done, client = ask(PATH, body, features=features)
        assert done.status == 200, done.body
        assert client.requests[0].params.get("thought_budget", {}).get("tokens") == tokens
    long = [*BODY["messages"], {"role": "assistant", "content": "((" + "x" * 70_000}]
    done, client = ask(PATH, {**body, "messages": long}, features=["thought_budget"])
    assert done.status == 200, done.body
    assert len(str(client.requests[0].params)) < 1000


# ---- why it ended -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "max_tokens", "reason", "sequence"),
    [
        ({"type": "stop", "matched": 3}, 1000, "end_turn", None),
        ({"type": "stop"}, 1000, "end_turn", None),
        ({"type": "stop", "matched": "END"}, 1000, "stop_sequence", "END"),
        ({"type": "length"}, len(TEXT), "max_tokens", None),
        ({"type": "length"}, 1000, "model_context_window_exceeded", None),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_stop_reasons(
    finish: dict[str, Any], max_tokens: int, reason: str, sequence: str | None, streamed: bool
) -> None:
    body = {**BODY, "max_tokens": max_tokens, "stop_sequences": ["END"], "stream": streamed}
    done, client = ask(PATH, body, finish_reason=finish)
    found = frames(done)[-2][1]["delta"] if streamed else done.json()
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
    assert client.requests[0].sampling.stop == ("END",)


# ---- what the engine is asked -------------------------------------------------------------------------------------


def test_parameters_arrive() -> None:
    _, client = message(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["a"], stop="b", metadata={"user_id": "u"},
        min_p=0.1, seed=3, rid="mine", priority=2, cache_salt="s", params={"session": {"id": "x"}}, min_tokens=1,
        service_tier="auto",
    )  # fmt: skip
    [request] = client.requests
    sampling = request.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 5)
    assert (sampling.stop, sampling.min_p, sampling.seed, sampling.min_new_tokens) == (("a", "b"), 0.1, 3, 1)
    assert (request.rid, request.priority, request.cache_salt) == ("mine", 2, "s")
    assert request.params == {"session": {"id": "x"}}
    assert request.sampling.grammar is None


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
        ({"type": "any"}, "any True"),
        ({"type": "any", "disable_parallel_tool_use": True}, "any False"),
        ({"type": "tool", "name": "add"}, "add False"),
    ],
)
def test_calls_that_are_demanded_have_a_grammar(choice: dict[str, Any], grammar: str | None) -> None:
    _, client = message(tools=[TOOL], tool_choice=choice)
    sampling = client.requests[0].sampling
    assert sampling.grammar == (None if grammar is None else Grammar("regex", grammar))
    # The markers of these calls are special tokens.
    assert sampling.skip_special_tokens is (choice["type"] == "none")


def test_formats_are_grammars() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    _, client = message(output_config=config)
    grammar = client.requests[0].sampling.grammar
    assert grammar == Grammar("json_schema", '{"type":"object","properties":{"b":{},"a":{}}}')
    # The beta's name for it.
    assert message(output_format=config["format"])[1].requests[0].sampling.grammar == grammar
    assert message(regex="a+")[1].requests[0].sampling.grammar == Grammar("regex", "a+")
    # Tools that need not be used give way to it: such an answer is text, whatever it looks like.
    found, client = message(('[[add|{"a": 1}]]',), output_config=config, tools=[TOOL])
    assert client.requests[0].sampling.grammar == grammar
    assert [block.type for block in found.content] == ["text"]


def test_count_tokens() -> None:
    body = {"model": "fake-model", "messages": MESSAGES}
    done, client = ask(COUNT, body)
    assert MessageTokensCount.model_validate(done.json(), strict=True).input_tokens == len("user: Hi\nassistant:")
    assert client.requests == []
    more, _ = ask(COUNT, {**body, "system": "Be terse."})
    assert more.json()["input_tokens"] == len("system: Be terse.\nuser: Hi\nassistant:")


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"system": 5}, "system"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1000}}, "thinking.budget_tokens"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools.0.name"),
        ({"tools": [{"name": "a", "input_schema": {"type": 5}}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools.0.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"output_format": {"type": "xml"}}, "output_format"),
        ({"output_format": {"type": "json_schema", "schema": 5}}, "output_format.schema"),
        ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, "output_format"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}, "regex": "a"}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_bad_requests_name_the_field(body: dict[str, Any], field: str) -> None:
    done, client = ask(PATH, {**BODY, **body})
    assert done.status == 400, done.body
    error = done.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert field in error["error"]["message"]
    assert str(error["error"]["details"]["param"]).startswith(field)
    assert error["request_id"] == done.headers["request-id"]
    assert client.requests == []


def test_threads_are_refused_as_the_client_expects() -> None:
    """Its tool runner asks for a thread, and sends the whole conversation where it reads this code."""
    for path in (PATH, COUNT):
        done, _ = ask(path, {**BODY, "thread": {"type": "continue", "previous_message_id": "msg_1"}})
        assert (done.status, done.json()["error"]["details"]["error_code"]) == (400, "thread_unsupported_request")


def test_tools_need_a_parser() -> None:
    done, _ = ask(PATH, {**BODY, "tools": [TOOL]}, parsers=False)
    assert done.status == 400
    assert "tool_parser" in done.json()["error"]["message"]
    assert ask(PATH, {**BODY, "tools": [TOOL], "tool_choice": {"type": "none"}}, parsers=False)[0].status == 200


def test_the_engines_refusals_use_our_names() -> None:
    refusal = InvalidRequest("json_schema is odd", param="json_schema")
    done, _ = ask(PATH, {**BODY, "output_format": FORMAT}, refuse=refusal)
    assert done.json()["error"]["message"] == "output_format.schema is odd"
    refusal = InvalidRequest("max_new_tokens is odd", param="max_new_tokens")
    done, _ = ask(PATH, BODY, refuse=refusal)
    assert done.json()["error"]["message"] == "max_tokens is odd"
    done, _ = ask(PATH, BODY, refuse=InvalidRequest("the prompt is too long", param="prompt"))
    assert done.json()["error"]["message"] == "messages: the prompt is too long"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_grammar_that_turns_out_bad_later_is_called_by_our_names(streamed: bool) -> None:
    """As it is where it does not compile: its request has been accepted then."""

    class Compiling(FakeEngineClient):
        def pieces(self, request: GenerateRequest, number: int) -> tuple[str, ...]:
            raise InvalidRequest("json_schema: bad pattern", param="json_schema")

    async def scene() -> Exchange:
        body = {**BODY, "output_config": {"format": FORMAT}, "stream": streamed}
        return await call(make_app(Compiling()), "POST", PATH, body)

    done = asyncio.run(scene())
    assert done.status == 400
    error = done.json()["error"]
    assert error["message"] == "output_config.format.schema: bad pattern"
    assert error["details"]["param"] == "output_config.format.schema"


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_unknown_model(path: str) -> None:
    done, _ = ask(path, {**BODY, "model": "claude-opus"})
    assert (done.status, done.json()["error"]["type"]) == (404, "not_found_error")
    assert "claude-opus" in done.json()["error"]["message"]


@pytest.mark.parametrize(
    ("status", "code", "answered", "kind"),
    [
        (400, "x", 400, "invalid_request_error"),
        (401, "x", 401, "authentication_error"),
        (403, "x", 403, "permission_error"),
        (404, "x", 404, "not_found_error"),
        (409, "x", 409, "conflict_error"),
        (413, "x", 413, "request_too_large"),
        (422, "x", 422, "invalid_request_error"),
        (429, "x", 429, "rate_limit_error"),
        (500, "x", 500, "api_error"),
        (503, "not_ready", 503, "api_error"),
        (503, "queue_full", 529, "overloaded_error"),
        (504, "x", 504, "timeout_error"),
    ],
)
def test_error_types(status: int, code: str, answered: int, kind: str) -> None:
    refusal = InvalidRequest("no", status=status, code=code, param="top_p")
    for streamed in (False, True):
        done, _ = ask(PATH, {**BODY, "stream": streamed}, refuse=refusal)
        assert done.status == answered
        details = {"error_code": code, "param": "top_p"}
        assert done.json()["error"] == {"type": kind, "message": "top_p: no", "details": details}
        assert ("retry-after" in done.headers) == (status in (429, 503))


def test_the_servers_own_errors() -> None:
    async def scene(method: str, path: str, body: bytes) -> Exchange:
        return await call(make_app(FakeEngineClient()), method, path, body)

    for method, path, body, status, kind in (
        ("POST", PATH, b"{", 400, "invalid_request_error"),
        ("GET", PATH, b"", 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", b"", 404, "not_found_error"),
        ("POST", PATH, b"x" * (10**6 + 1), 413, "request_too_large"),
    ):
        done = asyncio.run(scene(method, path, body))
        assert done.status == status
        assert done.json()["type"] == "error"
        assert done.json()["error"]["type"] == kind
        assert done.json()["request_id"] == done.headers["request-id"]


def test_failure_in_a_stream_is_an_event() -> None:
    done, client = ask(PATH, {**BODY, "stream": True}, fail_at=1)
    *before, (name, error) = frames(done)
    assert [one for one, _ in before] == ["message_start", "content_block_start", "content_block_delta"]
    assert name == error["type"] == "error"
    assert (error["error"]["type"], error["error"]["message"]) == ("api_error", FAILURE)
    assert error["request_id"] == done.headers["request-id"]
    assert client.aborted == []


# ---- pings --------------------------------------------------------------------------------------------------------


def test_a_silent_stream_is_kept_alive() -> None:
    async def scene() -> Exchange:
        client = FakeEngineClient(stall_at=1)
        body = json.dumps({**BODY, "stream": True}).encode()
        exchange = Exchange(make_app(client, ping_interval=0.01), "POST", PATH, body)
        await exchange.until(lambda one: one.body.count(b"event: ping") >= 3)
        client.release.set()
        return await exchange.end()

    events = frames(asyncio.run(scene()))
    assert assembled([data for name, data in events if name != "ping"]) == [{"type": "text", "text": TEXT}]
    assert all(data == {"type": "ping"} for name, data in events if name == "ping")


def test_leaving_a_silent_stream_aborts() -> None:
    async def scene() -> FakeEngineClient:
        client = FakeEngineClient(stall_at=1)
        body = json.dumps({**BODY, "stream": True}).encode()
        exchange = Exchange(make_app(client, ping_interval=0.01), "POST", PATH, body)
        await exchange.until(lambda one: one.body.count(b"event: ping") >= 2)
        exchange.leave()
        await exchange.end()
        return client

    client = asyncio.run(scene())
    assert client.aborted == [client.requests[0].rid]
