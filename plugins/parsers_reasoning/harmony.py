"""Channels of gpt-oss's harmony format: an answer is several messages, each of which says for whom it is::

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>

Source: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.parsers_reasoning.parsers import ThoughtStream
from pegboard.toolkit.parsing.output_parser import (
    OutputParser,
    OutputParserContext,
    ParserStream,
    ThoughtForm,
    ToolFunction,
)
from pegboard.toolkit.parsing.text_stream import Broken, Reading

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ANALYSIS = f"{_CHANNEL}analysis{_MESSAGE}"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_NEXT = f"{_START}assistant"
"""How a message begins whose predecessor has no end."""
_OTHERS = (f"{_CHANNEL}final", f"{_CHANNEL}commentary")
"""How a message begins that follows a thought without an end or a role."""
_RUN = re.compile(r"[^<]+|<")
_MOST = 256
"""Longest header of a message."""
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_CUT, _FOR_A_TOOL, _FINAL = "", "to=", "final"


class HarmonyParser(OutputParser[NoOptions]):
    """The channel `analysis` is thinking, other messages to the user are content. Calls, which have a recipient, are
    left to the tool parser as they stand.
    """

    skip_special_tokens = False

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        return None if _CHANNEL in ctx.chat_template else f"the chat template has no {_CHANNEL}"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _HarmonyStream(opened=prompt.rstrip().endswith(_ANALYSIS))

    def thought_form(self, *, prompt: str = "") -> ThoughtForm | None:
        # After the first thought a call may come; who thinks again has to answer.
        final = f"{_CHANNEL}final{_MESSAGE}"
        closes = (_ENDS[0], f"{_ENDS[0]}{_NEXT}{final}")
        return ThoughtForm(_ANALYSIS, (*_ENDS, *_OTHERS), closes, prompt.rstrip().endswith(_ANALYSIS), final)


class _HarmonyStream(ThoughtStream):
    def __init__(self, *, opened: bool) -> None:
        super().__init__()
        self._opened = opened
        self._said = False

    def run(self) -> Reading[None]:
        source = self.source
        if self._opened:
            yield from self._analysis()
        kept = not self._opened
        while (yield from source.peek()):
            # White space after a message belongs to its end, but for a call's, of which the tool parser sees all.
            space = yield from source.skip_space()
            source.start_record(*([space] if kept else []))
            channel = yield from self._header()
            if channel == _FOR_A_TOOL:
                self.give_back()
                yield from self.content(*_ENDS)
                self.give_back()
            else:
                source.stop_record()
                yield from self._analysis() if channel == "analysis" else self._content(channel)
            kept = channel == _FOR_A_TOOL

    def _header(self) -> Reading[str]:
        """Read a message's header. Returns its channel, _FOR_A_TOOL, or _CUT where the text ends before the header
        does. Raises Broken where there is none.
        """
        source = self.source
        for begin in (_START, _CHANNEL, _FOR_A_TOOL):
            if (yield from source.starts_with(begin)):
                break
        else:
            raise Broken
        header = ""
        while not (yield from source.read_marker(_MESSAGE)):
            if not (yield from source.peek()):
                return _CUT
            header += source.run_of(_RUN)
            if len(header) > _MOST:
                raise Broken
        name = _NAME.search(header)
        return _FOR_A_TOOL if _FOR_A_TOOL in header else name.group(1) if name is not None else _FINAL

    def _analysis(self) -> Reading[None]:
        marker = yield from self.read_thought(*_ENDS, _NEXT, *_OTHERS)
        if marker not in _ENDS:
            self.source.put_back(marker)
        self.separate("\n")

    def _content(self, channel: str) -> Reading[None]:
        if channel and self._said:
            self.sink.content("\n")
        self._said = True
        if (yield from self.content(*_ENDS, _NEXT)) == _NEXT:
            self.source.put_back(_NEXT)
        self.source.stop_record()
