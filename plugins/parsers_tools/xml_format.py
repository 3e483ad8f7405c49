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
from pegboard.plugins.parsers_tools.pythonic import literal_json
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

    call_markers = (_BEGIN, _FUNCTION)

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
            if (yield from source.read_marker(_FUNCTION_END)):
                break
            if outer and (yield from source.starts_with(_END, _BEGIN)):
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

        In a string any of these tags may be text. What follows says whether it is: after a value comes another
        parameter or the end of the function, after the function of a call that began with a tag the call's own end. The
        call's end is one unless the value ends after it. The end of the text may follow each of them.
        """
        source = self.source
        line = "\n" if (yield from source.peek()) == "\n" else ""
        function, call = line + _FUNCTION_END, line + _END
        markers = [_PARAMETER_END, line + _PARAMETER, function, *([call] if outer else [])]
        while marker := (yield from self.until(tell, *markers)):
            source.stop_record()
            if marker == line + _PARAMETER:
                source.put_back(_PARAMETER)
                return marker, False
            if marker == function and not outer:
                return marker, True
            if marker == call:
                after = yield from self._rest_of_value(_PARAMETER_END, line + _PARAMETER, function)
                if after is None:
                    return marker, True
            else:
                after = yield from source.skip_space()
                follow = (_PARAMETER, _FUNCTION_END, _END, _BEGIN) if marker == _PARAMETER_END else (_END,)
                if (yield from source.starts_with(*follow)) or not (yield from source.peek()):
                    return marker, marker == function
            tell(marker + after)
        return "", False

    def _rest_of_value(self, *ends: str) -> Reading[str | None]:
        """Read the text after a call's end as far as one of `ends`, which says that the value goes on; None where
        another call or the end of the text comes first. Only the text is read then, or nothing.
        """
        source = self.source
        pieces: list[str] = []
        marker = yield from self.until(pieces.append, *ends, _BEGIN, _FUNCTION)
        source.stop_record()
        source.put_back(marker)
        text = "".join(pieces)
        if marker in ends:
            return text
        source.unread(text)
        return None


def as_json(text: str, types: frozenset[str]) -> str:
    """Return JSON as it stands, Python's three words, or else a string; a string, too, where the schema wants that
    rather than what the JSON is. Where the schema allows no string, other literals of Python are read as well.
    """
    words = {"True": "true", "False": "false", "None": "null"}
    found = words.get(text.strip(), without_lone_surrogates(text.strip()))
    try:
        value = json.loads(found, parse_constant=_refuse)
    except (ValueError, RecursionError):
        literal = None if "string" in types else literal_json(found)
        if literal is not None and type_of(json.loads(literal)) & types:
            return literal
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and not type_of(value) & types:
        return json.dumps(text, ensure_ascii=False)
    return found


def _refuse(text: str) -> JsonValue:
    raise ValueError(f"{text} is not JSON")
