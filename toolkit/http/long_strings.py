"""Long strings of large bodies: taken out before parsing, and put back into the result.

A parser holds the interpreter's lock for as long as it parses. Pictures and videos are long strings in base64, which it
would only copy. They are found, checked and copied here, in pieces, between which other threads run. The parser gets
the rest of the body, whose size is bounded apart.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import BaseModel

from pegboard.core.interfaces.errors import InvalidRequest

LONG = 4096
"""Bytes of a string from which on it is certainly taken out, where it can be."""
PIECE = 16 * 1024
"""Bytes that are looked at at once, in 0.1 ms."""
_STEP = LONG // 2
_PLAIN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=_-%"
"""What addresses in base64 consist of, and none of what may stand between two strings."""
_HEAD = re.compile(rb'(?i:data:)(?:[^"\\,\x00-\x1f\x7f-\xff]|\\/|\\u002[bB]){0,1024},')
_ADDRESS_HEAD = re.compile(r'(?i:data:)[^"\\,\x00-\x1f\x7f-\U0010ffff]{0,1024},')
_NAMES = re.compile(rb"[ \t\r\n]*:")
"""After a string that is a name in an object."""
_SHORT_ESCAPES = ((rb"\/", b"/"), (rb"\n", b"\n"), (rb"\r", b"\r"))
_ESCAPES = (
    *_SHORT_ESCAPES, (rb"\u002b", b"+"), (rb"\u002B", b"+"), (rb"\u002f", b"/"), (rb"\u002F", b"/"),
    (rb"\u003d", b"="), (rb"\u003D", b"="),
)  # fmt: skip
"""Escapes with which some languages write base64 in JSON, and those of the ends of its lines."""
_LONGEST_ESCAPE = 6
_PLACE = re.compile(r"at line (\d+) column (\d+)")
_NUMBERS = {int, float, bool}


@dataclass(slots=True)
class LongStrings:
    """A body without its long strings: `rest` is the JSON text with a short string in the place of each."""

    rest: bytes = b""
    _strings: dict[str, str] = field(default_factory=dict)
    """What was taken out, by what stands in its place."""
    _cuts: list[tuple[int, int]] = field(default_factory=list)
    """Where in `rest` each of them stands, and how many bytes of the body are missing there."""
    _mark: str = field(default_factory=lambda: secrets.token_hex(16))
    """So that no string of a client's is taken for a place."""

    @classmethod
    def taken_out(cls, data: bytes | bytearray, most: int | None = None) -> LongStrings:
        """Return a body's rest, and what was taken out: values of plain characters, with no escapes but a few. Raises
        InvalidRequest (413) where the rest has more than `most` bytes.
        """
        found, end, size = cls(), 0, 0
        parts: list[memoryview | bytes] = []
        with memoryview(data) as view:
            for start, stop in _runs(data):
                if not _is_value(data, start, stop) or (value := _value(data, view, start, stop)) is None:
                    continue
                token = found.take(value)
                parts += [view[end:start], token.encode()]
                size += start - end
                found._cuts.append((size, stop - start - len(token)))
                size += len(token)
                end = stop
            parts.append(view[end:])
            size += len(data) - end
            # Not copied, if it is too much: that alone would take many milliseconds.
            found.rest = b"" if most is not None and size > most else b"".join(parts)
            parts.clear()
        if size > len(found.rest):
            raise _too_large(size, most)
        return found

    def take(self, value: str) -> str:
        """Take a string out; return what stands in its place."""
        # What looks at the beginning of an address finds it.
        head = _ADDRESS_HEAD.match(value)
        token = f"{head[0] if head else ''}pegboard-{self._mark}-{len(self._strings)}"
        self._strings[token] = value
        return token

    def take_long(self, value: str) -> str:
        """Return a string, or what stands in its place, if it is a long one."""
        return value if len(value) < LONG else self.take(value)

    def put_back(self, value: object) -> object:
        """Return a parsed value with its strings in it. Lists, objects and models are changed in place."""
        if not self._strings:
            return value
        if isinstance(value, str):
            return self._strings.get(value, value) if len(value) < LONG else value
        if isinstance(value, BaseModel):
            self.put_back(vars(value))
            self.put_back(value.__pydantic_extra__)
        elif isinstance(value, dict):
            value.update({name: self.put_back(one) for name, one in value.items()})
        elif isinstance(value, list) and not _NUMBERS.issuperset(map(type, value)):
            value[:] = map(self.put_back, value)
        return value

    def in_body(self, message: str) -> str:
        """Return a parser's message with the place that it names as it is in the whole body."""
        return _PLACE.sub(lambda found: self._moved(int(found[1]), int(found[2])), message)

    def _moved(self, line: int, column: int) -> str:
        start = 0
        for _ in range(line - 1):
            start = self.rest.find(b"\n", start) + 1
        missing = sum(size for at, size in self._cuts if start <= at < start + column)
        return f"at line {line} column {column + missing}"


def _runs(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield where there are no quotes for at least LONG bytes, and some shorter ones: from one quote to the next."""
    at = 0
    while at < len(data):
        if data.find(b'"', at, at + _STEP) >= 0:
            at += _STEP
            continue
        start, stop = data.rfind(b'"', max(0, at - _STEP), at), data.find(b'"', at)
        if stop < 0:
            return
        if start >= 0:
            yield start + 1, stop
        at = stop + 1


def _is_value(data: bytes | bytearray, start: int, stop: int) -> bool:
    """Return whether what stands between two quotes may be a string, and is not a name in an object. A quote after a
    backslash is part of a string; what follows a string's end is never plain.
    """
    return data[max(0, start - 2) : start - 1] != b"\\" and not _NAMES.match(data, stop + 1)


def _value(data: bytes | bytearray, view: memoryview, start: int, stop: int) -> str | None:
    """Return the value of a string that has plain characters only, after a head as `data:` addresses have it."""
    head = _HEAD.match(data, start, min(start + LONG, stop))
    at = start if head is None else head.end()
    escaped = data.find(b"\\", start, stop) >= 0
    pieces = [_unescaped(bytes(view[start:at]))]
    while at < stop:
        end = min(at + PIECE, stop)
        if end < stop and (cut := data.rfind(b"\\", end - _LONGEST_ESCAPE + 1, end)) >= 0:
            # No escape is cut in two.
            end = cut
        piece = bytes(view[at:end])
        # The event loop waits for the interpreter's lock for 5 ms each time, unless it is given up.
        time.sleep(0)
        if piece.translate(None, _PLAIN + b"\\"):
            return None
        if escaped:
            pieces.append(_unescaped(piece))
            if b"\\" in pieces[-1]:
                return None
        at = end
    return b"".join(pieces).decode("ascii") if escaped else str(view[start:stop], "ascii")


def _too_large(size: int, most: int | None) -> InvalidRequest:
    text = (
        f"the body has {size} bytes beside media in base64, and {most} are read (server.max_body_bytes); media count, "
        "too, if their base64 has other characters or escapes than it needs"
    )
    return InvalidRequest(text, status=413, code="body_too_large")


def _unescaped(piece: bytes) -> bytes:
    """Return a piece without the escapes that are known; one that has other ones has backslashes still."""
    if b"\\" in piece:
        for escape, character in _ESCAPES if b"\\u" in piece else _SHORT_ESCAPES:
            piece = piece.replace(escape, character)
    return piece
