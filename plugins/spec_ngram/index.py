"""Where the newest tokens of a growing text stood before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

BLOCK = 512
"""Tokens of which a sorted run is made, or multiples of them."""

AT_ONCE = 8192
"""Tokens that a call indexes at most, a multiple of BLOCK."""

LARGEST_RUN = 32768
"""Tokens of a run that is merged no more: so that a call has so much to merge at most."""

_SIZE = 8
"""Bytes of a token."""

_PLACE_BITS = 24
_PLACES = (1 << _PLACE_BITS) - 1
"""Texts are shorter."""


class GramHash:
    """Hashes of the sequences of `shortest` to `longest` tokens that end in one place.

    Multilinear hashing modulo 2^64, of which the highest bits are taken (Lemire and Kaser, "Strongly universal string
    hashing is fast", 2014). Two sequences that meet cost a draft, and no more: what is found is compared.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        numbers = np.random.default_rng(0x6E6772616D).integers(0, 2**64, longest, np.uint64, endpoint=False)
        lengths = np.arange(shortest, longest + 1)
        back = np.arange(longest, 0, -1)[:, None]  # how far from the end the window's tokens stand
        self.weights = np.where(back <= lengths, numbers[:, None] | np.uint64(1), np.uint64(0))

    def of_last(self, tokens: Int64s) -> list[int]:
        """Return the hashes of the sequences that `tokens` end with, by length."""
        window = tokens[-self.longest :].view(np.uint64)
        hashes = (window @ self.weights[self.longest - window.shape[0] :]) >> np.uint64(_PLACE_BITS + 1)
        found: list[int] = hashes.tolist()
        return found

    def sorted_keys(self, tokens: Int64s, start: int, stop: int) -> list[Int64s]:
        """Return for each length the hashes and places of the sequences that end in `start` to `stop`, in order.

        A key is a hash, shifted, and the place that its sequence ends in.
        """
        first = max(0, start - self.longest + 1)
        missing = max(0, self.longest - 1 - start)
        window = np.concatenate([np.zeros(missing, np.int64), tokens[first:stop]]).view(np.uint64)
        hashes = (sliding_window_view(window, self.longest) @ self.weights) >> np.uint64(_PLACE_BITS + 1)
        keys = (hashes << np.uint64(_PLACE_BITS)).view(np.int64) | np.arange(start, stop)[:, None]
        columns = enumerate(range(self.shortest, self.longest + 1))
        # No sequence begins before the text.
        return [np.sort(keys[max(0, length - 1 - start) :, column]) for column, length in columns]


@dataclass(frozen=True, slots=True)
class _Run:
    """Sorted keys of the sequences that end in `size` neighbouring places, by length."""

    size: int
    keys: list[Int64s]

    def newest(self, column: int, wanted: int) -> int:
        """Return the last place of a hash, or -1."""
        keys = self.keys[column]
        at = int(keys.searchsorted((wanted + 1) << _PLACE_BITS)) - 1
        key = keys.item(at) if at >= 0 else -1
        return key & _PLACES if key >> _PLACE_BITS == wanted else -1


class NgramIndex:
    """Finds the longest sequence that a text ends with and that stood in it before, and there the newest occurrence.

    The text may grow between calls. What is older than a block lies in sorted runs, 8 bytes for each token and length;
    neighbours of equal size are merged, so that there are few. What is newer lies in a dict, which a step adds a few
    entries to. A call indexes `AT_ONCE` tokens at most: one on a long text finds nothing until all of it is indexed.
    """

    def __init__(self, grams: GramHash) -> None:
        self._grams = grams
        self.runs: list[_Run] = []
        self._in_runs = 0
        self.known = 0
        """The sequences that end before this place are indexed."""
        self.newest: dict[bytes, int] = {}
        """Where each sequence of the newest tokens ends last."""

    def find(self, tokens: Int64s) -> int | None:
        """Return the place in which the occurrence ends, -1 if there is none; None if not all is indexed yet. The place
        after it is within `tokens` int64 [n].
        """
        last = tokens.shape[0] - 1
        if not self._take(tokens, last):
            return None
        shortest, longest = self._grams.shortest, min(self._grams.longest, last)
        ending = tokens[-longest:].tobytes() if longest else b""
        length, found = shortest - 1, -1
        while length < longest:
            place = self.newest.get(ending[-(length + 1) * _SIZE :])
            if place is None:
                break
            length, found = length + 1, place
        if length >= longest or not self.runs:
            return found
        hashes = self._grams.of_last(tokens)

        def look(run: _Run, wanted: int) -> int:
            place = run.newest(wanted - shortest, hashes[wanted - shortest])
            return place if place >= 0 and _ends_alike(tokens, place, ending[-wanted * _SIZE :]) else -1

        for run in reversed(self.runs):
            # Only what is longer counts: this run is older than those before. Who quotes has the longest at once.
            if (place := look(run, longest)) >= 0:
                return place
            while length + 1 < longest and (place := look(run, length + 1)) >= 0:
                length, found = length + 1, place
        return found

    def _take(self, tokens: Int64s, stop: int) -> bool:
        """Index the sequences that end before `stop`, or `AT_ONCE` more of them. Return whether that was all."""
        end = min(stop, self.known + AT_ONCE)
        whole = (end - self._in_runs) // BLOCK
        if whole:
            self.newest.clear()
            self.known = self._in_runs + whole * BLOCK
        while whole:
            # The largest power of two, so that neighbours come to be of equal size.
            blocks = 1 << (whole.bit_length() - 1)
            self._add_run(tokens, blocks * BLOCK)
            whole -= blocks
        if end < stop:
            return False
        self._add_newest(tokens, end)
        return True

    def _add_run(self, tokens: Int64s, size: int) -> None:
        start, self._in_runs = self._in_runs, self._in_runs + size
        self.runs.append(_Run(size, self._grams.sorted_keys(tokens, start, self._in_runs)))
        while len(self.runs) > 1 and self.runs[-2].size <= self.runs[-1].size < LARGEST_RUN:
            newer, older = self.runs.pop(), self.runs.pop()
            pairs = zip(older.keys, newer.keys, strict=True)
            # A stable sort of two sorted parts is a merge.
            keys = [np.sort(np.concatenate(pair), kind="stable") for pair in pairs]
            self.runs.append(_Run(older.size + newer.size, keys))

    def _add_newest(self, tokens: Int64s, stop: int) -> None:
        """Index the sequences that end from the runs' end, or what is known, to `stop`."""
        begin = max(0, self.known + 1 - self._grams.longest)
        text = tokens[begin:stop].tobytes()
        for place in range(self.known, stop):
            end = place + 1 - begin
            for length in range(self._grams.shortest, min(self._grams.longest, end) + 1):
                self.newest[text[(end - length) * _SIZE : end * _SIZE]] = place
        self.known = stop


def _ends_alike(tokens: Int64s, place: int, ending: bytes) -> bool:
    """Return whether the tokens up to a place are these."""
    return tokens[place + 1 - len(ending) // _SIZE : place + 1].tobytes() == ending
