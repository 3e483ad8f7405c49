"""RunningBatch: the requests that decode, with what each step needs of them in flat arrays.

A request has three lengths: its *known* tokens, those whose KV is *scheduled*, and those whose KV is *computed*
(`Req.kv.committed_len`). The arrays say how far it is known and scheduled; between scheduled and computed lie the steps
that were launched and not committed: none in the normal loop, one in the overlap loop. A step samples the token after
the scheduled ones, which counts as known from then on, so the gap between known and scheduled is one for a request that
decodes. It is larger where several tokens became known at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.sampling import SAMPLING_ROW
from pegboard.core.pipeline.positions import delta_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import Column, Stage

NEVER, UNSTAMPED = -1, -2
"""The step number of "no step", and that of requests that are in none; the two never compare equal."""

NUMBERS: np.dtype[np.void] = np.dtype(list(SAMPLING_ROW), align=True)
"""What a sampler needs of a request."""

_ROW, _INPUT, _ALLOCATED, _STAMP, _FLAGS, _DELTA, _SEQ, _LEFT, _LAST, _GAP = range(10)


class RunningBatch:
    """Requests in the order in which they joined. Arrays are views int64 [n] of buffers that are made once.

    `rows` in the row table; `known_lens` known tokens of prompt and output, those on their way included; `input_lens`
    the prompt's; `gaps` known tokens not scheduled; `allocated` slots of the row; `left` how many more tokens may
    be scheduled; `last` the newest token, where the host knows it; `stamps` the number of the step that sampled it
    last; `flags` of each; `deltas` what a position is beyond its index; `numbers` those of its sampling (NUMBERS);
    `columns` what stages have declared of it; `last_times` float64 when its newest token was committed. `version`
    changes whenever a request joins or leaves. `uneven` says that some gap is larger than one.
    """

    def __init__(self, capacity: int, vocab_size: int, columns: Sequence[tuple[Stage, Column]] = ()) -> None:
        self.reqs: list[Req] = []
        self.version = 0
        self.lanes = 1  # see Executor
        self.uneven = False
        self._vocab_size = vocab_size
        self._ints = np.zeros((10, capacity), np.int64)
        self._numbers = np.zeros(capacity, NUMBERS)
        self._times = np.zeros(capacity, np.float64)
        self._declared = tuple(columns)
        self._columns = [np.zeros(capacity, column.dtype) for _, column in columns]
        self._places: dict[int, int] | None = None
        self.flags_any = 0
        """Flags that some request has."""
        self._view()

    def _view(self) -> None:
        """Point the views at the buffers' first n entries."""
        n = len(self.reqs)
        ints = self._ints[:, :n]
        self.rows: NDArray[np.int64] = ints[_ROW]
        self.known_lens: NDArray[np.int64] = ints[_SEQ]
        self.input_lens: NDArray[np.int64] = ints[_INPUT]
        self.allocated: NDArray[np.int64] = ints[_ALLOCATED]
        self.left: NDArray[np.int64] = ints[_LEFT]
        self.last: NDArray[np.int64] = ints[_LAST]
        self.stamps: NDArray[np.int64] = ints[_STAMP]
        self.flags: NDArray[np.int64] = ints[_FLAGS]
        self.deltas: NDArray[np.int64] = ints[_DELTA]
        self.gaps: NDArray[np.int64] = ints[_GAP]
        self.numbers: NDArray[np.void] = self._numbers[:n]
        self.columns: list[NDArray[np.generic]] = [values[:n] for values in self._columns]
        self.last_times: NDArray[np.float64] = self._times[:n]
        self.flags_any = int(np.bitwise_or.reduce(self.flags)) if n else 0
        self._places = None
        self.uneven = n > 0 and int(self.gaps.max()) > 1
        self.version += 1

    def __len__(self) -> int:
        return len(self.reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self.reqs)

    def __contains__(self, req: object) -> bool:
        return id(req) in self.places

    def __getitem__(self, index: int) -> Req:
        return self.reqs[index]

    @property
    def places(self) -> dict[int, int]:
        """Index of each request by its `id`."""
        if self._places is None:
            self._places = {id(req): index for index, req in enumerate(self.reqs)}
        return self._places

    def any(self, flag: int) -> bool:
        """Return whether some request has this flag."""
        return bool(self.flags_any & flag)

    def decoding(self, stamp: int = NEVER) -> NDArray[np.int64]:
        """Return the places of the requests that may have one more token, and have one to compute for it; with several
        `lanes` a share: those that wait longest, and none for which the step under way, `stamp`, samples a token.
        """
        found = np.flatnonzero((self.left > 0) & (self.gaps == 1) if self.uneven else self.left > 0)
        if self.lanes > 1:
            free = found[self.stamps[found] != stamp]
            found = np.sort(free[np.argsort(self.stamps[free], kind="stable")[: -(-found.shape[0] // self.lanes)]])
        return found

    def catching_up(self) -> NDArray[np.int64]:
        """Return the places of the requests that have several tokens to compute; first the one that waits longest."""
        if not self.uneven:
            return np.empty(0, np.int64)
        places = np.flatnonzero((self.left > 0) & (self.gaps > 1))
        return places[np.argsort(self.stamps[places], kind="stable")]

    def waits_for(self, stamp: int, flag: int) -> bool:
        """Return whether the step `stamp` samples a token for some request with this flag."""
        return self.any(flag) and bool(((self.stamps == stamp) & (self.flags & flag != 0)).any())

    def join(self, reqs: Iterable[Req], stamp: int = UNSTAMPED) -> None:
        """Let requests join for which the step `stamp` samples a token; UNSTAMPED: whose tokens are all known. Those
        that are here already have no gap but that token then.
        """
        here = self.places if self.uneven else {}
        for req in reqs:
            place = here.get(id(req))
            if place is None:
                place = len(self.reqs)
                self.reqs.append(req)
                ints = req.kv.row, req.input_len, req.kv.allocated_len, stamp, req.flags, delta_of(req)
                self._ints[:_SEQ, place] = ints
                self._numbers[place] = req.sampling.row(req.seed, self._vocab_size)
                self._times[place] = req.timing.last_token
                for (stage, column), values in zip(self._declared, self._columns, strict=True):
                    values[place] = _number(stage, column, req)
            self._take(place, req, coming=int(stamp != UNSTAMPED))
            self._ints[_STAMP, place] = stamp
        self._view()

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Let go of every request whose entry of `mask` bool [n] is False."""
        if mask.all():
            return
        places = np.flatnonzero(mask)
        n, m = len(self.reqs), places.shape[0]
        for place in np.flatnonzero(~mask).tolist():
            self.reqs[place].timing.last_token = float(self._times[place])
        self._ints[:, :m] = self._ints[:, :n][:, places]
        self._numbers[:m] = self._numbers[:n].take(places)  # an index would copy records field by field
        self._times[:m] = self._times[:n][places]
        for values in self._columns:
            values[:m] = values[:n][places]
        self.reqs = [self.reqs[place] for place in places.tolist()]
        self._view()

    def remove(self, reqs: Iterable[Req]) -> None:
        """Let go of those of `reqs` that are here."""
        places = self.places
        gone = [place for req in reqs if (place := places.get(id(req))) is not None]
        if gone:
            mask = np.ones(len(self.reqs), np.bool_)
            mask[gone] = False
            self.keep(mask)

    def rewind(self) -> None:
        """Forget everything scheduled that is not committed: what was launched is not going to be used."""
        for place, req in enumerate(self.reqs):
            self._take(place, req)
        self.stamps[:] = UNSTAMPED
        self.uneven = bool((self.gaps > 1).any())

    def refresh(self, reqs: Iterable[Req]) -> None:
        """Take from these requests how far they are: each has gained some tokens in a step, and none of them is in a
        step under way.
        """
        places = self.places
        for req in reqs:
            place = places.get(id(req))
            if place is not None:
                self._take(place, req)
        self.uneven = bool((self.gaps > 1).any())

    def _take(self, place: int, req: Req, coming: int = 0) -> None:
        """Take from a request how far it is, with no step of it under way but one that samples `coming` tokens."""
        known, last = req.seq_len, 0 if coming else req.tokens.last
        gap = coming or known - req.kv.committed_len
        # At once, since numpy takes nearly as long to write one number.
        self._ints[_SEQ:, place] = known + coming, max(0, req.remaining_tokens - coming), last, gap

    def note(self, reqs: list[Req], tokens: NDArray[np.int64], now: float, version: int) -> NDArray[np.float64]:
        """Take what was sampled for `reqs`; the seconds since each one's token before, NaN for a first one.

        `version` is the batch's own at launch when `reqs` were all of it, in order; NEVER otherwise.
        """
        if version == self.version:
            self.last[:] = tokens
            intervals: NDArray[np.float64] = now - self.last_times
            self.last_times[:] = now
            return intervals
        places = self.places
        found = np.fromiter((places.get(id(req), NEVER) for req in reqs), np.int64, len(reqs))
        here = found >= 0
        at = found[here]
        intervals = np.full(len(reqs), np.nan)
        before = self.last_times[at]
        intervals[here] = np.where(before > 0, now - before, np.nan)
        self.last[at] = tokens[here]
        self.last_times[at] = now
        return intervals


def _number(stage: Stage, column: Column, req: Req) -> float:
    """Return a request's number. Where that raises, the step with which it joins fails for it (`Points.pack`)."""
    try:
        return column.of(req) if req.flags & stage.flag else 0
    except Exception:
        return 0
