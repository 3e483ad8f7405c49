"""Answers that are kept, within bounds, so that later ones can follow on."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

_REFERENCE = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer, and the items of the whole conversation up to its end."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    size: int


class ResponseStore:
    """In memory, for as long as the server runs. What was least recently used goes first.

    Answers that follow on another share its items with it, so each is counted with what it added.
    """

    def __init__(self, *, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: dict[str, Any], before: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
        """Keep an answer whose conversation was `before`, and then its `own` items, the answer's included."""
        identity = str(response["id"])
        self.drop(identity)
        size = len(msgspec.json.encode([response, own])) + _REFERENCE * (len(before) + len(own))
        self._kept[identity] = Stored(response, before + own, size)
        self._bytes += size
        while self._kept and (len(self._kept) > self._most or self._bytes > self._most_bytes):
            self.drop(next(iter(self._kept)))

    def get(self, identity: str) -> Stored | None:
        """What is kept under this id, if anything."""
        found = self._kept.get(identity)
        if found is not None:
            self._kept.move_to_end(identity)
        return found

    def drop(self, identity: str) -> bool:
        """Forget an answer. False where there is none."""
        found = self._kept.pop(identity, None)
        if found is not None:
            self._bytes -= found.size
        return found is not None
