"""Thinking between two markers."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.core.interfaces.options import Options
from pegboard.plugins.parsers_reasoning.options import MarkerOptions
from pegboard.toolkit.parsing.output_parser import (
    OutputParser,
    OutputParserContext,
    ParserStream,
    ThoughtForm,
    ToolFunction,
)
from pegboard.toolkit.parsing.text_stream import Reading, TextStream

_BEGIN, _END = "<think>", "</think>"
_CALL = "<|tool_call>"
_ANSWER = ("<answer>", "</answer>")
_RESPONSE = ("<response>", "</response>")
_THOUGHTS = ("Here is my thought process:", "Here's my thought process:")
_RESPONSES = ("Here is my response:", "Here's my response:")


class ThinkParser(OutputParser[Options]):
    """DeepSeek-R1 and those like it: a thought at the beginning, of which the prompt may have written the marker."""

    follows: tuple[str, ...] = ()
    """What ends a thought beside its marker."""

    def __init__(self, options: Options, ctx: OutputParserContext) -> None:
        super().__init__(options, ctx)
        self._begin, self._end = _BEGIN, _END
        self._starts_open = bool(getattr(options, "starts_open", False))

    @classmethod
    def supports(cls, options: Options, ctx: OutputParserContext) -> str | None:
        return None if _END in ctx.chat_template else f"the chat template has no {_END}"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _ThinkStream((self._begin,), (self._end,), self._opened(prompt))

    def thought_form(self, *, prompt: str = "") -> ThoughtForm | None:
        return ThoughtForm(self._begin, (self._end, *self.follows), (self._end,), self._opened(prompt))

    def _opened(self, prompt: str) -> bool:
        # Only at the very end: what a user wrote about markers comes before the answer's header.
        opened = prompt.rstrip().endswith(self._begin)
        closed = prompt.rstrip().endswith(self._end)
        return opened or (self._starts_open and not closed)


class QwenParser(ThinkParser):
    """Qwen3: as R1, and with `enable_thinking=False` the prompt has an empty thought already."""

    @classmethod
    def supports(cls, options: Options, ctx: OutputParserContext) -> str | None:
        if "enable_thinking" not in ctx.chat_template:
            return "the chat template has no enable_thinking"
        return super().supports(options, ctx)


class HunyuanParser(ThinkParser):
    """Hunyuan: as Qwen3, and the answer may stand in tags, too."""

    @classmethod
    def supports(cls, options: Options, ctx: OutputParserContext) -> str | None:
        return None if _ANSWER[0] in ctx.chat_template else f"the chat template has no {_ANSWER[0]}"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _AnswerStream((self._begin,), (self._end,), self._opened(prompt), tags=_ANSWER)


class GraniteParser(ThinkParser):
    """Granite 3.2: thought and answer after a sentence each, of which models write two forms. Granite 3.3: both in
    tags, where its template says so.
    """

    def __init__(self, options: Options, ctx: OutputParserContext) -> None:
        super().__init__(options, ctx)
        self._tags = _RESPONSE[0] in ctx.chat_template
        if not self._tags:
            self._begin, self._end = _THOUGHTS[0], _RESPONSES[0]
            self.follows = _RESPONSES[1:]

    @classmethod
    def supports(cls, options: Options, ctx: OutputParserContext) -> str | None:
        if "Here is my thought process" in ctx.chat_template:
            return None
        if _BEGIN in ctx.chat_template and _RESPONSE[0] in ctx.chat_template:
            return None
        return f"the chat template has neither {_THOUGHTS[0]} nor {_BEGIN} and {_RESPONSE[0]}"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        opened = self._opened(prompt)
        if self._tags:
            return _AnswerStream((self._begin,), (self._end,), opened, tags=_RESPONSE)
        return _ThinkStream(_THOUGHTS, _RESPONSES, opened)


class GemmaParser(ThinkParser):
    """Gemma 4: a channel, which is there and empty in prompts that want no thought. A call ends a thought, too."""

    skip_special_tokens = False
    follows = (_CALL,)

    def __init__(self, options: Options, ctx: OutputParserContext) -> None:
        super().__init__(options, ctx)
        self._begin, self._end = "<|channel>thought", "<channel|>"

    @classmethod
    def supports(cls, options: Options, ctx: OutputParserContext) -> str | None:
        return None if "<|channel>" in ctx.chat_template else "the chat template has no <|channel>"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _ThinkStream((self._begin,), (self._end,), self._opened(prompt), follows=self.follows)


class MarkedParser(ThinkParser):
    """Markers from the config."""

    def __init__(self, options: MarkerOptions, ctx: OutputParserContext) -> None:
        super().__init__(options, ctx)
        self._begin, self._end = options.begin, options.end
        self.skip_special_tokens = not options.special_tokens

    @classmethod
    def supports(cls, options: Options, ctx: OutputParserContext) -> str | None:
        return None


class ThoughtStream(TextStream):
    """A stream that reads thoughts. White space beside their markers belongs to these."""

    def __init__(self) -> None:
        super().__init__()
        self._space: list[str] = []

    def read_thought(self, *ends: str) -> Reading[str]:
        """Read a thought as far as one of `ends`, which is read and returned; "" where the text ends before."""
        yield from self.source.skip_space()
        marker = yield from self.until(self._think, *ends)
        if not marker:
            self.sink.reasoning("".join(self._space))
        self._space.clear()
        return marker

    def separate(self, space: str) -> None:
        """Put `space` before what is thought next, if anything is."""
        self._space.append(space)

    def _think(self, text: str) -> None:
        end = len(text.rstrip())
        if end:
            self.sink.reasoning("".join(self._space) + text[:end])
            self._space.clear()
        if end < len(text):
            self._space.append(text[end:])


class _ThinkStream(ThoughtStream):
    """A thought, if the answer begins with one, and the rest. What `follows` ends a thought as well, and is content."""

    def __init__(
        self, begins: tuple[str, ...], ends: tuple[str, ...], opened: bool, *, follows: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self._begins, self._ends, self._opened, self._follows = begins, ends, opened, follows

    def run(self) -> Reading[None]:
        source = self.source
        space = yield from source.skip_space()
        begun = self._opened
        for begin in self._begins:
            if (yield from source.read_marker(begin)):
                begun = True
                break
        if not begun:
            self.sink.content(space)
            return
        if found := (yield from self.read_thought(*self._ends, *self._follows)):
            source.put_back(found if found in self._follows else "")
            source.stop_record()
            yield from source.skip_space()


class _AnswerStream(_ThinkStream):
    """As `_ThinkStream`; `tags` around the answer are left out."""

    def __init__(self, begins: tuple[str, ...], ends: tuple[str, ...], opened: bool, *, tags: tuple[str, str]) -> None:
        super().__init__(begins, ends, opened)
        self._tags = tags

    def run(self) -> Reading[None]:
        source = self.source
        begin, end = self._tags
        yield from super().run()
        if not (yield from source.read_marker(begin)):
            return
        yield from source.skip_space()
        while marker := (yield from self.content(end)):
            source.stop_record()
            space = yield from source.skip_space()
            if not (yield from source.peek()):
                self.sink.drop_space()
                return
            self.sink.content(marker + space)
