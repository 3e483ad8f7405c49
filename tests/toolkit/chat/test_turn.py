"""A conversation's next turn: what it asks for, and who reads its answer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fastapi import Request

from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar
from pegboard.toolkit.chat.thinking import effort_hints
from pegboard.toolkit.chat.tool_calls import Tools
from pegboard.toolkit.chat.turn import Turn, take_turn
from pegboard.toolkit.grammars.grammar import any_of
from pegboard.toolkit.parsing.output_parser import (
    Content,
    OutputEvent,
    OutputParser,
    OutputParserContext,
    ParserStream,
    Reasoning,
)

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
ADD = ({"name": "add", "parameters": {"type": "object"}},)
STRICT = ({"name": "add", "parameters": {"type": "object"}, "strict": True},)
OWN = Grammar("regex", "a+")


class Shout(ParserStream):
    """Takes capitals for thinking."""

    def feed(self, text: str) -> list[OutputEvent]:
        return [Reasoning(char) if char.isupper() else Content(char) for char in text]

    def finish(self) -> list[OutputEvent]:
        return []


class Parser(OutputParser):
    """Has a grammar of a kind of its own for each demand; its markers are special tokens."""

    skip_special_tokens = False

    def stream(self, tools: Sequence[Mapping[str, Any]] = (), *, prompt: str = "") -> ParserStream:
        return Shout()

    def constraint(
        self, tools: Sequence[Mapping[str, Any]], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        return Grammar("structural_tag" if required else "ebnf", f"{name}:{parallel}")

    def openings(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        return "A", "D"


def turn(
    messages: Any = (USER,),
    *,
    parsers: bool = True,
    features: Sequence[str] = ("grammar.ebnf",),
    most: int | None = None,
    **more: Any,
) -> Turn:
    async def silence() -> Any:
        await asyncio.Event().wait()

    async def scene() -> Turn:
        client = FakeEngineClient()
        client._info = dataclasses.replace(
            client.info, features=tuple(features), stages={"grammar": {"max_source_bytes": most}}
        )
        parser = Parser(NoOptions(), OutputParserContext("", "", "")) if parsers else None
        ctx = ApiContext(client=client, max_body_bytes=1, services={"tool_parser": parser, "reasoning_parser": parser})
        request = Request({"type": "http", "headers": []}, silence)
        return await take_turn(ctx, request, list(messages), **{"tools": Tools(), "grammar": None, **more})

    return asyncio.run(scene())


def test_a_plain_turn() -> None:
    found = turn()
    assert found.prompt == "user: Hi\nassistant:"
    assert (found.prefill, found.grammar, found.tool_parser, found.constrained) == ("", None, None, False)
    assert not found.skip_special_tokens, "the thinking has markers"
    assert found.stream().collect("aBc").reasoning == "B"
    plain = turn(separate_reasoning=False)
    assert plain.skip_special_tokens
    assert plain.stream().collect("aBc").content == "aBc"
    assert not turn(separate_reasoning=False, skip_special=False).skip_special_tokens


def test_a_turn_may_have_begun() -> None:
    found = turn([USER, {"role": "assistant", "content": "So"}], continue_final_message=True)
    assert (found.prompt, found.prefill) == ("user: Hi\nassistant: So", "So")


def test_tools_that_may_be_used() -> None:
    found = turn(tools=Tools(ADD))  # type: ignore[arg-type]
    assert found.tool_parser is not None
    assert (found.grammar, found.constrained) == (None, False)
    strict = turn(tools=Tools(STRICT))  # type: ignore[arg-type]
    assert (strict.grammar, strict.constrained) == (Grammar("ebnf", ":True"), False)
    silent = turn(tools=Tools(ADD, "none"))  # type: ignore[arg-type]
    assert silent.tool_parser is None


def test_tools_that_must_be_used() -> None:
    found = turn(tools=Tools(ADD, "required", parallel=False))  # type: ignore[arg-type]
    assert (found.grammar, found.constrained) == (Grammar("structural_tag", ":False"), True)
    named = turn(tools=Tools(ADD, "required", "add"))  # type: ignore[arg-type]
    assert named.grammar == Grammar("structural_tag", "add:False")


def test_an_answer_with_a_grammar_of_its_own_holds_no_calls() -> None:
    found = turn(tools=Tools(STRICT), grammar=OWN)  # type: ignore[arg-type]
    assert (found.grammar, found.constrained, found.tool_parser) == (OWN, True, None)
    # But a tag is free text with structures in it.
    tag = Grammar("structural_tag", "{}")
    tagged = turn(tools=Tools(ADD), grammar=tag)  # type: ignore[arg-type]
    assert (tagged.grammar, tagged.constrained) == (tag, False)
    assert tagged.tool_parser is not None


JSON = Grammar("json_schema", "{}")
EITHER = ("grammar.any_of", "grammar.json_schema", "grammar.structural_tag")


def test_an_answer_with_a_format_is_that_or_calls() -> None:
    found = turn(tools=Tools(ADD), grammar=JSON, features=EITHER)  # type: ignore[arg-type]
    assert found.grammar == any_of(Grammar("structural_tag", ":True"), JSON)
    assert (found.constrained, found.openings, found.skip_special_tokens) == (True, ("A", "D"), False)
    assert found.tool_parser is not None
    plain = turn(tools=Tools(ADD), grammar=JSON, features=EITHER, separate_reasoning=False)  # type: ignore[arg-type]
    assert plain.stream().collect("xAy").content == "xAy", "it begins as no call does, so that there is none in it"
    # Where it cannot be so, the format goes first.
    for missing in EITHER:
        features = [one for one in EITHER if one != missing]
        plain = turn(tools=Tools(ADD), grammar=JSON, features=features)  # type: ignore[arg-type]
        assert (plain.grammar, plain.openings, plain.tool_parser) == (JSON, (), None), missing
    whole = any_of(Grammar("structural_tag", ":True"), JSON)
    size = len(whole.source)
    for most, used in ((size, whole), (size - 1, JSON)):
        found = turn(tools=Tools(ADD), grammar=JSON, features=EITHER, most=most)  # type: ignore[arg-type]
        assert (found.grammar, found.openings != (), found.tool_parser is None) == (used, used is whole, used is JSON)
    silent = turn(tools=Tools(ADD, "none"), grammar=JSON, features=EITHER)  # type: ignore[arg-type]
    assert (silent.grammar, silent.openings, silent.tool_parser) == (JSON, (), None)


def test_a_call_that_is_required_goes_before_a_format() -> None:
    for form in (JSON, Grammar("json_object"), Grammar("structural_tag", "{}")):
        found = turn(tools=Tools(ADD, "required"), grammar=form, features=EITHER)  # type: ignore[arg-type]
        assert (found.grammar, found.openings) == (Grammar("structural_tag", ":True"), ())
        assert found.tool_parser is not None


def test_what_cannot_be() -> None:
    with pytest.raises(InvalidRequest, match="no tool parser") as caught:
        turn(parsers=False, tools=Tools(ADD))  # type: ignore[arg-type]
    assert caught.value.param == "tools"
    with pytest.raises(InvalidRequest, match="leave one of them out") as caught:
        turn(tools=Tools(ADD, "required"), grammar=OWN)  # type: ignore[arg-type]
    assert caught.value.param == "tool_choice"


def test_effort() -> None:
    assert effort_hints(None) == {}
    assert effort_hints("none") == {"reasoning_effort": "none", "enable_thinking": False}
    assert effort_hints("low") == {"reasoning_effort": "low", "enable_thinking": True}
