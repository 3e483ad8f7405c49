"""Snapshots: states of prefixes that requests may begin from, found by the tokens that they stand for."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req

_MOST_DIGESTS = 1024
"""Digests that are remembered of one request."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a prefix of `length` tokens."""

    slot: int
    length: int


class Snapshots:
    """Those that are kept, the one least recently used first. Each has a slot of its own.

    A snapshot is found by a digest of 128 bits of all of its tokens and their namespace.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._lengths = Counter[int]()
        self.slots: set[int] = set()
        """Theirs."""

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, req: Req, most: int) -> Snapshot | None:
        """Return the longest snapshot of a prefix of a request's tokens, of `most` tokens at most."""
        lengths = [length for length in self._lengths if length <= most]
        digests = _digests(req, lengths)
        for length in sorted(lengths, reverse=True):
            if (found := self._kept.get(digests[length])) is not None:
                return found
        return None

    def use(self, req: Req, length: int) -> Snapshot | None:
        """Return the snapshot of just so many of a request's tokens, which counts as used now."""
        digest = _digests(req, [length])[length]
        if (found := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
        return found

    def add(self, req: Req, snapshot: Snapshot) -> bool:
        """Keep a snapshot of a request's tokens; False where there is one of these tokens already."""
        digest = _digests(req, [snapshot.length])[snapshot.length]
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return False
        self._kept[digest] = snapshot
        self._lengths[snapshot.length] += 1
        self.slots.add(snapshot.slot)
        return True

    def evict(self, needed: AbstractSet[int]) -> int | None:
        """Let go of the one least recently used whose slot is not `needed`. Return its slot; None: there is none."""
        digest = next((digest for digest, one in self._kept.items() if one.slot not in needed), None)
        if digest is None:
            return None
        gone = self._kept.pop(digest)
        self.slots.discard(gone.slot)
        self._lengths[gone.length] -= 1
        if not self._lengths[gone.length]:
            del self._lengths[gone.length]
        return gone.slot


def _digests(req: Req, lengths: Iterable[int]) -> dict[int, bytes]:
    """Return the digests of a request's first tokens, by how many they are."""
    known: dict[int, bytes] = req.memo.of("states.digests", dict)
    if missing := sorted(length for length in lengths if length not in known):
        if len(known) + len(missing) > _MOST_DIGESTS:
            known.clear()
            missing = sorted(lengths)
        key, at = req.key(missing[-1]), 0
        namespace = key.namespace.encode()
        digest = blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=16)
        for length in missing:
            digest.update(key.tokens[at:length].tobytes())
            known[length], at = digest.copy().digest(), length
    return known
