"""Calls in which a model writes half a surrogate pair: no API could write such a text as UTF-8."""

from __future__ import annotations

import json

import msgspec
import pytest

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.registry.registry import Registry
from pegboard.plugins.api_anthropic.responses import MessageWriter
from pegboard.plugins.api_ollama.answers import AnswerWriter
from pegboard.toolkit.chat.tool_calls import ChatStream, Tools
from pegboard.toolkit.http.generation import Answer
from pegboard.toolkit.parsing.output_parser import OutputParserContext

TOOLS = Tools(({"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "object"}}}},))
WANTED = {"a": {"b": "Rome \ufffd"}}
OBJECT = r'{"a": {"b": "Rome \ud83d"}}'
TEXTS = {
    "hermes": f'<tool_call>{{"name": "f", "arguments": {OBJECT}}}</tool_call>',
    "hermes, written as a string": f'<tool_call>{{"name": "f", "arguments": {json.dumps(OBJECT)}}}</tool_call>',
    "hermes, half as a string": '<tool_call>{"name": "f", "arguments": "'
    '{\\"a\\": {\\"b\\": \\"Rome \\ud83d\\"}}"}</tool_call>',
    "mistral": f'[TOOL_CALLS][{{"name": "f", "arguments": {json.dumps(OBJECT)}}}]',
    "qwen3_coder": '<tool_call><function=f><parameter=a>\n{"b": "Rome \\ud83d"}\n</parameter></function></tool_call>',
    "pythonic": r"[f(a={'b': 'Rome \ud83d'})]",
}


def parsed(case: str) -> ChatStream:
    record = Registry.discover().get("tool_parser", case.partition(",")[0])
    assert record is not None
    return ChatStream(tools=TOOLS, tool_parser=record.load()(NoOptions(), OutputParserContext("", "", "")))


@pytest.mark.parametrize("case", TEXTS)
def test_ollama(case: str) -> None:
    writer = AnswerWriter("m", parsed(case), chat=True)
    parts = [*writer.more(TEXTS[case]), *writer.rest(ended=True)]
    lines = [msgspec.json.decode(msgspec.json.encode(writer.line(part))) for part in parts]
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == [("f", WANTED)]


@pytest.mark.parametrize("case", TEXTS)
def test_anthropic(case: str) -> None:
    writer = MessageWriter("m", "m", parsed(case), max_tokens=99)
    message = msgspec.json.decode(msgspec.json.encode(writer.message(Answer("r", text=TEXTS[case]))))
    assert [(block["name"], block["input"]) for block in message["content"]] == [("f", WANTED)]


@pytest.mark.parametrize("case", TEXTS)
def test_what_is_told_is_text(case: str) -> None:
    """As OpenAI's routes pass it on."""
    [call] = parsed(case).collect(TEXTS[case]).calls
    call.arguments.encode("utf-8")
    assert isinstance(json.loads(call.arguments), dict)
