"""For output parsers: JSON as models write it, read from a `Source` as it comes.

What is told is valid JSON, whatever the model does. Its usual slips are mended on the way: line breaks in strings,
unknown escapes, halves of surrogate pairs, True for true, NaN, single quotes, names without quotes, a comma before the
end. What cannot be mended raises Broken, and whatever was read before has been told. The work per character is
constant, and nesting is bounded, so that any reader of the JSON can read it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from pegboard.toolkit.parsing.text_stream import Broken, Reading, Source

Tell = Callable[[str], None]

MAX_DEPTH = 128
"""Deepest nesting that is read."""
MAX_NUMBER = 1000
"""Most characters of a number: longer ones are read by few parsers."""
MAX_WORD = 16
MAX_NAME = 64
"""Longest name in an object that may stand without quotes."""

_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
"""What a string in either kind of quotes has that stays as it is."""
_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER_CHARS = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LETTERS = re.compile(r"[A-Za-z]+")
_BARE = re.compile(r"[A-Za-z0-9_$]+")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_WORDS = {
    "true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null",
    "NaN": "null", "Infinity": "null", "-Infinity": "null",
}  # fmt: skip
"""Words for values, and the JSON for each. JavaScript, too, writes null for a number that JSON does not have."""
_SURROGATE = re.compile(r"\\u[dD](?:([89abAB])|[c-fC-F])[0-9a-fA-F]{2}")
"""An escape of half a pair; the group is there for the first half."""
_PAIR_OR_ESCAPE = re.compile(
    rf"\\u[dD][89abAB][0-9a-fA-F]{{2}}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|{_SURROGATE.pattern}|\\."
)
_REPLACEMENT = "\\ufffd"
_ESCAPES = frozenset('"\\/bfnrt')
_CLOSING = {"{": "}", "[": "]"}


def ignore(text: str) -> None:
    """Take text that is not wanted."""


def read_value(source: Source, tell: Tell) -> Reading[None]:
    """Read one value of any kind; `tell` gets it as JSON text, as it comes."""
    stack: list[str] = []
    while True:
        char = yield from source.peek()
        if char in _CLOSING:
            tell(source.take(1))
            stack.append(char)
            if len(stack) > MAX_DEPTH:
                raise Broken
            tell((yield from source.read_run(_SPACE)))
            if (yield from source.peek()) != _CLOSING[char]:
                if char == "{":
                    yield from _read_key(source, tell)
                continue
            tell(source.take(1))
            stack.pop()
        else:
            yield from _read_scalar(source, tell, char)
        if not (yield from _read_to_next(source, tell, stack)):
            return


def _read_to_next(source: Source, tell: Tell, stack: list[str]) -> Reading[bool]:
    """Read what stands between one value and the next. False where the outermost one is complete."""
    while stack:
        tell((yield from source.read_run(_SPACE)))
        char = yield from source.peek()
        if char == ",":
            source.take(1)
            space = yield from source.read_run(_SPACE)
            if (yield from source.peek()) == _CLOSING[stack[-1]]:
                tell(space)
                continue
            tell(f",{space}")
            if stack[-1] == "{":
                yield from _read_key(source, tell)
            return True
        if char != _CLOSING[stack[-1]]:
            raise Broken
        tell(source.take(1))
        stack.pop()
    return False


def _read_key(source: Source, tell: Tell) -> Reading[None]:
    char = yield from source.peek()
    if char in _PLAIN:
        yield from read_raw_string(source, tell, char)
        tell((yield from source.read_run(_SPACE)))
    else:
        name = yield from source.read_run(_BARE, MAX_NAME)
        space = yield from source.read_run(_SPACE)
        good = 0 < len(name) <= MAX_NAME and (yield from source.peek()) == ":"
        tell((json.dumps(name) if good else name) + space)
        if not good:
            raise Broken
    yield from source.expect(":")
    tell(":")
    tell((yield from source.read_run(_SPACE)))


def _read_scalar(source: Source, tell: Tell, char: str) -> Reading[None]:
    if char in _PLAIN:
        yield from read_raw_string(source, tell, char)
    elif char == "-" or "0" <= char <= "9":
        number = yield from source.read_run(_NUMBER_CHARS, MAX_NUMBER)
        if number == "-":
            yield from _read_word(source, tell, number)
            return
        tell(number)
        if len(number) > MAX_NUMBER or not _NUMBER.fullmatch(number):
            raise Broken
    else:
        yield from _read_word(source, tell)


def _read_word(source: Source, tell: Tell, sign: str = "") -> Reading[None]:
    word = sign + (yield from source.read_run(_LETTERS, MAX_WORD))
    tell(_WORDS.get(word, word))
    if word not in _WORDS:
        raise Broken


def read_raw_string(source: Source, tell: Tell, quote: str = '"') -> Reading[None]:
    """Read a string, told with its quotes and escapes; JSON has `"` alone for a `quote`."""
    yield from source.expect(quote)
    tell('"')
    half = ""
    while True:
        char = yield from source.peek()
        if char == "\\":
            half = _tell_escape((yield from _read_escape(source)), half, tell)
            continue
        if half:
            tell(_REPLACEMENT)
            half = ""
        if char == quote:
            source.take(1)
            tell('"')
            return
        if char == '"':
            tell(f"\\{source.take(1)}")
        elif char < " ":
            if not char:
                raise Broken
            tell(json.dumps(source.take(1))[1:-1])
        else:
            tell(source.run_of(_PLAIN[quote]))


def _tell_escape(escape: str, half: str, tell: Tell) -> str:
    """Tell an escape that follows the first `half` of a surrogate pair, "" for none. Return it untold where it is such
    a half itself.
    """
    found = _SURROGATE.fullmatch(escape)
    if half and found and not found[1]:
        tell(half + escape)
        return ""
    if half:
        tell(_REPLACEMENT)
    if found and found[1]:
        return escape
    tell(_REPLACEMENT if found else escape)
    return ""


def without_lone_surrogates(text: str) -> str:
    """JSON text, with U+FFFD for each escape that is half a surrogate pair without its other half: no text may have
    one, so that it could neither be written as UTF-8 nor read by every reader.
    """
    return _PAIR_OR_ESCAPE.sub(lambda found: _REPLACEMENT if _SURROGATE.fullmatch(found[0]) else found[0], text)


def _read_escape(source: Source) -> Reading[str]:
    source.take(1)
    char = yield from source.peek()
    if not char:
        return "\\"
    if char == "'":
        return source.take(1)
    if char not in _ESCAPES and char != "u":
        # No escape at all, then: a backslash, as in a path.
        return "\\\\"
    source.take(1)
    if char != "u":
        return "\\" + char
    digits = ""
    while len(digits) < 4 and (one := (yield from source.peek())) and one in "0123456789abcdefABCDEF":
        digits += source.take(1)
    return "\\u" + digits if _HEX.fullmatch(digits) else "\\\\u" + digits


def read_string(source: Source) -> Reading[str]:
    """Read a string's text."""
    pieces: list[str] = []
    yield from read_raw_string(source, pieces.append)
    return str(json.loads("".join(pieces)))


def as_object(text: str) -> str:
    """JSON text of an object that a model wrote as a string. Raises Broken where it is none."""
    source = Source()
    source.push(text)
    source.ended = True
    pieces: list[str] = []
    for _ in _read_object(source, pieces.append):
        raise Broken
    return "".join(pieces)


def _read_object(source: Source, tell: Tell) -> Reading[None]:
    yield from source.skip_space()
    if (yield from source.peek()) != "{":
        raise Broken
    yield from read_value(source, tell)
    yield from source.skip_space()
    if (yield from source.peek()):
        raise Broken


def is_beginning(text: str) -> bool:
    """Return whether a JSON value begins with `text` and is not complete, rather than being broken."""
    source = Source()
    source.push(text)
    try:
        return any(True for _ in read_value(source, ignore))
    except Broken:
        return False


def write(value: object) -> str:
    """JSON text as models write it."""
    return json.dumps(value, ensure_ascii=False)
