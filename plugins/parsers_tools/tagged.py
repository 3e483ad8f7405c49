"""Calls whose arguments stand in tags without line breaks of their own, as GLM, MiniMax-M2 and DeepSeek-V3.2 write::

    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Rome</arg_value>
    </tool_call>

    <minimax:tool_call>
    <invoke name="weather">
    <parameter name="city">Rome</parameter>
    </invoke>
    </minimax:tool_call>

Sources: the models' chat templates. A value is read as `xml_format` does it, but exactly as it stands between its tags.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.parsers_tools.grammars import chosen, parameters_of, properties_of
from pegboard.plugins.parsers_tools.literals import TagForm, tagged_calls
from pegboard.plugins.parsers_tools.xml_format import as_json
from pegboard.toolkit.grammars.schema_values import PossibleTypes
from pegboard.toolkit.parsing.call_stream import CallStream
from pegboard.toolkit.parsing.output_parser import (
    EarlierCall,
    OutputParser,
    OutputParserContext,
    ParserStream,
    ToolFunction,
)
from pegboard.toolkit.parsing.text_stream import Broken, Reading

_NAME = re.compile(r'[^"<>\s]+')
_KEY = re.compile(r'[^"<>\n]+')
_MOST = 256


@dataclass(frozen=True)
class _Tags:
    """What a stream looks for. `sections` are what calls may stand in, begin and end; without any, `call` begins one. A
    key stands between `key` and `key_end`; after it `text` says that the value is a string, and `value` that the schema
    decides.
    """

    call: str
    name_end: str
    call_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    text: str = ""
    sections: tuple[tuple[str, str], ...] = ()


_GLM = _Tags("<tool_call>", "", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_MINIMAX = _Tags(
    '<invoke name="',
    '">',
    "</invoke>",
    '<parameter name="',
    '"',
    ">",
    "</parameter>",
    sections=(("<minimax:tool_call>", "</minimax:tool_call>"),),
)
_DSML = "｜DSML｜"  # noqa: RUF001 - its own characters
_DEEPSEEK = _Tags(
    f'<{_DSML}invoke name="',
    '">',
    f"</{_DSML}invoke>",
    f'<{_DSML}parameter name="',
    '"',
    ' string="false">',
    f"</{_DSML}parameter>",
    text=' string="true">',
    sections=tuple((f"<{_DSML}{kind}>", f"</{_DSML}{kind}>") for kind in ("function_calls", "tool_calls")),
)


class _TaggedParser(OutputParser[NoOptions]):
    skip_special_tokens = False
    tags: _Tags

    def __init__(self, options: NoOptions, ctx: OutputParserContext) -> None:
        super().__init__(options, ctx)
        self._form = self.form(ctx.chat_template)
        self.call_markers = (*(begin for begin, _ in self.tags.sections), self.tags.call)

    @abstractmethod
    def form(self, template: str) -> TagForm:
        """Return how a model with such a chat template writes."""

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _TaggedStream(self.tags, tools)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        return Grammar("ebnf", tagged_calls(chosen(tools, name), self._form, parallel=parallel)) if required else None

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return (self._form.first or self.tags.call,)

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        return self._form.write(calls)


class GlmParser(_TaggedParser):
    """GLM-4.5 and 4.6, with each tag on a line of its own, and 4.7, without line breaks."""

    tags = _GLM

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        return None if _GLM.key in ctx.chat_template else f"the chat template has no {_GLM.key}"

    def form(self, template: str) -> TagForm:
        line = "" if _GLM.key_end + _GLM.value in template else "\n"
        value = f"{_GLM.key}{{name}}{_GLM.key_end}{line}{_GLM.value}"
        return TagForm(
            f"{_GLM.call}{{name}}{line}", _GLM.call_end, value, value, f"{_GLM.value_end}{line}", between=line
        )


class MiniMaxParser(_TaggedParser):
    """MiniMax-M2: all calls in one section."""

    tags = _MINIMAX

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        begin = _MINIMAX.sections[0][0]
        return None if begin in ctx.chat_template else f"the chat template has no {begin}"

    def form(self, template: str) -> TagForm:
        begin, end = _MINIMAX.sections[0]
        value = '<parameter name="{name}">'
        return TagForm(
            '<invoke name="{name}">\n',
            "</invoke>\n",
            value,
            value,
            "</parameter>\n",
            first=f"{begin}\n",
            between="",
            last=end,
        )


class DsmlParser(_TaggedParser):
    """DeepSeek-V3.2: all calls in one section; an attribute says which values are strings."""

    tags = _DEEPSEEK

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        return None if _DSML in ctx.chat_template else f"the chat template has no {_DSML}"

    def form(self, template: str) -> TagForm:
        begin, end = _DEEPSEEK.sections["tool_calls>" in template and "function_calls>" not in template]
        value = f"{_DEEPSEEK.key}{{name}}{_DEEPSEEK.key_end}"
        return TagForm(
            f'{_DEEPSEEK.call}{{name}}">\n',
            f"{_DEEPSEEK.call_end}\n",
            value + _DEEPSEEK.text,
            value + _DEEPSEEK.value,
            f"{_DEEPSEEK.value_end}\n",
            first=f"{begin}\n",
            between="",
            last=end,
        )


class _TaggedStream(CallStream):
    def __init__(self, tags: _Tags, tools: Sequence[ToolFunction]) -> None:
        super().__init__(tools)
        self._tags = tags
        self._functions = {one["name"]: one for one in tools}
        self._begins = tuple(begin for begin, _ in tags.sections)
        self._ends = (tags.call_end, *(end for _, end in tags.sections))

    def run(self) -> Reading[None]:
        # Models forget that calls are in a section.
        markers: tuple[str, ...] = (*self._begins, self._tags.call)
        while marker := (yield from self.content(*markers)):
            if marker in self._ends:
                self.leave_out_marker()
                continue
            called = yield from self.attempt(self._call(marker), self._tags.call_end)
            markers = (*self._begins, self._tags.call, *(self._ends if called else ()))

    def _call(self, marker: str) -> Reading[None]:
        source, tags = self.source, self._tags
        yield from source.skip_space()
        if marker in self._begins and not (yield from source.read_marker(tags.call)):
            raise Broken
        name = yield from source.read_run(_NAME, _MOST)
        if not name or not (yield from source.read_marker(tags.name_end)):
            raise Broken
        self.check(name)
        yield from source.skip_space()
        if not (yield from source.starts_with(tags.key, tags.call_end)):
            raise Broken
        self.start(name)
        function = self._functions.get(name, ToolFunction(name=name))
        yield from self._arguments(function)
        self.sink.end()

    def _arguments(self, function: ToolFunction) -> Reading[None]:
        source, tags = self.source, self._tags
        schemas, types = properties_of(function), PossibleTypes(parameters_of(function))
        self.sink.arguments("{")
        ended, first = False, True
        while not ended:
            yield from source.skip_space()
            if (yield from source.read_marker(tags.call_end)):
                break
            if not (yield from source.read_marker(tags.key)):
                raise Broken
            key = (yield from source.read_run(_KEY, _MOST)).strip()
            if not key or not (yield from source.read_marker(tags.key_end)):
                raise Broken
            text = bool(tags.text) and (yield from source.read_marker(tags.text))
            if not text:
                yield from source.skip_space()
                if not (yield from source.read_marker(tags.value.strip())):
                    raise Broken
            self.sink.arguments(f"{'' if first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
            first = False
            ended = yield from self._value(frozenset({"string"}) if text else types.of(schemas.get(key)))
        self.sink.arguments("}")

    def _value(self, types: frozenset[str]) -> Reading[bool]:
        """Read a value and its end; True where the call ends there, too. A string is told as it comes."""
        if types != {"string"}:
            pieces: list[str] = []
            end, ended = yield from self._until_end(pieces.append)
            whole = "".join(pieces)
            self.sink.arguments(as_json(whole, types) if end else whole)
        else:
            self.sink.arguments('"')
            end, ended = yield from self._until_end(
                lambda text: self.sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            )
            self.sink.arguments('"' if end else "")
        if not end:
            raise Broken
        return ended

    def _until_end(self, tell: Callable[[str], None]) -> Reading[tuple[bool, bool]]:
        """Read as far as what ends a value: its tag or, as models forget that one, the call's. Returns whether it was
        there, and whether it ends the call.

        In a string either may be text. What follows says whether it is: after a value another one or the call's end,
        after a call the section's end or another call, and after both the end of the text.
        """
        source, tags = self.source, self._tags
        while marker := (yield from self.until(tell, tags.value_end, tags.call_end)):
            source.stop_record()
            space = yield from source.skip_space()
            if marker == tags.value_end and (yield from source.starts_with(tags.key, tags.call_end)):
                return True, False
            if (yield from source.starts_with(*self._begins, tags.call, *self._ends[1:])):
                return True, True
            if not (yield from source.peek()):
                return True, marker == tags.call_end
            tell(marker + space)
        return False, False
