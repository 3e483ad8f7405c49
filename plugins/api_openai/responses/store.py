"""Answers that are kept, within bounds, so that later ones can follow on."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pegboard.plugins.api_openai.responses.replay import Tape

_REFERENCE = 8
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


@dataclass(slots=True, eq=False)
class Item:
    """One item of conversations. `id` is what the store knows it by: "" before it is kept, and where it is the copy of
    one that the store knows already. `origin` is the response that brought it.
    """

    value: dict[str, Any]
    id: str = ""
    origin: str = ""
    size: int = 0
    holders: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer, and the items of the whole conversation up to its end: at first those of the responses before, then
    from `first` on its own input, and its output from `last` on. `tape` tells its stream again.
    """

    response: dict[str, Any]
    items: list[Item]
    first: int
    last: int
    tape: Tape
    size: int

    @property
    def input(self) -> list[Item]:
        """The input that came with the request."""
        return self.items[self.first : self.last]


@dataclass(slots=True)
class ResponseStore:
    """In memory, for as long as the server runs. What was least recently used goes first.

    Answers that follow on another share its items with it, and so do those that refer to items. Each item is counted
    once, for as long as an answer that is kept has it in its conversation; so long it is found by its id.
    """

    most: int
    most_bytes: int
    _kept: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    _items: dict[str, Item] = field(default_factory=dict)
    _bytes: int = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: dict[str, Any], before: Sequence[Item], own: Sequence[Item], tape: Tape) -> None:
        """Keep an answer whose conversation was `before`, and then its `own` input."""
        identity = str(response["id"])
        self.drop(identity)
        output = [Item(one, str(one["id"])) for one in response["output"]]
        items = [*before, *own, *output]
        size = len(msgspec.json.encode({**response, "output": []})) + _REFERENCE * len(items) + tape.size
        first = len(before)
        self._kept[identity] = Stored(response, items, first, first + len(own), tape, size)
        self._bytes += size
        for item in items:
            self._hold(item, identity)
        while self._kept and (len(self._kept) > self.most or self._bytes > self.most_bytes):
            self.drop(next(iter(self._kept)))

    def get(self, identity: str) -> Stored | None:
        """What is kept under this id, if anything."""
        found = self._kept.get(identity)
        if found is not None:
            self._kept.move_to_end(identity)
        return found

    def item(self, identity: str) -> Item | None:
        """The item of this id in a conversation that is kept, if any. Its response was used with it."""
        found = self._items.get(identity)
        if found is not None and found.origin in self._kept:
            self._kept.move_to_end(found.origin)
        return found

    def drop(self, identity: str) -> bool:
        """Forget an answer. False where there is none."""
        found = self._kept.pop(identity, None)
        if found is None:
            return False
        self._bytes -= found.size
        for item in found.items:
            item.holders -= 1
            if not item.holders:
                self._bytes -= item.size
                if self._items.get(item.id) is item:
                    del self._items[item.id]
        return True

    def _hold(self, item: Item, response: str) -> None:
        item.holders += 1
        if item.holders > 1:
            return
        if not item.origin:
            item.origin = response
            self._name(item)
            item.size = len(msgspec.json.encode(item.value))
        self._bytes += item.size
        if item.id:
            self._items.setdefault(item.id, item)

    def _name(self, item: Item) -> None:
        """Give an item of an input its id. One that a client made up is replaced, since another client could guess it;
        one that is known here came from here.
        """
        given = item.value.get("id")
        if item.id or (isinstance(given, str) and given in self._items):
            return
        prefix = _PREFIXES.get(str(item.value.get("type") or "message"), "item")
        item.id = f"{prefix}_{uuid.uuid4().hex}"
        item.value = {**item.value, "id": item.id}
