"""Calls in tags, as Qwen3-Coder writes them::

    <tool_call>
    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

A value is text; the function's schema says whether it stands for a string, which is told as it comes, or for JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from pegboard.core.interfaces.json_value import JsonValue
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.parsers_tools.grammars import chosen, parameters_of, properties_of
from pegboard.plugins.parsers_tools.literals import TagForm, tagged_calls
from pegboard.toolkit.grammars.schema_values import PossibleTypes, type_of
from pegboard.toolkit.parsing.call_stream import CallStream
from pegboard.toolkit.parsing.json_stream import without_lone_surrogates
from pegboard.toolkit.parsing.output_parser import (
    EarlierCall,
    OutputParser,
    OutputParserContext,
    ParserStream,
    ToolFunction,
)
from pegboard.toolkit.parsing.text_stream import Broken, Reading

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\s]+")
_MOST = 256
_FORM = TagForm(
    call=f"{_BEGIN}\n{_FUNCTION}{{name}}>\n",
    call_end=f"{_FUNCTION_END}\n{_END}",
    text=f"{_PARAMETER}{{name}}>\n",
    json=f"{_PARAMETER}{{name}}>\n",
    value_end=f"\n{_PARAMETER_END}\n",
)


class XmlParser(OutputParser[NoOptions]):
    """Functions and parameters in tags of their own."""

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        return None if _FUNCTION in ctx.chat_template else f"the chat template has no {_FUNCTION}"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _XmlStream(tools)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        if not required:
            return None
        return Grammar("ebnf", tagged_calls(chosen(tools, name), _FORM, parallel=parallel))

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return (_BEGIN,)

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        return _FORM.write(calls)


class _XmlStream(CallStream):
    def __init__(self, tools: Sequence[ToolFunction]) -> None:
        super().__init__(tools)
        self._functions = {one["name"]: one for one in tools}

    def run(self) -> Reading[None]:
        # Models forget the outer tag.
        markers: tuple[str, ...] = (_BEGIN, _FUNCTION)
        while marker := (yield from self.content(*markers)):
            if marker == _END:
                self.leave_out_marker()
                markers = (_BEGIN, _FUNCTION)
            else:
                called = yield from self.attempt(self._call(marker), _FUNCTION_END)
                markers = (_BEGIN, _FUNCTION, _END) if called else (_BEGIN, _FUNCTION)

    def _call(self, marker: str) -> Reading[None]:
        source = self.source
        outer = marker == _BEGIN
        if outer:
            yield from source.skip_space()
            if not (yield from source.read_marker(_FUNCTION)):
                raise Broken
        name = yield from source.read_run(_NAME, _MOST)
        yield from source.expect(">")
        self.start(name)
        self.sink.arguments("{")
        function = self._functions.get(name, ToolFunction(name=name))
        schemas, types = properties_of(function), PossibleTypes(parameters_of(function))
        names: set[str] = set()
        ended = False
        while not ended:
            yield from source.skip_space()
            if (yield from source.read_marker(_FUNCTION_END)) or (outer and (yield from source.starts_with(_END))):
                break
            if not (yield from source.read_marker(_PARAMETER)):
                raise Broken
            key = yield from self._key(names)
            ended = yield from self._value(types.of(schemas.get(key)), outer=outer)
        self.sink.arguments("}")
        self.sink.end()

    def _key(self, names: set[str]) -> Reading[str]:
        key = yield from self.source.read_run(_NAME, _MOST)
        if not key or (yield from self.source.peek()) != ">":
            self.sink.arguments(_PARAMETER + key)
            raise Broken
        self.source.take(1)
        self.sink.arguments(f"{', ' if names else ''}{json.dumps(key)}: ")
        names.add(key)
        return key

    def _value(self, types: frozenset[str], *, outer: bool) -> Reading[bool]:
        """Read a parameter's value and its end; True where the function ends there, too. A string's text is told as it
        comes. The line breaks around it belong to the format, so the last one is held back.
        """
        text = types == {"string"}
        pieces: list[str] = []
        held, begun = "", False

        def tell(piece: str) -> None:
            nonlocal held, begun
            piece = held + (piece if begun else piece.removeprefix("\n"))
            begun = True
            held = "\n" if piece.endswith("\n") else ""
            self.sink.arguments(json.dumps(piece[: len(piece) - len(held)], ensure_ascii=False)[1:-1])

        if text:
            self.sink.arguments('"')
        end, ended = yield from self._until_end(tell if text else pieces.append, outer=outer)
        if text:
            # An end that was forgotten has been read with the line break before it.
            self.sink.arguments(json.dumps("" if end == _PARAMETER_END else held)[1:-1] + ('"' if end else ""))
        else:
            whole = "".join(pieces).removeprefix("\n")
            self.sink.arguments(as_json(whole.removesuffix("\n"), types) if end else whole)
        if not end:
            raise Broken
        return ended

    def _until_end(self, tell: Callable[[str], None], *, outer: bool) -> Reading[tuple[str, bool]]:
        """Read as far as what ends a value: its tag or, as models forget that one, the next parameter's or the
        function's; those of a value with line breaks around it begin a line. Returns what it was, "" for the end of the
        text, and whether it ends the function.
        """
        source = self.source
        line = "\n" if (yield from source.peek()) == "\n" else ""
        markers = [_PARAMETER_END, line + _PARAMETER, line + _FUNCTION_END, *([line + _END] if outer else [])]
        while marker := (yield from self.until(tell, *markers)):
            source.stop_record()
            tag = marker.removeprefix(line)
            if tag in (_PARAMETER, _END):
                source.put_back(tag)
            if tag != _FUNCTION_END or not outer:
                return marker, tag in (_FUNCTION_END, _END)
            # In a string this may be text: a call that began with a tag ends with one.
            space = yield from source.skip_space()
            if (yield from source.starts_with(_END)) or not (yield from source.peek()):
                return marker, True
            tell(marker + space)
        return "", False


def as_json(text: str, types: frozenset[str]) -> str:
    """Return JSON as it stands, Python's three words, or else a string; a string, too, where the schema wants that
    rather than what the JSON is.
    """
    words = {"True": "true", "False": "false", "None": "null"}
    found = words.get(text.strip(), without_lone_surrogates(text.strip()))
    try:
        value = json.loads(found, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and not type_of(value) & types:
        return json.dumps(text, ensure_ascii=False)
    return found


def _refuse(text: str) -> JsonValue:
    raise ValueError(f"{text} is not JSON")
