"""EncoderCache: which pieces of media are encoded. The worker has the states, and obeys the lists made here.

Steps run in the order in which they are launched, so the books say how things will be when the next step runs. What a
step that is under way reads is held, because a step that fails is run again in parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pegboard.plugins.media.api import PieceKey
from pegboard.plugins.media.work import EncodePiece, EncodeWork

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.media.work import ReqMedia

LEAST_PIECE = 64


class EncoderCache:
    """What is encoded, least recently used first. `capacity` and `token_bytes` are in bytes; one step encodes
    `step_tokens`, or one larger piece. A piece counts as `least_piece` tokens at least: an encoder's pass takes a while
    however few it has.
    """

    def __init__(self, capacity: int, token_bytes: int, step_tokens: int, least_piece: int = LEAST_PIECE) -> None:
        self.least_piece = least_piece
        self.capacity = capacity
        self.token_bytes = token_bytes
        self.step_tokens = step_tokens
        self.used = 0
        """Bytes of all encoded pieces."""
        self.encoded = 0
        """Pieces encoded since the start."""
        self.hits = 0
        """Pieces that a request found encoded when it was its turn."""
        self._sizes: OrderedDict[PieceKey, int] = OrderedDict()
        self._fresh: set[PieceKey] = set()
        self._held: dict[int, tuple[PieceKey, ...]] = {}

    def __contains__(self, key: PieceKey) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def held(self) -> frozenset[PieceKey]:
        """What steps under way read."""
        return frozenset(key for keys in self._held.values() for key in keys)

    def too_large(self, media: ReqMedia, page_size: int) -> int:
        """Return the bytes of the most that one page of a prompt reads at once, where the cache cannot hold that; else
        0.
        """
        worst = 0
        for start in {int(start) // page_size * page_size for start in media.starts.tolist()} | {
            (int(stop) - 1) // page_size * page_size for stop in media.stops.tolist()
        }:
            spans = media.spans_in(start, start + page_size)
            sizes = {media.pieces[index]: media.spans[index].count for index in spans}
            worst = max(worst, sum(sizes.values()) * self.token_bytes)
        return worst if worst > self.capacity else 0

    def ready_until(self, media: ReqMedia, start: int, stop: int) -> int:
        """Return the first of the tokens [start, stop) that belongs to a piece which is not encoded; else `stop`."""
        for index in media.spans_in(start, stop):
            if media.pieces[index] not in self._sizes:
                return max(start, media.spans[index].start)
        return stop

    def read(self, key: PieceKey) -> None:
        """Count a request's first look at a piece: a hit, unless the piece was encoded for this look."""
        if key in self._fresh:
            self._fresh.discard(key)
        else:
            self.hits += 1

    def holds(self, number: int) -> bool:
        """Return whether something is kept for the step `number`."""
        return number in self._held

    def hold(self, number: int, keys: Iterable[PieceKey]) -> None:
        """Keep what the step `number` reads until `release`."""
        kept = tuple(dict.fromkeys(keys))
        if kept:
            self._held[number] = kept
            for key in kept:
                self._sizes.move_to_end(key)

    def release(self, number: int) -> None:
        """Note that a step is through, or will never run."""
        self._held.pop(number, None)

    def plan(self, pieces: Iterable[EncodePiece], keep: Iterable[PieceKey]) -> EncodeWork:
        """Return the work of encoding these, which are encoded from now on, and of dropping what they displace: neither
        `keep` nor what is held.
        """
        pieces, spared = tuple(pieces), self.held | set(keep)
        drop = []
        needed = self.used + sum(self.bytes_of(one.tokens) for one in pieces) - self.capacity
        for key, size in self._sizes.items():
            if needed <= 0:
                break
            if key not in spared:
                drop.append(key)
                needed -= size
        self.forget(drop)
        for one in pieces:
            self._sizes[one.key] = self.bytes_of(one.tokens)
            self.used += self._sizes[one.key]
            self._fresh.add(one.key)
        self.encoded += len(pieces)
        return EncodeWork(pieces, tuple(drop))

    def forget(self, keys: Iterable[PieceKey]) -> None:
        """Note that these are not encoded any more."""
        for key in keys:
            self.used -= self._sizes.pop(key, 0)
            self._fresh.discard(key)

    def bytes_of(self, tokens: int) -> int:
        """Return what the states of so many tokens take."""
        return tokens * self.token_bytes

    def size_of(self, key: PieceKey) -> int:
        """Return the bytes of a piece that is encoded; 0 for one that is not."""
        return self._sizes.get(key, 0)

    def idle_error(self) -> str | None:
        """Return what is wrong with the books of an engine without requests, or None."""
        if self._held:
            return f"idle, yet {len(self._held)} steps hold encoded media"
        if self.used != sum(self._sizes.values()) or self.used > self.capacity:
            return f"{self.used} bytes of encoded media in {len(self._sizes)} pieces, of {self.capacity} at most"
        return None


MOST_OFFERS = 16
"""Requests that are looked at for one step's wishes."""


class EncodeQueue:
    """What one plan would like to have encoded, within one step's tokens and the books' bytes."""

    def __init__(self, books: EncoderCache) -> None:
        self.pieces: dict[PieceKey, EncodePiece] = {}
        self.owners: dict[PieceKey, list[Req]] = {}
        self.blocked = False
        """Whether something would have fitted but for what steps under way hold."""
        self._books = books
        self._keep = dict.fromkeys(books.held)
        self._held = set(self._keep)
        self._bytes = sum(map(books.size_of, self._keep))
        self._tokens = 0
        self._offers = 0
        self._refused = False

    @property
    def full(self) -> bool:
        """Whether it is not worth while to offer more."""
        return self._refused or self._offers >= MOST_OFFERS or self._tokens >= self._books.step_tokens

    def add(self, req: Req, media: ReqMedia, start: int, stop: int) -> bool:
        """Wish for what the tokens [start, stop) of a request lack, as much as fits. Return whether that is anything.

        What these tokens have already is kept, or encoding one piece could drop another.
        """
        found = False
        self._offers += 1
        for index in media.spans_in(start, stop):
            key, span = media.pieces[index], media.spans[index]
            if key in self._books:
                if not self._spare(key):
                    break
                continue
            if key not in self.pieces and not self._fits(span.count):
                break
            if key not in self.pieces:
                self.pieces[key] = EncodePiece(key, media.items[span.item], span.count)
                self._tokens += max(span.count, self._books.least_piece)
                self._bytes += self._books.bytes_of(span.count)
            self.owners.setdefault(key, []).append(req)
            found = True
        return found

    def plan(self) -> EncodeWork:
        """Return the work; see `EncoderCache.plan`."""
        return self._books.plan(self.pieces.values(), self._keep)

    def _spare(self, key: PieceKey) -> bool:
        """Keep a piece that is encoded, unless what was wished for before it leaves no room."""
        size = 0 if key in self._keep else self._books.size_of(key)
        if self._bytes + size > self._books.capacity:
            return False
        self._keep[key] = None
        self._bytes += size
        return True

    def _fits(self, tokens: int) -> bool:
        size, books = self._books.bytes_of(tokens), self._books
        if self.pieces and self._tokens + max(tokens, books.least_piece) > books.step_tokens:
            self._refused = True
            return False
        if self._bytes + size <= books.capacity:
            return True
        self._refused = True
        self.blocked = self.blocked or bool(self._held)
        return False
