"""What requests of one namespace have said, for others of it."""

from __future__ import annotations

import sys
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

_SIZE = 8
"""Bytes of a token."""


class SharedTexts:
    """What followed each sequence of `shortest` to `longest` tokens last: a trie of outputs, read from the end of a
    sequence, whose nodes lie in one table.

    It has `capacity` nodes at most, all namespaces together, and loses those that have not been used for longest. Keys
    begin with the namespace, so nothing is found from another one.
    """

    def __init__(self, shortest: int, longest: int, capacity: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._capacity = capacity
        self._next: OrderedDict[tuple[str, bytes], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._next)

    def add(self, namespace: str, tokens: NDArray[np.int64], start: int, stop: int, first: int) -> None:
        """Remember what `tokens` from `start` to `stop` follow, back to `first`: a few steps per token and length."""
        longest = self._lengths[0]
        begin = max(first, start - longest)
        text = tokens[begin:stop].tobytes()
        for place, token in enumerate(tokens[start:stop].tolist(), start - begin):
            for length in self._lengths:
                if length <= place:
                    key = (namespace, text[(place - length) * _SIZE : place * _SIZE])
                    self._next[key] = token
                    self._next.move_to_end(key)
        while len(self._next) > self._capacity:
            self._next.popitem(last=False)

    def follow(self, namespace: str, tokens: NDArray[np.int64], most: int) -> list[int]:
        """Return up to `most` tokens: each what followed the longest known sequence that the text and they end with."""
        text = tokens[-self._lengths[0] :].tobytes()
        found: list[int] = []
        while len(found) < most:
            token = self._after(namespace, text)
            if token is None:
                break
            found.append(token)
            text = text[_SIZE:] + token.to_bytes(_SIZE, sys.byteorder, signed=True)
        return found

    def _after(self, namespace: str, text: bytes) -> int | None:
        for length in self._lengths:
            if length * _SIZE <= len(text):
                token = self._next.get(key := (namespace, text[-length * _SIZE :]))
                if token is not None:
                    self._next.move_to_end(key)
                    return token
        return None
