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
_ANSWER, _ANSWER_END = "<answer>", "</answer>"


class ThinkParser(OutputParser[Options]):
    """DeepSeek-R1 and those like it: a thought at the beginning, of which the prompt may have written the marker."""

    follows: tuple[str, ...] = ()
    """What ends a thought beside its marker, and is content."""

    def __init__(self, options: Options, ctx: OutputParserContext) -> None:
        super().__init__(options, ctx)
        self._begin, self._end = _BEGIN, _END
        self._starts_open = bool(getattr(options, "starts_open", False))

    @classmethod
    def supports(cls, options: Options, ctx: OutputParserContext) -> str | None:
        return None if _END in ctx.chat_template else f"the chat template has no {_END}"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _ThinkStream(self._begin, self._end, self._opened(prompt))

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
        return None if _ANSWER in ctx.chat_template else f"the chat template has no {_ANSWER}"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _AnswerStream(self._begin, self._end, self._opened(prompt))


class GraniteParser(ThinkParser):
    """Granite 3.2 and 3.3: thought and answer after a sentence each."""

    def __init__(self, options: Options, ctx: OutputParserContext) -> None:
        super().__init__(options, ctx)
        self._begin, self._end = "Here is my thought process:", "Here is my response:"

    @classmethod
    def supports(cls, options: Options, ctx: OutputParserContext) -> str | None:
        known = "Here is my thought process" in ctx.chat_template
        return None if known else "the chat template does not say: Here is my thought process"


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
        return _ThinkStream(self._begin, self._end, self._opened(prompt), *self.follows)


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

    def __init__(self, begin: str, end: str, opened: bool, *follows: str) -> None:
        super().__init__()
        self._begin, self._end, self._opened, self._follows = begin, end, opened, follows

    def run(self) -> Reading[None]:
        source = self.source
        space = yield from source.skip_space()
        if not (yield from source.read_marker(self._begin)) and not self._opened:
            self.sink.content(space)
            return
        if found := (yield from self.read_thought(self._end, *self._follows)):
            source.put_back(found if found in self._follows else "")
            source.stop_record()
            yield from source.skip_space()


class _AnswerStream(_ThinkStream):
    """As `_ThinkStream`; tags around the answer are left out."""

    def run(self) -> Reading[None]:
        source = self.source
        yield from super().run()
        if not (yield from source.read_marker(_ANSWER)):
            return
        yield from source.skip_space()
        while marker := (yield from self.content(_ANSWER_END)):
            source.stop_record()
            space = yield from source.skip_space()
            if not (yield from source.peek()):
                self.sink.drop_space()
                return
            self.sink.content(marker + space)
