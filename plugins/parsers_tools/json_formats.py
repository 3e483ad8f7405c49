"""Formats whose calls are JSON objects, or names with JSON objects after them."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.parsers_tools.grammars import Around, any_call, chosen, tagged
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

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_MOST = 128
"""Longest name of a function."""


def _needs(ctx: OutputParserContext, *markers: str) -> str | None:
    if any(marker in ctx.chat_template for marker in markers):
        return None
    return f"the chat template has no {' or '.join(markers)}"


# ---- Hermes, Qwen ---------------------------------------------------------------------------------------------------

_BEGIN, _END = "<tool_call>", "</tool_call>"

_EXPLANATION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class HermesParser(OutputParser[NoOptions]):
    """JSON objects, or lists of them, between tags.

    It serves chat models whose template does not know of tools, too: it explains the format to them.
    """

    call_markers = (_BEGIN,)

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        if not ctx.chat_template:
            return "the model has no chat template"
        if "<arg_key>" in ctx.chat_template:
            return "the chat template has arguments in tags"
        if _BEGIN in ctx.chat_template or "tools" not in ctx.chat_template:
            return None
        return f"the chat template has a format for tools that is not {_BEGIN}"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return MarkedJsonStream(_BEGIN, _END, tools)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        around = Around(f'{_BEGIN}\n{{"name": {{name}}, "arguments": ', f"}}\n{_END}", between="\n", trailing=True)
        return tagged(chosen(tools, name), around, parallel=parallel, required=required, trigger=_BEGIN)

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return (_BEGIN,)

    def instructions(self, tools: Sequence[ToolFunction]) -> str:
        # As the templates of Qwen and Hermes say it.
        lines = [
            write({"type": "function", "function": {key: value for key, value in one.items() if key != "strict"}})
            for one in tools
        ]
        return _EXPLANATION.format(tools="\n".join(lines))

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        return "\n".join(
            f"{_BEGIN}\n{write({'name': one['name'], 'arguments': one['arguments']})}\n{_END}" for one in calls
        )


class MarkedJsonStream(CallStream):
    """JSON objects, or lists of them, between two markers, of which the second may be missing."""

    def __init__(self, begin: str, end: str, tools: Sequence[ToolFunction]) -> None:
        super().__init__(tools)
        self._begin, self._end = begin, end

    def run(self) -> Reading[None]:
        begin, end = self._begin, self._end
        markers: tuple[str, ...] = (begin,)
        while marker := (yield from self.content(*markers)):
            if marker == end:
                self.leave_out_marker()
                markers = (begin,)
            else:
                called = yield from self.attempt(self._calls(), end)
                markers = (begin, end) if called else (begin,)

    def _calls(self) -> Reading[None]:
        yield from self.source.skip_space()
        if (yield from self.source.peek()) == "[":
            yield from self.read_calls()
        else:
            yield from self.read_call()


# ---- Llama 3 --------------------------------------------------------------------------------------------------------

_PYTHON = "<|python_tag|>"


class LlamaParser(OutputParser[NoOptions]):
    """An answer that is a JSON object with `name` and `parameters`, or several with semicolons between them; or any
    such after a special token.
    """

    skip_special_tokens = False

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        return _needs(ctx, _PYTHON, '{"name": function name, "parameters"')

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _LlamaStream(tools)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        return any_call(chosen(tools, name), "parameters") if required else None

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return [f'{{"name": {write(one["name"])}, "parameters": {{' for one in tools]

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        return "; ".join(write({"name": one["name"], "parameters": one["arguments"]}) for one in calls)


class _LlamaStream(CallStream):
    def run(self) -> Reading[None]:
        source = self.source
        self.sink.content((yield from source.skip_space()))
        source.start_record()
        marker = _PYTHON
        if (yield from source.peek()) != "{":
            source.stop_record()
            marker = yield from self.content(_PYTHON)
        while marker:
            yield from self.attempt(self._calls())
            marker = yield from self.content(_PYTHON)

    def _calls(self) -> Reading[None]:
        yield from self.source.skip_space()
        yield from self.read_several(lambda: self.read_call(strict=True, several=True), self._goes_on)

    def _goes_on(self) -> Reading[bool]:
        """Read as far as the next call; where there is none, all of that is content."""
        source = self.source
        yield from source.skip_space()
        if (yield from source.peek()) == ";":
            source.take(1)
            yield from source.skip_space()
        if (yield from source.peek()) != "{":
            raise Broken
        return True


# ---- Mistral --------------------------------------------------------------------------------------------------------

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_CHARS = string.ascii_letters + string.digits


class MistralParser(OutputParser[NoOptions]):
    """A list of JSON objects after a special token; or, as newer models write, a name and its arguments."""

    skip_special_tokens = False
    call_markers = (_CALLS,)

    def __init__(self, options: NoOptions, ctx: OutputParserContext) -> None:
        super().__init__(options, ctx)
        self._named = _ARGS in ctx.chat_template
        """Whether the model writes names and arguments rather than a list."""

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        return _needs(ctx, _CALLS)

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _MistralStream(tools)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        if self._named:
            around = Around(f"{_CALLS}{{bare}}{_ARGS}", "")
        else:
            around = Around('{"name": {name}, "arguments": ', "}", f"{_CALLS} [", ", ", "]")
        return tagged(chosen(tools, name), around, parallel=parallel, required=required, trigger=_CALLS)

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return (_CALLS,)

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        if not calls:
            return ""
        if self._named:
            return "".join(f"{_CALLS}{one['name']}{_ARGS}{write(one['arguments'])}" for one in calls)
        return f"{_CALLS} {write([{'name': one['name'], 'arguments': one['arguments']} for one in calls])}"

    def call_id(self) -> str:
        """Nine letters and digits: Mistral's templates refuse other ids."""
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class _MistralStream(CallStream):
    def run(self) -> Reading[None]:
        while (yield from self.content(_CALLS)):
            # What ends a call that is broken begins the next one.
            yield from self.attempt(self._calls(), _CALLS)

    def _calls(self) -> Reading[None]:
        source = self.source
        yield from source.skip_space()
        char = yield from source.peek()
        if char == "[":
            yield from self.read_calls()
        elif char == "{":
            yield from self.read_call()
        else:
            name = yield from source.read_run(_NAME, _MOST)
            self.check(name)
            yield from source.skip_space()
            if (yield from source.read_marker(_ID)):
                yield from source.read_run(_NAME, _MOST)
            yield from source.read_marker(_ARGS)
            yield from source.skip_space()
            yield from self.read_object(name)


# ---- DeepSeek -------------------------------------------------------------------------------------------------------

_OUTER = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001 - its own characters
_INNER, _SEP, _INNER_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_FENCE = "```json\n"


class DeepSeekParser(OutputParser[NoOptions]):
    """Names and JSON objects between tokens: `function`, a separator, the name and fenced JSON (V3, R1), or the name, a
    separator and JSON (V3.1).
    """

    skip_special_tokens = False
    call_markers = (_OUTER[0], _INNER)

    def __init__(self, options: NoOptions, ctx: OutputParserContext) -> None:
        super().__init__(options, ctx)
        self._fenced = "```json" in ctx.chat_template

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        return _needs(ctx, _INNER)

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _DeepSeekStream(tools)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        around = Around(*self._parts("{bare}"), _OUTER[0], self._between, _OUTER[1])
        return tagged(chosen(tools, name), around, parallel=parallel, required=required, trigger=_OUTER[0])

    @property
    def _between(self) -> str:
        return "\n" if self._fenced else ""

    def _parts(self, name: str) -> tuple[str, str]:
        if self._fenced:
            return f"{_INNER}function{_SEP}{name}\n{_FENCE}", f"\n```{_INNER_END}"
        return f"{_INNER}{name}{_SEP}", _INNER_END

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return (_OUTER[0],)

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        if not calls:
            return ""
        written = []
        for one in calls:
            begin, end = self._parts(one["name"])
            written.append(f"{begin}{write(one['arguments'])}{end}")
        return _OUTER[0] + self._between.join(written) + _OUTER[1]


class _DeepSeekStream(CallStream):
    def run(self) -> Reading[None]:
        markers: tuple[str, ...] = (_INNER, _OUTER[0])
        while marker := (yield from self.content(*markers)):
            if marker in (_INNER_END, _OUTER[1]):
                self.leave_out_marker()
            else:
                called = yield from self.attempt(self._call(marker), _INNER_END)
                markers = (_INNER, _INNER_END, *_OUTER) if called else (_INNER, _OUTER[0])

    def _call(self, marker: str) -> Reading[None]:
        if marker == _OUTER[0]:
            yield from self.source.skip_space()
            if not (yield from self.source.read_marker(_INNER)):
                raise Broken
        source = self.source
        name = yield from source.read_run(_NAME, _MOST)
        if not (yield from source.read_marker(_SEP)):
            raise Broken
        if (yield from source.peek()) != "{":
            name = yield from source.read_run(_NAME, _MOST)
            self.check(name)
            yield from source.skip_space()
            fenced = yield from source.read_marker("```json")
            yield from source.skip_space()
            yield from self.read_object(name)
            yield from source.skip_space()
            if fenced:
                yield from source.read_marker("```")
        else:
            yield from self.read_object(name)
