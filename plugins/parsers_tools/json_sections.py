"""JSON calls in sections: Granite, Phi-4-mini and Hunyuan write lists, Kimi K2 names and arguments between its tokens::

    <|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]
    <tool_calls>[{"name": "weather", "arguments": {"city": "Rome"}}]</tool_calls>
    <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Rome"}
    <|tool_call_end|><|tool_calls_section_end|>

(the last two lines being one). Sources: the models' chat templates and cards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.parsers_tools.grammars import Around, chosen, tagged
from pegboard.plugins.parsers_tools.json_formats import MarkedJsonStream
from pegboard.toolkit.parsing.call_stream import CallStream
from pegboard.toolkit.parsing.json_stream import write
from pegboard.toolkit.parsing.output_parser import (
    EarlierCall,
    OutputParser,
    OutputParserContext,
    ParserStream,
    ToolFunction,
)
from pegboard.toolkit.parsing.text_stream import Broken, Reading

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_IDS = "tool_declare<|im_middle|>"
_ID = re.compile(r"[A-Za-z0-9_.:-]+")
_MOST = 256
_WRITTEN = re.compile(rf"{re.escape(_CALL)}(functions\.[A-Za-z0-9_.-]+:[0-9]+)")
_PARTS = re.compile(r"(?:functions\.)?(.+?)(?::([0-9]{1,9}))?")


class _ListParser(OutputParser[NoOptions]):
    """A list of JSON objects after a marker."""

    skip_special_tokens = False
    begin: str
    end: str
    written_end: str
    """What models write at the end of the list, "" for nothing."""

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return MarkedJsonStream(self.begin, self.end, tools)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        around = Around('{"name": {name}, "arguments": ', "}", f"{self.begin}[", ", ", f"]{self.written_end}")
        return tagged(chosen(tools, name), around, parallel=parallel, required=required, trigger=self.begin)

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return (self.begin,)

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        listed = [{"name": one["name"], "arguments": one["arguments"]} for one in calls]
        return f"{self.begin}{write(listed)}{self.written_end}" if calls else ""


class GraniteParser(_ListParser):
    """Granite 3, and Phi-4-mini, which ends the list. Granite 4 writes as Hermes does."""

    begin, end, written_end = "<|tool_call|>", "<|/tool_call|>", ""
    call_markers = (begin,)

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        if cls.begin in ctx.chat_template and "<tool_call>" not in ctx.chat_template:
            return None
        return f"the chat template has no {cls.begin}"


class HunyuanParser(_ListParser):
    """Hunyuan."""

    begin, end, written_end = "<tool_calls>", "</tool_calls>", "</tool_calls>"
    call_markers = (begin,)

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        return None if cls.begin in ctx.chat_template else f"the chat template has no {cls.begin}"


class KimiParser(OutputParser[NoOptions]):
    """Kimi K2: an id that has the function's name, and JSON. The id is the call's in the answer, too: the template
    shows it to the model again. Where the prompt or the answer has it already, the number is the next free one.
    """

    skip_special_tokens = False
    call_markers = (_SECTION, _CALL)

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        # The template of the first K2 has only the tools, and not the calls.
        if _ARGUMENTS in ctx.chat_template or _KIMI_IDS in ctx.chat_template:
            return None
        return f"the chat template has neither {_ARGUMENTS} nor {_KIMI_IDS}"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _KimiStream(tools, prompt)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        around = Around(f"{_CALL}functions.{{bare}}:0{_ARGUMENTS}", _CALL_END, _SECTION, "", _SECTION_END)
        return tagged(chosen(tools, name), around, parallel=parallel, required=required, trigger=_SECTION)

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return (_SECTION,)

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        written = (
            f"{_CALL}functions.{one['name']}:{index}{_ARGUMENTS}{write(one['arguments'])}{_CALL_END}"
            for index, one in enumerate(calls)
        )
        return f"{_SECTION}{''.join(written)}{_SECTION_END}" if calls else ""


class _KimiStream(CallStream):
    def __init__(self, tools: Sequence[ToolFunction], prompt: str) -> None:
        super().__init__(tools)
        self._taken = set(_WRITTEN.findall(prompt))

    def run(self) -> Reading[None]:
        markers: tuple[str, ...] = (_CALL, _SECTION)
        while marker := (yield from self.content(*markers)):
            if marker in (_CALL_END, _SECTION_END):
                self.leave_out_marker()
            else:
                called = yield from self.attempt(self._call(marker), _CALL_END)
                markers = (_CALL, _SECTION, *((_CALL_END, _SECTION_END) if called else ()))

    def _call(self, marker: str) -> Reading[None]:
        source = self.source
        yield from source.skip_space()
        if marker == _SECTION and not (yield from source.read_marker(_CALL)):
            raise Broken
        yield from source.skip_space()
        parts = _PARTS.fullmatch((yield from source.read_run(_ID, _MOST)))
        yield from source.skip_space()
        if parts is None or not (yield from source.read_marker(_ARGUMENTS)):
            raise Broken
        name = parts.group(1)
        self.check(name)
        yield from source.skip_space()
        yield from self.read_object(name, self._new(name, int(parts.group(2) or 0)))

    def _new(self, name: str, number: int) -> str:
        while (found := f"functions.{name}:{number}") in self._taken:
            number += 1
        self._taken.add(found)
        return found
