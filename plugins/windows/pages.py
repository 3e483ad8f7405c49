"""The pages of all groups: which requests fit, what they hold, and what is kept for later ones.

A request holds, in each group, the pages that its next step reads and writes: those from the window before its last
computed page on. What lies behind that goes back when results are taken, by what is computed and not by what is under
way: so a step that fails can run again over the same pages, and the next owner of a page writes to it in a later step.

Requests that decode always find a page. A request is admitted, and the next chunk of its prompt computed, only where
all pages suffice for what every request holds, or may come to hold in decodes (`GroupPages.bound`). What tails hold
beside that they give up when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.req import NO_ROW, ReqSlot
from pegboard.core.interfaces.status import FinishType
from pegboard.core.interfaces.step import StepLost
from pegboard.plugins.windows.group import GroupPages
from pegboard.plugins.windows.tails import Tail, Tails

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.windows.messages import Memory

_NEVER = 2**62
_NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class Use:
    """What is known of a request: its `row` while it has pages. Behind its first `kept` tokens there is a tail, and
    behind `branch` one is wanted: so many of its tokens were found in the prefix cache, and others share them.
    """

    row: int = NO_ROW
    kept: int = 0
    branch: int = 0


USE = ReqSlot(Use)


class WindowPages:
    """Groups with these `windows`, whose pages `memory` counts. Tails lie `every` tokens apart in outputs."""

    def __init__(self, windows: Sequence[int], memory: Memory, page_size: int, every: int) -> None:
        self.groups = [
            GroupPages(window, count, memory, page_size) for window, count in zip(windows, memory.pages, strict=True)
        ]
        self.tails = Tails(self._gone)
        self.resumed = 0
        """Requests that began behind a tail."""
        self._page = page_size
        self._every = every
        self._nearest = max(page_size, every // 4)
        """A branch is worth a tail so many tokens behind the one before."""
        self._seated = np.zeros(memory.rows, np.bool_)
        self._next = np.full(memory.rows, _NEVER)
        """With how many computed tokens a tail of each request is due."""

    # ---- a plan ----------------------------------------------------------------------------------------------------
    def found(self, req: Req, length: int) -> int:
        """Return behind how many of a request's first `length` tokens, which the cache has, it can go on, and note
        where it begins to differ.
        """
        tail = self.tails.longest(req, length)
        use = USE.of(req)
        use.kept = 0 if tail is None else tail.length
        use.branch = length // self._page * self._page if length - use.kept >= self._nearest else 0
        return use.kept

    def room(self, req: Req, start: int, take: int, planned: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many of a request's tokens [start, start + take) there are pages for, where `planned` pages of
        each group are promised to others; and the pages that it needs beside those that it has or may need anyway.
        """
        limit, row = req.seq_len + req.remaining_tokens, USE.of(req).row
        places = []
        for group, promised in zip(self.groups, planned, strict=True):
            if row == NO_ROW:
                first, own, bound = group.first_read(start), 0, group.bound_of(limit)
            else:
                first, bound = int(group.first[row]), int(group.bound[row])
                own = max(bound, int(group.stop[row]) - first)
            room = group.count - promised - group.spoken_for() + own
            if room < bound:
                return 0, []
            places.append((first, own, bound))
            stop = (first + room) * self._page
            if stop < limit:  # the next token has to have a place as well
                take = min(take, stop - 1 - start)
        stop = -(-min(start + take + 1, limit) // self._page)
        return take, [max(bound, stop - first) - own for first, own, bound in places]

    # ---- a step ----------------------------------------------------------------------------------------------------
    def extend(
        self, reqs: Sequence[Req], rows: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        """Give requests what the pass over their tokens [start, stop) reads and writes: the same again for one that
        runs once more. Return, by group, the places of the row table int64 [n] that are new.

        Raises StepLost where the pages before a request's first token are not kept, or not its own yet, and where pages
        do not suffice: several tokens of a running request are computed at once. The requests then wait again, and are
        admitted as others are.
        """
        new = np.flatnonzero(~self._seated[rows]).tolist()
        # All of them first: where one is not there, no request has pages of which the device is not told.
        tails = [self._tail(reqs[place], int(starts[place])) for place in new]
        for place, tail in zip(new, tails, strict=True):
            self._seat(reqs[place], int(rows[place]), int(starts[place]), tail)
        lacking = [group.missing(rows, stops) for group in self.groups]
        for group, missing in zip(self.groups, lacking, strict=True):
            if missing.sum() > group.available:
                raise StepLost(f"no page is left for layers with window {group.window}")
        found = []
        for group, missing in zip(self.groups, lacking, strict=True):
            begun = [group.places(row, int(group.first[row]), int(group.stop[row])) for row in rows[new].tolist()]
            found.append(np.concatenate([*begun, self._extend(group, rows, missing)]))
        return found

    def _tail(self, req: Req, start: int) -> Tail | None:
        """Return the tail that a request without pages begins behind. Raises StepLost where it is not kept, and where
        the request was admitted with fewer cached tokens: the step before has failed, and the request is still to get
        pages when that step runs again.
        """
        if not start:
            return None
        tail = None if start > req.kv.prefix_len else self.tails.use(req, start)
        if tail is None:
            raise StepLost(f"the window before token {start} of {req} is not kept")
        return tail

    def _seat(self, req: Req, row: int, start: int, tail: Tail | None) -> None:
        """Give a request that has just got its row the pages before its first token."""
        limit, use = req.seq_len + req.remaining_tokens, USE.of(req)
        for number, group in enumerate(self.groups):
            pages = _NONE if tail is None else tail.pages[number]
            group.seat(row, start, pages, group.bound_of(limit))
        self.resumed += bool(start)
        use.row, use.kept = row, start
        self._seated[row] = True
        self._plan_tail(req, use, start)

    def _extend(self, group: GroupPages, rows: NDArray[np.int64], missing: NDArray[np.int64]) -> NDArray[np.int64]:
        wanted, places = int(missing.sum()), [_NONE]
        while len(group.free) < wanted and self.tails.evict_one():
            pass
        for at in np.flatnonzero(missing).tolist():
            row, first = int(rows[at]), int(group.stop[rows[at]])
            group.extend(row, int(missing[at]))
            places.append(group.places(row, first, int(group.stop[row])))
        return np.concatenate(places)

    def computed(
        self, reqs: Sequence[Req], rows: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> None:
        """Note that tokens [start, stop) of requests are computed: keep tails that are due, and take back what lies
        behind windows.
        """
        for at in np.flatnonzero(stops >= self._next[rows]).tolist():
            self._keep(reqs[at], int(rows[at]), int(starts[at]), int(stops[at]))
        for group in self.groups:
            for at in np.flatnonzero(group.passed(rows, stops)).tolist():
                group.settle(int(rows[at]), int(stops[at]))

    def release(self, req: Req) -> None:
        """Take back a request's pages. Those of its last window stay as a tail where that may be of use."""
        use = USE.peek(req)
        if use is None or use.row == NO_ROW:
            return
        length = req.kv.committed_len // self._page * self._page
        reason = req.output.finish_reason
        if length > use.kept and (reason is None or reason.type is not FinishType.ABORT):
            self._keep_tail(req, use, length)
        for group in self.groups:
            group.release(use.row)
        self._seated[use.row], self._next[use.row] = False, _NEVER
        use.row, use.kept, use.branch = NO_ROW, 0, 0

    # ---- tails -----------------------------------------------------------------------------------------------------
    def _places(self, req: Req, use: Use) -> tuple[int, int]:
        """Return where others branch off, and the last page of the prompt that does not hold its last token, which is
        always computed.
        """
        return use.branch, (req.input_len - 1) // self._page * self._page

    def _plan_tail(self, req: Req, use: Use, length: int) -> None:
        due = -(-(use.kept + self._every) // self._page) * self._page
        self._next[use.row] = min(due, *(place if place > length else due for place in self._places(req, use)))

    def _keep(self, req: Req, row: int, start: int, stop: int) -> None:
        """Keep the tails of a request that are due within tokens [start, stop)."""
        use, last = USE.of(req), stop // self._page * self._page
        for place in sorted({*self._places(req, use), last if last - use.kept >= self._every else 0}):
            if start < place <= stop and place > use.kept:
                self._keep_tail(req, use, place)
                use.kept = place
        self._plan_tail(req, use, stop)

    def _keep_tail(self, req: Req, use: Use, length: int) -> None:
        tail = Tail(length, tuple(group.tail(use.row, length) for group in self.groups))
        for group, pages in zip(self.groups, tail.pages, strict=True):
            group.keep(pages)
        if not self.tails.add(req, tail):
            self._gone(tail)

    def _gone(self, tail: Tail) -> None:
        for group, pages in zip(self.groups, tail.pages, strict=True):
            group.drop(pages)

    # ---- what is told ----------------------------------------------------------------------------------------------
    def idle_error(self) -> str | None:
        """Return what is wrong where no request has pages, or None."""
        if self._seated.any() or any(group.held for group in self.groups):
            return "pages of windows are held without requests"
        return self.books_error()

    def books_error(self) -> str | None:
        """Return how the books do not balance, or None."""
        return next(filter(None, (group.books_error() for group in self.groups)), None)
