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
from collections.abc import Mapping, Sequence

from pegboard.core.interfaces.grammar import Grammar
from pegboard.core.interfaces.json_value import JsonObject, JsonValue
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.output_parser import (
    EarlierCall,
    OutputParser,
    OutputParserContext,
    ParserStream,
    ToolFunction,
)
from pegboard.core.toolkit.parsing.call_stream import CallStream
from pegboard.core.toolkit.parsing.json_stream import write
from pegboard.core.toolkit.parsing.text_stream import Broken, Reading
from pegboard.plugins.parsers_tools.grammars import chosen, properties_of
from pegboard.plugins.parsers_tools.literals import tagged_calls

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\s]+")
_MOST = 256


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
        return Grammar("ebnf", tagged_calls(chosen(tools, name), f"{_BEGIN}\n", f"\n{_END}", parallel=parallel))

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return (_BEGIN,)

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        return "\n".join(_written(one["name"], one["arguments"]) for one in calls)


def _written(name: str, arguments: JsonObject) -> str:
    parameters = "".join(
        f"{_PARAMETER}{key}>\n{value if isinstance(value, str) else write(value)}\n{_PARAMETER_END}\n"
        for key, value in arguments.items()
    )
    return f"{_BEGIN}\n{_FUNCTION}{name}>\n{parameters}{_FUNCTION_END}\n{_END}"


class _XmlStream(CallStream):
    def __init__(self, tools: Sequence[ToolFunction]) -> None:
        super().__init__(tools)
        self._schemas = {one["name"]: properties_of(one) for one in tools}

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
        if marker == _BEGIN:
            yield from source.skip_space()
            if not (yield from source.read_marker(_FUNCTION)):
                raise Broken
        name = yield from source.read_run(_NAME, _MOST)
        yield from source.expect(">")
        self.start(name)
        self.sink.arguments("{")
        schemas = self._schemas.get(name, {})
        names: set[str] = set()
        while True:
            yield from source.skip_space()
            if (yield from source.read_marker(_FUNCTION_END)):
                break
            if not (yield from source.read_marker(_PARAMETER)):
                raise Broken
            yield from self._parameter(schemas, names)
        self.sink.arguments("}")
        self.sink.end()

    def _parameter(self, schemas: JsonObject, names: set[str]) -> Reading[None]:
        source = self.source
        key = yield from source.read_run(_NAME, _MOST)
        if not key or (yield from source.peek()) != ">":
            self.sink.arguments(_PARAMETER + key)
            raise Broken
        source.take(1)
        self.sink.arguments(f"{', ' if names else ''}{json.dumps(key)}: ")
        names.add(key)
        if (yield from source.peek()) == "\n":
            source.take(1)
        if _is_text(schemas.get(key)):
            yield from self._text()
        else:
            yield from self._json(schemas.get(key))

    def _text(self) -> Reading[None]:
        """Read a string's text. The line break before the end belongs to the format, so that one is held back."""
        held = ""

        def tell(text: str) -> None:
            nonlocal held
            text = held + text
            held = "\n" if text.endswith("\n") else ""
            self.sink.arguments(json.dumps(text[: len(text) - len(held)], ensure_ascii=False)[1:-1])

        self.sink.arguments('"')
        if not (yield from self.until(tell, _PARAMETER_END)):
            self.sink.arguments(json.dumps(held)[1:-1])
            raise Broken
        self.source.stop_record()
        self.sink.arguments('"')

    def _json(self, schema: JsonValue) -> Reading[None]:
        pieces: list[str] = []
        ended = yield from self.until(pieces.append, _PARAMETER_END)
        text = "".join(pieces)
        if not ended:
            self.sink.arguments(text)
            raise Broken
        self.source.stop_record()
        self.sink.arguments(_as_json(text.removesuffix("\n"), schema))


def _is_text(schema: JsonValue) -> bool:
    """Return whether a value is a string whatever it looks like."""
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum")
    return schema.get("type") == "string" or (isinstance(values, list) and all(isinstance(one, str) for one in values))


def _as_json(text: str, schema: JsonValue) -> str:
    """JSON as it stands, Python's three words, or else a string; a string, too, where the schema wants that rather than
    what the JSON is.
    """
    words = {"True": "true", "False": "false", "None": "null"}
    try:
        value = json.loads(words.get(text.strip(), text), parse_constant=_refuse)
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        if isinstance(kinds, list) and "string" in kinds and not any(kind in kinds for kind in _kinds(value)):
            value = text
        return write(value)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _kinds(value: JsonValue) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("integer", "number")
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return (names[type(value)],)


def _refuse(text: str) -> JsonValue:
    raise ValueError(f"{text} is not JSON")
