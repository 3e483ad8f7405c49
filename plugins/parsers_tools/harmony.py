"""Calls in gpt-oss's harmony format: messages with a recipient, whose text is the arguments::

    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

Source: https://cookbook.openai.com/articles/openai-harmony. Thinking and other messages are the reasoning parser's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.parsers_tools.grammars import Around, chosen, tagged
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

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>assistant"
_ENDS = ("<|call|>", "<|end|>", "<|return|>")
_TO = "to=functions."
_BEGIN, _REST = f"{_CHANNEL}commentary {_TO}", f" <|constrain|>json{_MESSAGE}"
_RUN = re.compile(r"[^<]+|<")
_MOST = 256
"""Longest header of a message."""
_NAME = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")


class HarmonyParser(OutputParser[NoOptions]):
    """Messages to functions, in any channel; the recipient may stand before the channel or after it."""

    skip_special_tokens = False

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        return None if _CHANNEL in ctx.chat_template else f"the chat template has no {_CHANNEL}"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _HarmonyStream(tools)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        # The prompt has the first message's beginning. <|call|> would end the answer, so it is left to the model.
        around = Around(f"{_BEGIN}{{bare}}{_REST}", "", between=f"<|end|>{_START}")
        return tagged(chosen(tools, name), around, parallel=parallel, required=required, trigger=_BEGIN)

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return (_BEGIN,)

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        return _START.join(f"{_BEGIN}{one['name']}{_REST}{write(one['arguments'])}{_ENDS[0]}" for one in calls)


class _HarmonyStream(CallStream):
    def run(self) -> Reading[None]:
        source = self.source
        # The prompt ends with the role, after which the recipient may stand.
        space = yield from source.skip_space()
        begun = yield from source.starts_with(_TO)
        if begun:
            source.start_record(space)
        else:
            self.sink.content(space)
        markers: tuple[str, ...] = (_START, _CHANNEL)
        while begun or (marker := (yield from self.content(*markers))):
            if not begun and marker in _ENDS:
                self.leave_out_marker()
                markers = (_START, _CHANNEL)
            else:
                called = yield from self.attempt(self._call(), _ENDS[0])
                markers = (_START, _CHANNEL, *_ENDS) if called else (_START, _CHANNEL)
            begun = False

    def _call(self) -> Reading[None]:
        source = self.source
        header = ""
        while not (yield from source.read_marker(_MESSAGE)):
            if not (yield from source.peek()) or len(header) > _MOST:
                raise Broken
            header += source.run_of(_RUN)
        found = _NAME.search(header)
        if found is None:
            raise Broken
        name = found.group(1)
        self.check(name)
        yield from source.skip_space()
        for end in _ENDS:
            if (yield from source.starts_with(end)):
                self.tell_whole(name, "{}")
                return
        yield from self.read_object(name)
