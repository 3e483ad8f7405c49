"""The cost of parsing a JSON text, estimated without parsing it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.json_value import JsonValue

OF_CONTAINER, OF_NAME, OF_STRING = 8, 4, 4
"""What a list or an object weighs, a name in an object beyond its string, and a string, where a comma weighs one: about
the ratios of the time and memory that it takes to parse, check and free them."""
MAX_TEXTS = 1024 * 1024
"""What the JSON texts inside of one request may weigh together."""
_BEYOND_BMP = bytes(range(0xF0, 0xF5))
_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
"""The first of the two escapes of a character beyond the first plane, as far as it tells. Hangul also begins with d."""
_SEAM = len(rb"\ud8") - 1


class JsonWeight:
    """The weight of a JSON text that arrives in pieces, as far as `add` has seen it.

    Counts strings, and what separates values outside of them. A parser stops at a syntax error, so the weight up to
    there bounds what it makes; after one the weight means nothing.
    """

    def __init__(self) -> None:
        self.total = 0
        self.wide = False
        """Whether a character needs four bytes in memory, as each of the same string does then."""
        self._in_string = False
        self._escaped = False
        self._end = b""

    def add(self, data: bytes) -> None:
        """Weigh one more piece."""
        if not data:
            return
        self.wide = self.wide or self._has_wide(data)
        data = data[self._escaped :]
        self._escaped = False
        if self._in_string and b'"' not in data:
            # The middle of a long string, such as a picture's.
            self._escaped = (len(data) - len(data.rstrip(b"\\"))) % 2 == 1
            return
        if b"\\" in data:
            # Pairs first: the backslash that an odd run leaves escapes the character after it.
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._escaped = data.endswith(b"\\")
        parts = data.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        containers = outside.count(b"[") + outside.count(b"{")
        self.total += outside.count(b",") + OF_CONTAINER * containers + OF_NAME * outside.count(b":")
        # Of each pair of quotes the second one tells.
        self.total += OF_STRING * ((len(parts) - self._in_string) // 2)

    def _has_wide(self, data: bytes) -> bool:
        if not data.isascii() and len(data.translate(None, _BEYOND_BMP)) < len(data):
            return True
        seam = self._end + data[:_SEAM]
        self._end = (self._end + data[-_SEAM:])[-_SEAM:]
        return _SURROGATE.search(data) is not None or _SURROGATE.search(seam) is not None


class JsonTexts:
    """Parses the JSON texts inside of one request, whose values nothing else has counted."""

    def __init__(self) -> None:
        self._left = MAX_TEXTS

    def parse(self, text: str, param: str, *, parse_constant: Callable[[str], JsonValue] | None = None) -> JsonValue:
        """Return what `json.loads` makes of a text, with `parse_constant`, and raises. Raises InvalidRequest, naming
        `param`, where all texts together weigh more than MAX_TEXTS.
        """
        weight = JsonWeight()
        weight.add(text.encode("utf-8", "surrogatepass"))
        self._left -= weight.total
        if self._left < 0:
            raise InvalidRequest(f"{param}: its JSON text has too many values", param=param, code="too_many_values")
        value: JsonValue = json.loads(text, parse_constant=parse_constant)
        return value
