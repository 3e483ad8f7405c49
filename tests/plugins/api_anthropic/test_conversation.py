"""Anthropic's conversations as chat templates read them."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_anthropic.conversation import continues, template_messages
from tests.plugins.api_anthropic.test_router import BODY, PATH, TOOL, ask, message

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
CALLED = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}
RESULTED = {"role": "tool", "tool_call_id": "toolu_1", "name": "add", "content": "2"}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


@pytest.mark.parametrize(
    "system", ["Be terse.\nBe kind.", [text("Be terse.", cache_control={"type": "ephemeral"}), text("Be kind.")]]
)
def test_system(system: Any) -> None:
    assert template_messages(system, [USER]) == [{"role": "system", "content": "Be terse.\nBe kind."}, USER]
    assert template_messages("", [USER]) == [USER]


def test_system_messages_stand_where_they_are() -> None:
    later = {"role": "system", "content": "Now in French."}
    assert template_messages("", [USER, later]) == [USER, later]
    assert template_messages("Be terse.", [{**later, "content": [text("Be kind.")]}, USER]) == [
        {"role": "system", "content": "Be terse.\nBe kind."},
        USER,
    ]


def test_blocks_of_text_are_joined() -> None:
    assert template_messages("", [turn("user", text("a"), text("b"))]) == [{"role": "user", "content": "a\nb"}]
    assert template_messages("", [turn("user")]) == [{"role": "user", "content": ""}]


def test_messages_of_one_role_are_one() -> None:
    found = template_messages("", [USER, turn("user", text("there")), {"role": "assistant", "content": "Yes"}])
    assert found == [{"role": "user", "content": "Hi\nthere"}, {"role": "assistant", "content": "Yes"}]
    first, second = turn("assistant", text("a"), CALL), turn("assistant", {**CALL, "id": "toolu_2"}, text("b"))
    [merged] = template_messages("", [first, second])
    assert merged["content"] == "a\nb"
    assert [call["id"] for call in merged["tool_calls"]] == ["toolu_1", "toolu_2"]  # type: ignore[attr-defined]


def test_documents_of_text() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    inner = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}
    found = {"type": "search_result", "source": "here", "title": "S", "content": [text("c")]}
    [one] = template_messages("", [turn("user", document, inner, found)])
    assert one["content"] == "T\nD\na\nb\nS (here)\nc"


def test_calls_and_results() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    found = template_messages(
        "", [USER, turn("assistant", thought, redacted, text("I add."), CALL), turn("user", RESULT, text("So?"))]
    )
    assert found == [
        USER,
        {"role": "assistant", "content": "I add.", "reasoning_content": "Hm.", "tool_calls": [CALLED]},
        RESULTED,
        {"role": "user", "content": "So?"},
    ]


def test_results_of_all_kinds() -> None:
    called = turn("assistant", CALL)
    for result, content in (
        ({**RESULT, "content": [text("a"), text("b")]}, "a\nb"),
        ({"type": "tool_result", "tool_use_id": "toolu_1"}, ""),
        ({**RESULT, "is_error": True}, "Error: 2"),
        ({**RESULT, "is_error": None}, "2"),
    ):
        assert template_messages("", [USER, called, turn("user", result)])[-1] == {**RESULTED, "content": content}


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([5], "messages.0"),
        ([{"role": "robot", "content": "Hi"}], "messages.0.role"),
        ([{"content": "Hi"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([USER, turn("assistant", 5)], "messages.1.content.0"),
        ([turn("user", text("a"), {"text": "b"})], "messages.0.content.1"),
        ([turn("user", {"type": "text"})], "messages.0.content.0.text"),
        ([turn("user", {"type": "image", "source": {}})], "messages.0.content.0"),
        ([turn("user", {"type": "video"})], "messages.0.content.0.type"),
        ([turn("user", {"type": "document", "source": {"type": "base64"}})], "messages.0.content.0.source"),
        ([turn("user", {"type": "document"})], "messages.0.content.0.source"),
        ([turn("user", CALL)], "messages.0.content.0.type"),
        ([turn("assistant", RESULT)], "messages.0.content.0.type"),
        ([turn("user", RESULT)], "messages.0.content.0.tool_use_id"),
        ([turn("user", {"type": "tool_result"})], "messages.0.content.0.tool_use_id"),
        ([turn("assistant", {**CALL, "input": "x"})], "messages.0.content.0.input"),
        ([turn("assistant", {**CALL, "id": 5})], "messages.0.content.0.id"),
        ([turn("assistant", CALL), turn("user", {**RESULT, "is_error": 1})], "messages.1.content.0.is_error"),
        (
            [turn("assistant", CALL), turn("user", {**RESULT, "content": [{"type": "image"}]})],
            "messages.1.content.0.content.0",
        ),
    ],
)
def test_what_is_malformed_is_named(messages: list[Any], where: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template_messages("", messages)
    assert caught.value.param == where
    assert where in caught.value.message


def test_bad_system_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        template_messages([text("a"), {"type": "image"}], [USER])
    assert caught.value.param == "system.1"


def test_the_assistants_last_message_is_continued() -> None:
    begun = {"role": "assistant", "content": "The answer is"}
    assert continues([USER, begun])
    assert not continues([begun, USER])
    _, client = message(messages=[USER, begun])
    assert client.requests[0].prompt == "user: Hi\nassistant: The answer is"
    done, _ = ask(PATH, {**BODY, "messages": [USER, turn("assistant", text("I add."), CALL)], "tools": [TOOL]})
    assert done.status == 400
    assert "messages.1" in done.json()["error"]["message"]
