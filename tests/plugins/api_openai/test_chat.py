"""/v1/chat/completions on a scripted engine. Answers are read by the types of OpenAI's own client, strictly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import (
    FAILURE,
    SCRIPT,
    FakeEngineClient,
    FakeStream,
    FakeTokenizer,
    prompt_text,
)
from pegboard.conformance.fakes import session_store
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.parsing.output_parser import OutputParserContext
from tests.plugins.api_anthropic.parsers import fake_parsers
from tests.plugins.api_openai import asking
from tests.plugins.api_openai.asking import CHAT, COMPLETIONS, MESSAGES, ask
from tests.plugins.api_openai.test_bad_input import RESPONSES

TEXT = "".join(SCRIPT)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
NAMED = {"type": "function", "function": {"name": "add"}}
CALLS = ("((add it", ' up))Well [[add|{"a"', ': 1}]][[add|{"a": 2}]]')


def chat(**body: Any) -> tuple[dict[str, Any], FakeEngineClient]:
    answer, client = asking.post(CHAT, {"model": "fake-model", "messages": MESSAGES, **body})
    ChatCompletion.model_validate(answer, strict=True)
    return answer, client


def asked(**body: Any) -> GenerateRequest:
    return chat(**body)[1].requests[0]


def stream(**more: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, **more.pop("body", {})}
    chunks = asking.stream(CHAT, body, **more)
    for one in chunks:
        ChatCompletionChunk.model_validate(one, strict=True)
    return chunks


def call_tools(**body: Any) -> tuple[dict[str, Any], FakeEngineClient]:
    answer, client = asking.post(
        CHAT, {"messages": MESSAGES, "tools": [TOOL], **body}, context=fake_parsers(), script=CALLS
    )
    ChatCompletion.model_validate(answer, strict=True)
    return answer, client


# ---- whole answers ---------------------------------------------------------------------------------------------------


def test_chat() -> None:
    body, client = chat()
    assert body["object"] == "chat.completion"
    assert body["model"] == "fake-model"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    prompt = "user: Hi\nassistant:"
    assert client.requests[0].prompt == prompt
    assert not client.requests[0].add_special_tokens
    assert client.requests[0].sampling.max_new_tokens is None
    assert body["id"] == client.requests[0].rid
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(TEXT),
        "total_tokens": len(prompt) + len(TEXT),
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_parameters_arrive() -> None:
    request = asked(
        max_tokens=3, max_completion_tokens=4, stop="END", top_k=5, min_p=0.1, min_tokens=1, stop_token_ids=[9],
        stop_regex=["x+"], ignore_eos=True, repetition_penalty=1.1, skip_special_tokens=False, rid="mine",
        cache_salt="s", priority=2, params={"session": {"id": "x"}}, no_stop_trim=True, return_hidden_states=True,
        logit_bias={"7": -1}, frequency_penalty=0.5, presence_penalty=0.25, temperature=0, top_p=0.5, seed=1,
    )  # fmt: skip
    sampling = request.sampling
    assert (request.rid, request.cache_salt, request.priority) == ("mine", "s", 2)
    assert request.params == {"session": {"id": "x"}}
    assert request.return_hidden_states
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.stop) == (4, 1, ("END",))
    assert (sampling.top_k, sampling.min_p, sampling.top_p, sampling.temperature) == (5, 0.1, 0.5, 0)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.skip_special_tokens) == ((9,), True, False)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.1, 0.5, 0.25)
    assert (sampling.logit_bias, sampling.seed) == ({7: -1.0}, 1)
    assert (sampling.stop_regex, sampling.no_stop_trim) == (("x+",), True)


def test_answers_have_seeds_of_their_own() -> None:
    body, client = chat(n=3, seed=5)
    assert [one["index"] for one in body["choices"]] == [0, 1, 2]
    assert [one.sampling.seed for one in client.requests] == [5, 6, 7]
    assert body["usage"]["prompt_tokens"] == len(str(client.requests[0].prompt)), "a prompt counts once"
    indexes = {one["choices"][0]["index"] for one in stream(body={"n": 3})}
    assert indexes == {0, 1, 2}


def test_logprobs() -> None:
    entries = chat(logprobs=True, top_logprobs=2)[0]["choices"][0]["logprobs"]["content"]
    assert len(entries) == len(TEXT)
    assert entries[0]["token"] == "O"
    assert entries[0]["bytes"] == [ord("O")]
    assert [one["token"] for one in entries[0]["top_logprobs"]] == ["A", "B"]
    assert chat(logprobs=True)[0]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_logprobs_of_a_stream_are_those_of_its_text() -> None:
    chunks = stream(body={"logprobs": True})
    entries = [
        entry for one in chunks if (found := one["choices"][0]["logprobs"]) is not None for entry in found["content"]
    ]
    assert "".join(one["token"] for one in entries) == TEXT


def test_prompt_logprobs() -> None:
    body, client = chat(prompt_logprobs=1, logprobs=True, top_logprobs=2)
    assert (client.requests[0].logprob_start, client.requests[0].logprobs) == (0, 2)
    first, second, *_ = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second[str(ord("s"))] == {"logprob": -0.5, "rank": None, "decoded_token": "s"}
    assert second["65"] == {"logprob": -0.5, "rank": 1, "decoded_token": "A"}
    assert len(second) == 2


def test_hidden_states() -> None:
    body, _ = chat(return_hidden_states=True)
    assert body["choices"][0]["hidden_states"] == [[0.25, -0.5]] * len(TEXT)
    chunks = stream(body={"return_hidden_states": True})
    states = [state for one in chunks for state in one["choices"][0].get("hidden_states") or []]
    assert states == [[0.25, -0.5]] * len(TEXT)


def test_what_stages_tell() -> None:
    told = {"green": [1, 0]}
    body, _ = asking.post(CHAT, {"messages": MESSAGES}, extra=told)
    assert body["choices"][0]["extra"] == told
    chunks = stream(extra=told)
    assert [one["choices"][0]["extra"] for one in chunks if "extra" in one["choices"][0]] == [told]
    assert "extra" not in chat()[0]["choices"][0]


# ---- conversations ---------------------------------------------------------------------------------------------------


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert asked(messages=[{"role": "user", "content": parts}]).prompt == "user: one\ntwo\nassistant:"


def test_final_message_can_be_continued() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Hello"}]
    assert asked(messages=messages, continue_final_message=True).prompt == "user: Hi\nassistant: Hello"


def test_developers_are_the_system_to_a_template_that_knows_none() -> None:
    messages = [{"role": "developer", "content": "Be brief"}, *MESSAGES]
    assert str(asked(messages=messages).prompt).startswith("system: Be brief\n")


def test_roles_of_the_template_are_roles() -> None:
    messages = [{"role": "critic", "content": "Hm"}]
    assert asking.refused(CHAT, {"messages": messages})["param"] == "messages.0.role"
    template = "{% for one in messages %}{% if one.role == 'critic' %}{{ one.content }}{% endif %}{% endfor %}"
    _, client = asking.post(CHAT, {"messages": messages}, tokenizer=FakeTokenizer(template=template))
    assert client.requests[0].prompt == "Hm"


def test_template_kwargs_are_those_that_the_template_reads() -> None:
    template = "{{ messages[0].content }}{% if enable_thinking %} think{% endif %} {{ reasoning_effort }}"
    body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}
    _, client = asking.post(CHAT, body, tokenizer=FakeTokenizer(template=template))
    assert client.requests[0].prompt == "Hi think low"
    assert asked(reasoning_effort="low").prompt == "user: Hi\nassistant:", "a hint, for templates that listen"


def budgeted(prompt: str = "", route: str = CHAT, **more: Any) -> tuple[Any, FakeEngineClient]:
    """Ask a model that thinks between markers."""
    record = Registry.discover().get("reasoning_parser", "deepseek_r1")
    assert record is not None
    parser = record.load()(record.options_model()(), OutputParserContext("", "", ""))
    template = "{% for one in messages %}{{ one.content }}{% endfor %}" + prompt
    conversation = {"messages": MESSAGES} if route == CHAT else {"input": "Hi"}
    body = {**conversation, "thinking_token_budget": 7, **more}
    services = {"services": {"reasoning_parser": parser}}
    return ask(
        "POST", route, body, context=services, features=["thought_budget"], tokenizer=FakeTokenizer(template=template)
    )


def test_a_budget_of_thinking_reaches_the_engine() -> None:
    said = {"begin": "<think>", "ends": ["</think>"], "closes": ["</think>"], "answer": "", "tokens": 7}
    for prompt, opened in (("", False), ("<think>\n", True)):
        _, client = budgeted(prompt, n=2, params={"gate": 1})
        for one in client.requests:
            assert one.params == {"gate": 1, "thought_budget": {**said, "opened": opened, "text": ""}}
    _, client = budgeted(route=RESPONSES, params={"gate": 1})
    assert client.requests[0].params == {"gate": 1, "thought_budget": {**said, "opened": False, "text": ""}}
    # Of a prefill what was found in it: `params` may not be as long as it may.
    for prefill, opened, rest in (
        ("<think>Hm", True, "Hm"),
        ("<think>" + "x" * 70_000, True, "x" * 7),
        ("<thi", False, "<thi"),
    ):
        prefilled = [*MESSAGES, {"role": "assistant", "content": prefill}]
        _, client = budgeted(messages=prefilled, continue_final_message=True)
        assert client.requests[0].params["thought_budget"] == {**said, "opened": opened, "text": rest}
    for prefill in ("Four." * 20_000, "The tag <think> opens a thought. ", "<think>Hm</think>Four"):
        prefilled = [*MESSAGES, {"role": "assistant", "content": prefill}]
        _, client = budgeted(messages=prefilled, continue_final_message=True)
        assert client.requests[0].params == {}, "no thought comes any more"
    _, client = budgeted(response_format={"type": "json_object"})
    assert client.requests[0].params == {}, "an answer that a grammar describes has no thought"


def test_a_budget_in_thinking_is_a_wish() -> None:
    for tokens, thinking in ((3, {"budget_tokens": 3}), (7, {"budget_tokens": 3}), (None, {})):
        whole = 7 if tokens == 7 else None
        _, client = budgeted(thinking={"type": "enabled", **thinking}, thinking_token_budget=whole)
        assert client.requests[0].params.get("thought_budget", {}).get("tokens") == tokens
    off = {"type": "disabled", "budget_tokens": 3}
    assert budgeted(thinking=off, thinking_token_budget=None)[1].requests[0].params == {}
    assert asked(thinking={"type": "enabled", "budget_tokens": 3}).params == {}, "nothing ends thoughts"


def test_budgets_are_refused_where_thoughts_cannot_be_ended() -> None:
    done, _ = budgeted(thinking_token_budget=-1)
    assert "at least 0" in done.json()["error"]["message"]
    body = {"messages": MESSAGES, "thinking_token_budget": 7}
    error = asking.refused(CHAT, body)
    assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported")
    assert "no reasoning parser" in error["message"]
    assert asking.refused(RESPONSES, {"input": "Hi", "thinking_token_budget": 7})["param"] == "thinking_token_budget"
    assert asking.refused(COMPLETIONS, {"prompt": "Hi", "thinking_token_budget": 7})["code"] == "unsupported"


def test_thinking_is_switched_as_other_servers_switch_it() -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }}"

    def prompt(**body: Any) -> str:
        _, client = asking.post(CHAT, {"messages": MESSAGES, **body}, tokenizer=FakeTokenizer(template=template))
        return prompt_text(client.requests[0].prompt)

    assert prompt(thinking={"type": "disabled"}) == "False "
    assert prompt(thinking={"type": "enabled", "budget_tokens": 100}) == "True "
    assert prompt(thinking={"type": "disabled"}, reasoning_effort="low") == "False low"
    assert asking.refused(CHAT, {"messages": MESSAGES, "thinking": {"type": "odd"}})["param"] == "thinking.type"


def test_what_asks_for_nothing_passes() -> None:
    prediction = {"type": "content", "content": "Hello"}
    assert asked(prediction=prediction).prompt == asked().prompt, "it would only be faster"
    assert asked(truncate_prompt_tokens=-1).prompt == asked().prompt
    body = {"messages": MESSAGES, "truncate_prompt_tokens": 5}
    assert asking.refused(CHAT, body)["param"] == "truncate_prompt_tokens"


def test_tool_messages_arrive() -> None:
    template = (
        "{% for one in messages %}[{{ one.role }}|{{ one.name }}|{{ one.content }}|{{ one.reasoning_content }}|"
        "{% for call in one.tool_calls %}{{ call.function.name }} {{ call.function.arguments.a }}{% endfor %}]"
        "{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "sum"},
        {"role": "tool", "tool_call_id": "c1", "content": "8"},
    ]
    _, client = asking.post(CHAT, {"messages": messages}, tokenizer=FakeTokenizer(template=template))
    assert client.requests[0].prompt == "[user||Hi||][assistant|||sum|add 7][tool|add|8||]"


# ---- tools and thinking ----------------------------------------------------------------------------------------------


def test_calls_and_thinking() -> None:
    body, _ = call_tools()
    choice = body["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Well "
    assert message["reasoning_content"] == "add it up"
    assert [one["function"] for one in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "add", "arguments": '{"a": 2}'},
    ]
    assert len({one["id"] for one in message["tool_calls"]}) == 2
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("add it up")}


def test_content_is_null_beside_calls_alone() -> None:
    answer, _ = asking.post(
        CHAT, {"messages": MESSAGES, "tools": [TOOL]}, context=fake_parsers(), script=("[[add|{}]]",)
    )
    assert answer["choices"][0]["message"]["content"] is None


def test_stream_of_calls() -> None:
    chunks = stream(body={"tools": [TOOL]}, context=fake_parsers(), script=CALLS)
    deltas = [one["choices"][0]["delta"] for one in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(one.get("reasoning_content", "") for one in deltas) == "add it up"
    assert "".join(one.get("content") or "" for one in deltas) == "Well "
    pieces = [piece for one in deltas for piece in one.get("tool_calls", [])]
    heads = [one for one in pieces if "id" in one]
    assert [(one["index"], one["type"], one["function"]) for one in heads] == [
        (0, "function", {"name": "add", "arguments": ""}),
        (1, "function", {"name": "add", "arguments": ""}),
    ]
    for index, arguments in enumerate(('{"a": 1}', '{"a": 2}')):
        own = [one for one in pieces if one["index"] == index]
        assert own[0] is heads[index], "the head comes first"
        assert all(one.keys() == {"index", "function"} for one in own[1:])
        assert "".join(one["function"]["arguments"] for one in own) == arguments
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert all(one["choices"][0]["finish_reason"] is None for one in chunks[:-1])


def test_thinking_is_content_where_it_is_not_to_be_separated() -> None:
    message = call_tools(separate_reasoning=False)[0]["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "((add it up))Well "


def test_thinking_comes_at_once_where_it_is_not_to_be_streamed() -> None:
    chunks = stream(body={"stream_reasoning": False}, context=fake_parsers(), script=("((a", "b", "c))d"))
    thoughts = [one["choices"][0]["delta"]["reasoning_content"] for one in chunks if "reasoning_content" in str(one)]
    assert thoughts == ["abc"]


@pytest.mark.parametrize(
    ("choice", "parallel", "source"),
    [("required", True, "any True"), ("required", False, "any False"), (NAMED, True, "add False")],
)
def test_calls_can_be_required(choice: Any, parallel: bool, source: str) -> None:
    _, client = call_tools(tool_choice=choice, parallel_tool_calls=parallel)
    assert client.requests[0].sampling.grammar == Grammar("regex", source)


def test_no_call_is_read_where_none_may_be_made() -> None:
    message = call_tools(tool_choice="none")[0]["choices"][0]["message"]
    assert "tool_calls" not in message
    assert "[[add" in message["content"]


def test_one_call_where_they_may_not_be_parallel() -> None:
    assert len(call_tools(parallel_tool_calls=False)[0]["choices"][0]["message"]["tool_calls"]) == 1


def test_special_tokens_stay_where_a_parser_needs_them() -> None:
    assert not call_tools()[1].requests[0].sampling.skip_special_tokens
    assert call_tools(tools=[])[1].requests[0].sampling.skip_special_tokens


# ---- grammars --------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
FLAT = {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            Grammar("structural_tag", json.dumps(TAG, separators=(",", ":"))),
        ),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ],
)
def test_grammars(body: dict[str, Any], grammar: Grammar | None) -> None:
    assert asked(**body).sampling.grammar == grammar


def test_an_answer_with_a_grammar_is_what_that_says() -> None:
    """Tools may be there; brackets of the answer's own are no calls."""
    message = call_tools(regex=".*")[0]["choices"][0]["message"]
    assert "tool_calls" not in message


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_stream() -> None:
    first, *middle, last = stream()
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert first["object"] == "chat.completion.chunk"
    assert [one["choices"][0]["delta"] for one in middle] == [{"content": piece} for piece in SCRIPT]
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert all(one["choices"][0]["finish_reason"] is None for one in middle)
    assert len({one["id"] for one in [first, *middle, last]}) == 1


def test_stream_usage() -> None:
    *chunks, last = stream(body={"stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(TEXT)
    assert all(one["usage"] is None for one in chunks)
    assert all("usage" not in one for one in stream())


def test_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    first, *chunks, _, _ = stream(body={"stream_options": options})
    assert first["usage"] is None
    counts = [one["usage"]["completion_tokens"] for one in chunks]
    assert counts == [len("".join(SCRIPT[: i + 1])) for i in range(len(SCRIPT))]


def test_failure_in_a_stream_is_an_event() -> None:
    done, _ = ask("POST", CHAT, {"messages": MESSAGES, "stream": True}, fail_at=1)
    *_, error, last = done.events()
    assert json.loads(error)["error"]["message"] == FAILURE
    assert last == "[DONE]"


def test_a_model_without_a_template_says_so() -> None:
    error = asking.refused(CHAT, {"messages": MESSAGES}, tokenizer=FakeTokenizer(has_chat_template=False))
    assert "no chat template" in error["message"]


# ---- sessions ----------------------------------------------------------------------------------------------------


def test_turns_of_a_session() -> None:
    """The prompt is what was said before, in tokens, and behind it what is new; over both APIs."""

    async def scene() -> None:
        client = FakeEngineClient(script=("Yes.",))
        sessions = session_store()
        app = asking.make_app(client, services={"session_store": sessions})
        session = sessions.open()
        first = await call(app, "POST", CHAT, {"messages": MESSAGES, "session_params": {"id": session}})
        assert first.status == 200
        assert _said(client) == "user: Hi\nassistant:"
        body = {"prompt": "\nuser: Sure?", "session_params": {"id": session, "rid": first.json()["id"]}}
        assert (await call(app, "POST", COMPLETIONS, body)).status == 200
        assert _said(client) == "user: Hi\nassistant:Yes.\nuser: Sure?"
        done = await call(app, "POST", CHAT, {"messages": MESSAGES, "session_params": {"id": "other"}})
        assert (done.status, done.json()["error"]["param"]) == (404, "session_params.id")

    asyncio.run(scene())


def _said(client: FakeEngineClient) -> str:
    return prompt_text(client.requests[-1].prompt)


# ---- grammars that are no good ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "kind", "field"),
    [
        (CHAT, {"messages": MESSAGES, **FORMAT}, "json_schema", "response_format.json_schema.schema"),
        (CHAT, {"messages": MESSAGES, "regex": "a"}, "regex", "regex"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}, "regex", "tools"),
        (COMPLETIONS, {"prompt": "a", **FORMAT}, "json_schema", "response_format.json_schema.schema"),
        ("/v1/responses", {"input": "a", "text": {"format": FLAT}}, "json_schema", "text.format.schema"),
    ],
)
def test_a_bad_grammar_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], kind: str, field: str, streamed: bool
) -> None:
    """It is found out after the request has been accepted; a stream has not begun by then."""

    async def refuse(self: FakeStream) -> Any:
        raise InvalidRequest(f"{kind}: invalid", param=kind, code="invalid_grammar")
        yield  # type: ignore[unreachable]

    monkeypatch.setattr(FakeStream, "_chunks", refuse)
    done, client = ask("POST", path, {**body, "stream": streamed}, context=fake_parsers())
    assert done.status == 400
    assert (done.json()["error"]["param"], done.json()["error"]["code"]) == (field, "invalid_grammar")
    assert client.aborted == [client.requests[0].rid]
