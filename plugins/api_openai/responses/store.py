"""Answers that are kept, within bounds, so that later ones can follow on."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pegboard.plugins.api_openai.contents import RESPONSE_PARTS
from pegboard.plugins.api_openai.responses.replay import Tape
from pegboard.toolkit.parsing.json_weight import JsonWeight

_REFERENCE = 8
_OF_WEIGHT = 16
"""Bytes of memory for each unit that a JSON text weighs: an empty object has 64 and a place in a list, and weighs 9."""
_LONG = 4096
"""Characters from which on an address is not weighed with the JSON around it."""
_ADDRESSES = frozenset(field for _, field in RESPONSE_PARTS.values())
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
    """One item of conversations. `id` is what the store knows it by: "" before it is kept. `origin` is the response
    that brought it, `size` its bytes as JSON, and `room` about those that it takes in memory.
    """

    value: dict[str, Any]
    id: str = ""
    origin: str = ""
    size: int = 0
    room: int = 0
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
    room: int

    @property
    def input(self) -> list[Item]:
        """The input that came with the request."""
        return self.items[self.first : self.last]


@dataclass(slots=True)
class ResponseStore:
    """In memory, for as long as the server runs: a shelf for each API key, which sees no other. Where all together are
    too much, the fullest shelf loses what it used least recently.
    """

    most: int
    most_bytes: int
    _shelves: dict[str, Shelf] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self._shelves.values()))

    @property
    def bytes(self) -> int:
        """What all shelves hold, about."""
        return sum(one.bytes for one in self._shelves.values())

    def of(self, owner: str) -> Shelf:
        """Return the shelf of a key, by its name."""
        return self._shelves.setdefault(owner, Shelf(self))

    def trim(self) -> None:
        """Keep the bounds."""
        while len(self) > self.most:
            max(self._shelves.values(), key=len).drop_oldest()
        while self.bytes > self.most_bytes:
            max(self._shelves.values(), key=lambda one: one.bytes).drop_oldest()


@dataclass(slots=True)
class Shelf:
    """What one key has in a store.

    Answers that follow on another share its items with it, and so do those that refer to items. Each item is counted
    once, for as long as an answer that is kept has it in its conversation; so long it is found by its id. Where a
    client has sent it again, each copy is an item of the same id, and the first one is found.
    """

    _store: ResponseStore
    bytes: int = 0
    _kept: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    _items: dict[str, dict[Item, None]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: dict[str, Any], before: Sequence[Item], own: Sequence[Item], tape: Tape) -> None:
        """Keep an answer whose conversation was `before`, and then its `own` input."""
        identity = str(response["id"])
        self.drop(identity)
        output = [Item(one, str(one["id"])) for one in response["output"]]
        items = [*before, *own, *output]
        room = _size_and_room({**response, "output": []})[1] + _REFERENCE * len(items) + tape.size
        first = len(before)
        self._kept[identity] = Stored(response, items, first, first + len(own), tape, room)
        self.bytes += room
        for item in items:
            self._hold(item, identity)
        self._store.trim()

    def get(self, identity: str) -> Stored | None:
        """Return what is kept under this id, if anything."""
        found = self._kept.get(identity)
        if found is not None:
            self._kept.move_to_end(identity)
        return found

    def item(self, identity: str) -> Item | None:
        """Return the item of this id in a conversation that is kept, if any. Its response was used with it."""
        found = next(iter(self._items.get(identity, ())), None)
        if found is not None and found.origin in self._kept:
            self._kept.move_to_end(found.origin)
        return found

    def drop(self, identity: str) -> bool:
        """Forget an answer. False where there is none."""
        found = self._kept.pop(identity, None)
        if found is None:
            return False
        self.bytes -= found.room
        for item in found.items:
            item.holders -= 1
            if not item.holders:
                self.bytes -= item.room
                same = self._items[item.id]
                del same[item]
                if not same:
                    del self._items[item.id]
        return True

    def drop_oldest(self) -> None:
        """Forget what was used least recently."""
        self.drop(next(iter(self._kept)))

    def _hold(self, item: Item, response: str) -> None:
        item.holders += 1
        if item.holders > 1:
            return
        if not item.origin:
            item.origin = response
            self._name(item)
            addresses, rest = _without_addresses(item.value)
            size, room = _size_and_room(rest)
            item.size, item.room = addresses + size, addresses + room
        self.bytes += item.room
        self._items.setdefault(item.id, {})[item] = None

    def _name(self, item: Item) -> None:
        """Give an item of an input its id. One that a client made up is replaced, since another client could guess it;
        one that is known here came from here.
        """
        given = item.value.get("id")
        if item.id:
            return
        if isinstance(given, str) and given in self._items:
            item.id = given
            return
        prefix = _PREFIXES.get(str(item.value.get("type") or "message"), "item")
        item.id = f"{prefix}_{uuid.uuid4().hex}"
        item.value = {**item.value, "id": item.id}


def _without_addresses(value: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return how many characters an item's long addresses have, and the item without these. They may have many
    megabytes, and the event loop waits while an item is weighed.
    """
    length, rest = 0, dict(value)
    for name in ("content", "output"):
        parts = value.get(name)
        if not isinstance(parts, list):
            continue
        rest[name] = list(parts)
        for i, part in enumerate(parts):
            if isinstance(part, dict) and not _ADDRESSES.isdisjoint(part):
                taken, rest[name][i] = _without_address(part)
                length += taken
    return length, rest


def _without_address(part: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """As `_without_addresses`, of a part. An address stands in a field of it, or there in `url`."""
    length, rest = 0, dict(part)
    for name in _ADDRESSES & part.keys():
        inner = part[name]
        address = inner.get("url") if isinstance(inner, dict) else inner
        # A string knows whether it is ASCII; then it takes as many bytes as it has characters.
        if isinstance(address, str) and len(address) > _LONG and address.isascii():
            length += len(address)
            rest[name] = {**inner, "url": ""} if isinstance(inner, dict) else ""
    return length, rest


def _size_and_room(value: object) -> tuple[int, int]:
    """Return bytes of a JSON value as text, and in memory: about, but far faster than looking at each of its parts."""
    text = msgspec.json.encode(value)
    weight = JsonWeight()
    weight.add(text)
    widest = 4 if weight.wide else 1 if text.isascii() else 2
    return len(text), widest * len(text) + _OF_WEIGHT * weight.total
