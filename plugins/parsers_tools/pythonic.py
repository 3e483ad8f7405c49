"""Calls as Python writes them: ``[weather(city="Rome", days=3), now()]``. Nothing is ever evaluated: the literals are
read one character at a time, and told as JSON while they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.parsers_tools.grammars import chosen
from pegboard.plugins.parsers_tools.literals import LiteralForm, literal_calls
from pegboard.toolkit.parsing.call_stream import CallStream
from pegboard.toolkit.parsing.json_stream import MAX_DEPTH, Tell, ignore
from pegboard.toolkit.parsing.output_parser import (
    EarlierCall,
    OutputParser,
    OutputParserContext,
    ParserStream,
    ToolFunction,
)
from pegboard.toolkit.parsing.text_stream import Broken, Reading

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_MOST = 128
_MAX_NUMBER = 1000
_NUMBER_CHARS = re.compile(r"[-+.0-9eE_]+")
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_LETTERS = re.compile(r"[A-Za-z]+")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_PLAIN = re.compile(r"[^'\"\\\r\n]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "",
            "\\": "\\", "'": "'", '"': '"'}  # fmt: skip
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}


class PythonicParser(OutputParser[NoOptions]):
    """An answer that is a list of calls with keyword arguments."""

    skip_special_tokens = False

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        if "[func_name1(" in ctx.chat_template or _BEGIN in ctx.chat_template:
            return None
        return "the chat template has no [func_name1(...)]"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return PythonicStream(tools)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        if not required:
            return None
        form = LiteralForm("[", ", ", "]")
        return Grammar("ebnf", literal_calls(chosen(tools, name), form, parallel=parallel))

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return [f"[{one['name']}(" for one in tools]

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        if not calls:
            return ""
        return f"[{', '.join(map(_written, calls))}]"


_SECTION, _SECTION_END = "<function_calls>", "</function_calls>"


class OlmoParser(PythonicParser):
    """Olmo 3: calls on lines of their own, in a section."""

    call_markers = (_SECTION,)

    @classmethod
    def supports(cls, options: NoOptions, ctx: OutputParserContext) -> str | None:
        return None if _SECTION in ctx.chat_template else f"the chat template has no {_SECTION}"

    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        return _OlmoStream(tools)

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        if not required:
            return None
        form = LiteralForm(_SECTION, "\n", _SECTION_END)
        return Grammar("ebnf", literal_calls(chosen(tools, name), form, parallel=parallel))

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        return (_SECTION,)

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        return f"{_SECTION}{chr(10).join(map(_written, calls))}{_SECTION_END}" if calls else ""


def _written(call: EarlierCall) -> str:
    return f"{call['name']}({', '.join(f'{key}={value!r}' for key, value in call['arguments'].items())})"


class PythonicStream(CallStream):
    """A list of calls. Formats whose literals are similar read theirs with `read_literal`, which reads keys with
    `read_key` and what is neither a list nor an object with `read_scalar`; all tell JSON.
    """

    def run(self) -> Reading[None]:
        source = self.source
        self.sink.content((yield from source.skip_space()))
        source.start_record()
        marker = _BEGIN
        if (yield from source.peek()) != "[":
            source.stop_record()
            marker = yield from self.content(_BEGIN)
        while marker:
            if marker == _END:
                self.leave_out_marker()
                marker = yield from self.content(_BEGIN)
            else:
                called = yield from self.attempt(self._calls())
                marker = yield from self.content(_BEGIN, *([_END] if called else []))

    def _calls(self) -> Reading[None]:
        source = self.source
        yield from source.skip_space()
        yield from source.expect("[")
        yield from source.skip_space()
        yield from self.read_several(self._call, self.goes_on)

    def _call(self) -> Reading[bool]:
        """Read ``name(key=value, ...)``. It is told once it is more than a word in brackets."""
        source = self.source
        name = yield from source.read_run(_NAME, _MOST)
        known = self.knows(name)
        tell = self.sink.arguments if known else ignore
        yield from source.expect("(")
        yield from source.skip_space()
        first = True
        while (yield from source.peek()) != ")":
            key = yield from source.read_run(_NAME, _MOST)
            yield from source.skip_space()
            if not key or (yield from source.peek()) != "=":
                if not first:
                    tell(key)
                raise Broken
            source.take(1)
            if first and known:
                self.start(name)
            tell(f"{'{' if first else ', '}{json.dumps(key)}: ")
            first = False
            yield from source.skip_space()
            yield from self.read_literal(tell)
            yield from source.skip_space()
            char = yield from source.peek()
            if char == ",":
                source.take(1)
                yield from source.skip_space()
            elif char != ")":
                raise Broken
        source.take(1)
        if not known:
            return False
        if first:
            self.start(name)
        self.sink.arguments("{}" if first else "}")
        self.sink.end()
        return True

    def read_literal(self, tell: Tell) -> Reading[None]:
        """Read a value."""
        source = self.source
        stack: list[str] = []
        while True:
            char = yield from source.peek()
            if char in _CLOSING:
                source.take(1)
                tell("[" if char == "(" else char)
                stack.append(char)
                if len(stack) > MAX_DEPTH:
                    raise Broken
                yield from source.skip_space()
                if (yield from source.peek()) != _CLOSING[char]:
                    if char == "{":
                        yield from self.read_key(tell)
                    continue
                self._close(tell, stack)
            else:
                yield from self.read_scalar(tell, char)
            if not (yield from self._to_next(tell, stack)):
                return

    def _to_next(self, tell: Tell, stack: list[str]) -> Reading[bool]:
        source = self.source
        while stack:
            yield from source.skip_space()
            char = yield from source.peek()
            if char == ",":
                source.take(1)
                yield from source.skip_space()
                # A comma may stand before the end.
                if (yield from source.peek()) != _CLOSING[stack[-1]]:
                    tell(", ")
                    if stack[-1] == "{":
                        yield from self.read_key(tell)
                    return True
            elif char != _CLOSING[stack[-1]]:
                raise Broken
            self._close(tell, stack)
        return False

    def _close(self, tell: Tell, stack: list[str]) -> None:
        self.source.take(1)
        tell("}" if stack.pop() == "{" else "]")

    def read_key(self, tell: Tell) -> Reading[None]:
        """Read an object's key and the colon."""
        if (yield from self.source.peek()) not in ("'", '"'):
            raise Broken
        yield from self._string(tell)
        yield from self.source.skip_space()
        yield from self.source.expect(":")
        tell(": ")
        yield from self.source.skip_space()

    def read_scalar(self, tell: Tell, char: str) -> Reading[None]:
        """Read a string, a number or a word, of which `char` is the first character."""
        if char in ("'", '"'):
            yield from self._string(tell)
        elif char in ("-", "+", ".") or "0" <= char <= "9":
            self._tell_plain(tell, (yield from self.source.read_run(_NUMBER_CHARS, _MAX_NUMBER)))
        else:
            self._tell_plain(tell, (yield from self.source.read_run(_LETTERS, _MOST)))

    def _tell_plain(self, tell: Tell, text: str) -> None:
        """Tell a number or a word. Raises Broken, having told the text, for what is neither."""
        found = plain_json(text)
        tell(text if found is None else found)
        if found is None:
            raise Broken

    def _string(self, tell: Tell) -> Reading[None]:
        source = self.source
        quote = source.take(1)
        if (yield from source.read_marker(quote)):
            if not (yield from source.read_marker(quote)):
                tell('""')
                return
            quote *= 3
        tell('"')
        while not (yield from source.read_marker(quote)):
            char = yield from source.peek()
            if not char or (char in "\r\n" and len(quote) == 1):
                raise Broken
            if char == "\\":
                tell((yield from self._escape()))
            elif char in "'\"\r\n":
                tell(_quoted(source.take(1)))
            else:
                tell(_quoted(source.run_of(_PLAIN)))
        tell('"')

    def _escape(self) -> Reading[str]:
        source = self.source
        source.take(1)
        char = yield from source.peek()
        if char in _ESCAPES:
            return _quoted(_ESCAPES[source.take(1)])
        if char not in _HEX_LENGTHS:
            # As Python has it: what is not an escape is a backslash.
            return "\\\\"
        source.take(1)
        digits = ""
        while len(digits) < _HEX_LENGTHS[char] and (one := (yield from source.peek())):
            if one not in "0123456789abcdefABCDEF":
                break
            digits += source.take(1)
        code = int(digits, 16) if len(digits) == _HEX_LENGTHS[char] else -1
        if not 0 <= code <= 0x10FFFF:
            return "\\\\" + char + digits
        # Halves of a surrogate pair come one by one, and may stay so in JSON.
        return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else _quoted(chr(code))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def literal_json(text: str) -> str | None:
    """Return the JSON of a text that is one literal, such as ``{'a': True}``; None for any other text."""
    stream = PythonicStream()
    pieces: list[str] = []
    stream.source.push(text.strip())
    stream.source.ended = True
    try:
        for _ in stream.read_literal(pieces.append):
            return None
    except Broken:
        return None
    return "".join(pieces) if stream.source.at == len(stream.source.text) else None


def plain_json(text: str) -> str | None:
    """Return the JSON of a number or of one of the words for true, false and none; None for any other text."""
    if text in _WORDS:
        return _WORDS[text]
    number = text.replace("_", "")
    return _json_number(number) if len(number) <= _MAX_NUMBER and _NUMBER.fullmatch(number) else None


def _json_number(text: str) -> str:
    """Read a number that both languages know: Python allows zeros in front, and points without digits beside them."""
    sign, text = ("-" if text.startswith("-") else ""), text.lstrip("+-")
    mantissa, mark, exponent = text.lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    point = f".{fraction or '0'}" if "." in mantissa else ""
    return f"{sign}{whole.lstrip('0') or '0'}{point}{mark}{exponent}"


class _OlmoStream(PythonicStream):
    def run(self) -> Reading[None]:
        markers: tuple[str, ...] = (_SECTION,)
        while marker := (yield from self.content(*markers)):
            if marker == _SECTION_END:
                self.leave_out_marker()
                markers = (_SECTION,)
            else:
                called = yield from self.attempt(self._calls(), _SECTION_END)
                markers = (_SECTION, _SECTION_END) if called else (_SECTION,)

    def _calls(self) -> Reading[None]:
        yield from self.source.skip_space()
        yield from self.read_several(self._call, self._another)

    def _another(self) -> Reading[bool]:
        yield from self.source.skip_space()
        return bool((yield from self.source.peek())) and not (yield from self.source.starts_with(_SECTION_END))
