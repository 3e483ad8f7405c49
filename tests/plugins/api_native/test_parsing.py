"""/parse_function_call, /separate_reasoning, /encode and /classify."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.parsing.output_parser import (
    Content,
    OutputEvent,
    OutputParser,
    OutputParserContext,
    ParserStream,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from tests.plugins.api_native.asking import Server, asked, played


class _Whole(ParserStream):
    """Parses when the text has ended."""

    def __init__(self) -> None:
        self.text = ""

    def feed(self, text: str) -> list[OutputEvent]:
        self.text += text
        return []

    def finish(self) -> list[OutputEvent]:
        raise NotImplementedError


class _Calls(_Whole):
    def finish(self) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for number, (name, arguments) in enumerate(re.findall(r"\[(\w+) (.*?)\]", self.text)):
            events += [ToolCallStart(number, name), ToolCallArguments(number, arguments)]
        rest = re.sub(r"\[.*?\]", "", self.text)
        return [*events, Content(rest)] if rest else events


class _Thoughts(_Whole):
    def finish(self) -> list[OutputEvent]:
        thought, mark, rest = self.text.rpartition("|")
        return [Reasoning(thought), Content(rest)] if mark else [Content(rest)]


class Brackets(OutputParser):
    """``[name {...}]``"""

    def stream(self, tools: Sequence[Mapping[str, Any]] = (), *, prompt: str = "") -> ParserStream:
        return _Calls()


class Bars(OutputParser):
    """``thinking|answer``"""

    def stream(self, tools: Sequence[Mapping[str, Any]] = (), *, prompt: str = "") -> ParserStream:
        return _Thoughts()


ABOUT = OutputParserContext("", "Fake", "fake")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]


@pytest.mark.parametrize("more", [{}, {"tool_call_parser": "brackets"}, {"tool_call_parser": None}])
def test_calls_are_found(more: dict[str, Any]) -> None:
    body = {"text": 'Well. [f {"a": 1}][g {}]', "tools": TOOLS, **more}
    done, _ = asked("/parse_function_call", body, services={"tool_parser": Brackets(NoOptions(), ABOUT)})
    assert done.status == 200, done.body
    assert done.json() == {
        "normal_text": "Well. ",
        "calls": [
            {"tool_index": 0, "name": "f", "parameters": '{"a": 1}'},
            {"tool_index": 1, "name": "g", "parameters": "{}"},
        ],
    }


def test_a_long_text_is_parsed_too() -> None:
    text = "word " * 5000
    done, _ = asked(
        "/parse_function_call",
        {"text": text + "[f {}]", "tools": TOOLS},
        services={"tool_parser": Brackets(NoOptions(), ABOUT)},
    )
    assert done.json() == {"normal_text": text, "calls": [{"tool_index": 0, "name": "f", "parameters": "{}"}]}


def test_without_a_parser_all_is_text() -> None:
    assert asked("/parse_function_call", {"text": "[f {}]", "tools": TOOLS})[0].json() == {
        "normal_text": "[f {}]",
        "calls": [],
    }
    assert asked("/separate_reasoning", {"text": "a|b"})[0].json() == {"reasoning_text": "", "text": "a|b"}


def test_reasoning_is_separated() -> None:
    done, _ = asked("/separate_reasoning", {"text": "hm|yes"}, services={"reasoning_parser": Bars(NoOptions(), ABOUT)})
    assert done.json() == {"reasoning_text": "hm", "text": "yes"}


_GPT = "<|channel|>commentary<|message|>Look.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("deepseek_r1", "Hm\n</think>\n\nFour.", ("Hm", "Four.")),
        ("deepseek_r1", "<think>Hm</think>Four.", ("Hm", "Four.")),
        ("deepseek_r1", "It is <think>Hm</think>.", ("", "It is <think>Hm</think>.")),
        ("deepseek_r1", "Four.", ("", "Four.")),
        ("gemma4", "Hm<channel|>Four.", ("Hm", "Four.")),
        ("harmony", _GPT, ("", "Look.\nFour.")),
    ],
)
def test_a_thought_that_the_prompt_began_is_separated(name: str, text: str, expected: tuple[str, str]) -> None:
    record = Registry.discover().get("reasoning_parser", name)
    assert record is not None
    parser = record.load()(record.options_model()(), ABOUT)
    done, _ = asked("/separate_reasoning", {"text": text}, services={"reasoning_parser": parser})
    assert (done.json()["reasoning_text"], done.json()["text"]) == expected


def test_another_parser_than_the_servers_is_refused_by_name() -> None:
    done, _ = asked("/parse_function_call", {"text": "a", "tools": TOOLS, "tool_call_parser": "braces"})
    assert (done.status, done.json()["error"]["param"]) == (400, "tool_call_parser")
    assert "'brackets'" in done.json()["error"]["message"]


@pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"type": "function", "function": {"name": 5}}])
def test_48944_odd_tools_are_refused(tool: dict[str, Any]) -> None:
    done, _ = asked("/parse_function_call", {"text": "a", "tools": [tool]})
    assert done.status == 400
    assert done.json()["error"]["param"].startswith("tools")


# ---- vectors --------------------------------------------------------------------------------------------------------


def test_encode() -> None:
    done, client = asked("/encode", {"text": "Hello", "rid": "r", "priority": 2, "cache_salt": "s"})
    answer = done.json()
    assert math.isclose(math.hypot(*answer["embedding"]), 1.0)
    meta = answer["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["cached_tokens"]) == ("r", 5, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    [request] = client.embedded
    assert (request.prompt, request.rid, request.priority, request.cache_salt) == ("Hello", "r", 2, "s")


def test_batches_are_encoded_in_order() -> None:
    async def scene(server: Server) -> None:
        both = await server.told("/encode", {"text": ["a", "bcd"], "rid": ["x", "y"]})
        assert [(one["meta_info"]["id"], one["meta_info"]["prompt_tokens"]) for one in both] == [("x", 1), ("y", 3)]
        [one] = await server.told("/encode", {"input_ids": [[98, 99, 100]]})
        assert one["embedding"] == both[1]["embedding"]
        assert one["meta_info"]["id"]
        short = await server.told("/encode", {"text": "bcd", "dimensions": 2, "normalize": False})
        assert len(short["embedding"]) == 2
        assert not math.isclose(math.hypot(*short["embedding"]), 1.0)

    played(scene)


def test_a_client_that_leaves_ends_its_encoding() -> None:
    async def scene(server: Server) -> None:
        cancelled = asyncio.Event()

        async def embed(requests: object) -> list[Any]:
            server.client.submitted.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return []

        server.client.embed = embed  # type: ignore[method-assign]
        exchange = server.begin("/encode", json.dumps({"text": "a"}).encode())
        await server.client.submitted.wait()
        exchange.leave()
        await exchange.end()
        assert cancelled.is_set()

    played(scene)


def test_classify_needs_a_head() -> None:
    done, client = asked("/classify", {"text": "Hello"})
    assert (done.status, done.json()["error"]["code"]) == (400, "no_classifier")
    assert "classification head" in done.json()["error"]["message"]
    assert client.embedded == []
