"""What parses nothing."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.toolkit.parsing.output_parser import Content, OutputEvent, OutputParser, ParserStream, ToolFunction


class _PlainStream(ParserStream):
    """Passes text on."""

    def feed(self, text: str) -> list[OutputEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        return []


class PlainParser(OutputParser):
    """Everything is content."""

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _PlainStream()
