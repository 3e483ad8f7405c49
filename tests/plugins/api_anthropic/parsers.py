"""Parsers of a made-up format: ``((thinking))`` and ``[[name|{arguments}]]``, a character at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar
from pegboard.toolkit.parsing.output_parser import (
    Content,
    OutputEvent,
    OutputParser,
    OutputParserContext,
    ParserStream,
    Reasoning,
    ThoughtForm,
    ToolCallArguments,
    ToolCallStart,
)

CONTEXT = OutputParserContext("", "", "")


class _Thoughts(ParserStream):
    def __init__(self) -> None:
        self.inside = False
        self.held = ""

    def feed(self, text: str) -> list[OutputEvent]:
        out: list[OutputEvent] = []
        for char in text:
            if self.held + char in ("((", "))"):
                self.inside, self.held = char == "(", ""
            elif char in "()":
                self.held = char
            else:
                out.append(Reasoning(self.held + char) if self.inside else Content(self.held + char))
                self.held = ""
        return out

    def finish(self) -> list[OutputEvent]:
        return [Content(self.held)] if self.held else []


class _Calls(ParserStream):
    def __init__(self) -> None:
        self.inside = False
        self.held = ""
        self.name: str | None = None
        self.index = -1

    def feed(self, text: str) -> list[OutputEvent]:
        out: list[OutputEvent] = []
        for char in text:
            if self.held + char in ("[[", "]]"):
                self.inside, self.held, self.name = char == "[", "", None
                self.index += self.inside
            elif char in "[]":
                self.held = char
            elif not self.inside:
                out.append(Content(self.held + char))
                self.held = ""
            elif self.name is None or not self.name.endswith("|"):
                self.name = (self.name or "") + char
                if char == "|":
                    out.append(ToolCallStart(self.index, self.name[:-1]))
            else:
                out.append(ToolCallArguments(self.index, self.held + char))
                self.held = ""
        return out

    def finish(self) -> list[OutputEvent]:
        return [Content(self.held)] if self.held else []


class FakeReasoning(OutputParser):
    def stream(self, tools: Sequence[Mapping[str, Any]] = (), *, prompt: str = "") -> ParserStream:
        return _Thoughts()

    def thought_form(self, *, prompt: str = "") -> ThoughtForm | None:
        return ThoughtForm("((", ("))",), ("))",))


class FakeCalls(OutputParser):
    skip_special_tokens = False

    def stream(self, tools: Sequence[Mapping[str, Any]] = (), *, prompt: str = "") -> ParserStream:
        return _Calls()

    def constraint(
        self, tools: Sequence[Mapping[str, Any]], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        return Grammar("regex", f"{name or 'any'} {parallel}") if required else None


def fake_parsers() -> dict[str, Any]:
    """What an ApiContext with these parsers is made with."""
    parsers = {"tool_parser": FakeCalls(NoOptions(), CONTEXT), "reasoning_parser": FakeReasoning(NoOptions(), CONTEXT)}
    return {"services": parsers}
