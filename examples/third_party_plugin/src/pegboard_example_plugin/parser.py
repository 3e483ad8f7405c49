"""Tool calls between two markers: `[[get_weather {"city": "Rome"}]]`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces import Grammar
from pegboard.toolkit.parsing.call_stream import CallStream
from pegboard.toolkit.parsing.json_stream import write
from pegboard.toolkit.parsing.output_parser import OutputParser
from pegboard.toolkit.parsing.text_stream import Broken

from pegboard_example_plugin.options import BracketedOptions

if TYPE_CHECKING:
    from pegboard.toolkit.parsing.output_parser import EarlierCall, ParserStream, ToolFunction
    from pegboard.toolkit.parsing.text_stream import Reading

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_LONGEST = 64


class BracketedParser(OutputParser[BracketedOptions]):
    """Reads calls as they come, writes earlier ones, explains itself to the model, and can force an answer to call."""

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return BracketedStream(tools, self.options)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        if not required:
            return None
        begin, end = self.options.begin, self.options.end
        structures = [
            {"begin": f"{begin}{one['name']} ", "schema": {"type": "object", **one.get("parameters", {})}, "end": end}
            for one in tools
            if not name or one["name"] == name
        ]
        tag = {"structures": structures, "at_least_one": True, "separator": "\n", "stop_after_first": not parallel}
        return Grammar("structural_tag", json.dumps(tag))

    def instructions(self, tools: Sequence[ToolFunction]) -> str:
        form = f'{self.options.begin}name {{"argument": "value"}}{self.options.end}'
        return "\n".join([f"To call a function, write {form}. The functions are:", *map(write, tools)])

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        begin, end = self.options.begin, self.options.end
        return "\n".join(f"{begin}{one['name']} {write(one['arguments'])}{end}" for one in calls)


class BracketedStream(CallStream):
    """One answer. `run` reads as if all of its text were there, and is suspended wherever it ends."""

    def __init__(self, tools: Sequence[ToolFunction], options: BracketedOptions) -> None:
        super().__init__(tools)
        self._begin, self._end = options.begin, options.end

    def run(self) -> Reading[None]:
        while (yield from self.content(self._begin)):
            yield from self.attempt(self._call(), self._end)

    def _call(self) -> Reading[None]:
        name = yield from self.source.read_run(_NAME, _LONGEST)
        self.check(name)
        yield from self.source.skip_space()
        yield from self.read_object(name)
        yield from self.source.skip_space()
        if not (yield from self.source.read_marker(self._end)):
            raise Broken
