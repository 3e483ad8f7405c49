"""What clients send by default, or in the words of other servers, and what formats say beside their type."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from pegboard.conformance.fake_client import FakeTokenizer, prompt_text
from pegboard.core.interfaces.sampling import Grammar
from pegboard.toolkit.http import refusals
from tests.plugins.api_anthropic.parsers import fake_parsers
from tests.plugins.api_openai import asking
from tests.plugins.api_openai.asking import CHAT, COMPLETIONS, MESSAGES

RESPONSES = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"team": {"enum": ["Red", "Blue"]}}, "required": ["team"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "a"},
    RESPONSES: {"input": "a"},
}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def sampling(path: str, body: dict[str, Any], **more: Any) -> Any:
    return asking.post(path, {**NEEDED[path], **body}, **more)[1].requests[0].sampling


def formatted(path: str, form: dict[str, Any]) -> dict[str, Any]:
    return {"text": {"format": form}} if path == RESPONSES else {"response_format": form}


# ---- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_a_schema_beside_json_object_is_followed(path: str) -> None:
    """As llama.cpp, Together and Fireworks spell it. Without a type it describes an object."""
    for schema, wanted in (
        (SCHEMA, SCHEMA),
        ({"required": ["team"]}, {"type": "object", "required": ["team"]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": SCHEMA}}, {"$ref": "#/$defs/a", "$defs": {"a": SCHEMA}}),
    ):
        grammar = sampling(path, formatted(path, {"type": "json_object", "schema": schema})).grammar
        assert grammar == Grammar("json_schema", json.dumps(wanted, separators=(",", ":")))
    assert sampling(path, formatted(path, {"type": "json_object", "schema": {}})).grammar == Grammar("json_object")
    beside = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    assert sampling(path, formatted(path, beside)).grammar.kind == "json_schema"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_unknown_keys_of_a_format_are_refused_by_name(path: str) -> None:
    place = "text.format" if path == RESPONSES else "response_format"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"type": "text", "schema": SCHEMA}, "schema"),
        ({"type": "json_object", "grammar": "root ::= x"}, "grammar"),
        ({"type": "json_object", "schema": "no json"}, "schema"),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "json_schema"),
        ({"schema": SCHEMA}, "schema"),
    ]
    if path != RESPONSES:
        cases.append(({"type": "json_schema", "json_schema": {"schema": SCHEMA, "regex": "a"}}, "json_schema.regex"))
        cases.append(({"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": {"a": 1}}, "schema"))
    for form, name in cases:
        assert asking.refused(path, {**NEEDED[path], **formatted(path, form)})["param"] == f"{place}.{name}"
    harmless = {"type": "json_object", "name": "x", "strict": True, "description": "x", "grammar": None, "pattern": ""}
    assert sampling(path, formatted(path, harmless)).grammar == Grammar("json_object")


# ---- sampling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_values_that_ask_for_nothing(path: str) -> None:
    assert sampling(path, {"top_p": 0}).top_p == 1e-9
    for stop, wanted in (("", ()), ([""], ()), (["", "x"], ("x",)), ([], ())):
        assert sampling(path, {"stop": stop}).stop == wanted


# ---- templates and messages ----------------------------------------------------------------------------------------


def test_switches_that_a_template_does_not_read_pass() -> None:
    plain = asking.post(CHAT, {"messages": MESSAGES})[1].requests[0].prompt
    for kwargs in ({"enable_thinking": False}, {"thinking": True, "reasoning_effort": "low"}):
        for path in (CHAT, RESPONSES):
            body = {"messages": MESSAGES, "input": "Hi", "chat_template_kwargs": kwargs}
            assert asking.post(path, body)[1].requests[0].prompt == plain
    body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False, "enable_thinkin": True}}
    assert "'enable_thinkin'" in asking.refused(CHAT, body)["message"]


def prompt(messages: list[dict[str, Any]], template: str = "{{ messages | tojson }}") -> Any:
    tokenizer = FakeTokenizer(template=template)
    done, client = asking.ask("POST", CHAT, {"messages": messages}, tokenizer=tokenizer)
    assert done.status == 200, done.body
    return json.loads(prompt_text(client.requests[0].prompt))


def test_messages_in_other_words() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    text = {**call, "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = {"role": "tool", "tool_call_id": "c", "content": None}
    user = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    found = prompt([user, {"role": "assistant", "tool_calls": [call]}, answer])
    assert found == prompt([*MESSAGES, {"role": "assistant", "tool_calls": [text]}, {**answer, "content": ""}])


def test_functions_before_there_were_tools() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    told = {"role": "function", "name": "f", "content": "4"}
    asked, call, answer = prompt([*MESSAGES, called, told])
    assert asked == MESSAGES[0]
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert answer == {"role": "tool", "name": "f", "content": "4", "tool_call_id": call["tool_calls"][0]["id"]}
    own = "{% if messages[0].role == 'function' %}{% endif %}{{ messages | tojson }}"
    assert prompt([told], own) == [told]


# ---- tools ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "tool"), [(CHAT, TOOL), (RESPONSES, FLAT_TOOL)])
def test_choices_in_other_words(path: str, tool: dict[str, Any]) -> None:
    def forced(choice: Any) -> Any:
        return sampling(path, {"tools": [tool], "tool_choice": choice}, context=fake_parsers()).grammar

    flat, wrapped = {"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}
    assert forced(flat) == forced(wrapped) is not None
    assert forced("any") == forced("required") is not None


def test_keywords_that_are_null_are_not_there() -> None:
    """As clients write whole data classes: in schemas, not in values."""
    inner = {"type": "string", "description": None, "enum": None, "default": None, "minLength": None, "x-own": None}
    schema = {"type": "object", "properties": {"a": inner, "b": {"const": None}}, "items": None, "anyOf": None}
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": schema}}
    tokenizer = FakeTokenizer(template="{{ tools | tojson }}")
    done, client = asking.ask(
        "POST", CHAT, {"messages": MESSAGES, "tools": [tool]}, tokenizer=tokenizer, context=fake_parsers()
    )
    assert done.status == 200, done.body
    (seen,) = json.loads(prompt_text(client.requests[0].prompt))
    kept = {"type": "string", "default": None, "x-own": None}
    assert seen["function"]["parameters"] == {"type": "object", "properties": {"a": kept, "b": {"const": None}}}
    bad = {
        "messages": MESSAGES,
        "tools": [{**tool, "function": {"name": "f", "parameters": {"properties": {"a": None}}}}],
    }
    assert asking.refused(CHAT, bad)["param"] == "tools.0.function.parameters.properties.a"


# ---- the rest ------------------------------------------------------------------------------------------------------


def test_unknown_fields_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(refusals, "_reported", set())
    monkeypatch.setattr(refusals, "MAX_REPORTED", 2)
    with caplog.at_level(logging.INFO, logger=refusals.__name__):
        for _ in range(2):
            sampling(CHAT, {"typical_p": 0.5, "mirostat": 2, "length_penalty": 1.0, "tfs": 1, "user": "x"})
    assert [record.args for record in caplog.records] == [("typical_p",), ("mirostat",)]
