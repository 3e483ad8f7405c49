"""How heavy a JSON text is for a parser, found without parsing it."""

from __future__ import annotations

OF_CONTAINER, OF_NAME, OF_STRING = 8, 4, 4
"""What a list or an object weighs, a name in an object beyond its string, and a string, where a comma weighs one: about
the ratios of the time and memory that it takes to parse, check and free them."""


class JsonWeight:
    """The weight of a JSON text that arrives in pieces, as far as `add` has seen it.

    Counts strings, and what separates values outside of them. A parser stops at a syntax error, so the weight up to
    there bounds what it makes; behind one the weight means nothing.
    """

    def __init__(self) -> None:
        self.total = 0
        self._in_string = False
        self._escaped = False

    def add(self, data: bytes) -> None:
        """Weigh one more piece."""
        if not data:
            return
        data = data[self._escaped :]
        self._escaped = False
        if b"\\" in data:
            # Pairs first: the backslash that an odd run leaves escapes the character behind it.
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._escaped = data.endswith(b"\\")
        parts = data.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        containers = outside.count(b"[") + outside.count(b"{")
        self.total += outside.count(b",") + OF_CONTAINER * containers + OF_NAME * outside.count(b":")
        # Of each pair of quotes the second one tells.
        self.total += OF_STRING * ((len(parts) - self._in_string) // 2)
