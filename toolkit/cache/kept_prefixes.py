"""What plugins keep of prefixes beside a prefix cache, found by the tokens that it stands for."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req

MOST = 1024
"""Digests that are remembered of one request, and prefixes that are kept where there is no other limit."""


class Prefix(Protocol):
    """Something kept of the first `length` tokens of a request."""

    @property
    def length(self) -> int: ...


T = TypeVar("T", bound=Prefix)


class KeptPrefixes(Generic[T]):
    """Those that are kept, the one least recently used first.

    One is found by a digest of 128 bits of all of its tokens and their namespace.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, T] = OrderedDict()
        self._lengths = Counter[int]()

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, req: Req, most: int) -> T | None:
        """Return the longest that is kept of a request's tokens, of `most` tokens at most. It counts as used now, since
        a request that begins behind it may be planned.
        """
        lengths = [length for length in self._lengths if length <= most]
        found = digests(req, lengths)
        for length in sorted(lengths, reverse=True):
            if (kept := self._kept.get(found[length])) is not None:
                self._kept.move_to_end(found[length])
                return kept
        return None

    def use(self, req: Req, length: int) -> T | None:
        """Return what is kept of just so many of a request's tokens. It counts as used now."""
        digest = digests(req, [length])[length]
        if (found := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
        return found

    def add(self, req: Req, kept: T) -> bool:
        """Keep something of a request's tokens; False where there is something of these tokens already."""
        digest = digests(req, [kept.length])[kept.length]
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return False
        self._kept[digest] = kept
        self._lengths[kept.length] += 1
        return True

    def evict(self, able: Callable[[T], bool] = lambda kept: True) -> T | None:
        """Let go of the one least recently used that is `able` to go, and return it; None: there is none."""
        digest = next((digest for digest, kept in self._kept.items() if able(kept)), None)
        if digest is None:
            return None
        gone = self._kept.pop(digest)
        self._lengths[gone.length] -= 1
        if not self._lengths[gone.length]:
            del self._lengths[gone.length]
        return gone


def digests(req: Req, lengths: Iterable[int]) -> dict[int, bytes]:
    """Return the digests of a request's first tokens, by how many they are."""
    known: dict[int, bytes] = req.memo.of("kept_prefixes.digests", dict)
    if missing := sorted(length for length in lengths if length not in known):
        if len(known) + len(missing) > MOST:
            known.clear()
            missing = sorted(lengths)
        key, at = req.key(missing[-1]), 0
        namespace = key.namespace.encode()
        digest = blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=16)
        for length in missing:
            digest.update(key.tokens[at:length].tobytes())
            known[length], at = digest.copy().digest(), length
    return known
