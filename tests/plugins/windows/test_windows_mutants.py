"""What goes wrong where pages are dealt out wrongly is found by the games of `test_windows`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.core.interfaces.req import Req
from pegboard.plugins.windows import pages
from pegboard.plugins.windows.group import GroupPages
from pegboard.plugins.windows.messages import Memory
from pegboard.plugins.windows.pages import WindowPages
from pegboard.plugins.windows.tails import Tail
from pegboard.toolkit.cache import kept_prefixes
from tests.plugins.windows import test_windows, window_harness

Array = NDArray[np.int64]


class ReachesOnePageTooFew(GroupPages):
    def __init__(self, window: int, count: int, memory: Memory, page_size: int) -> None:
        super().__init__(window, count, memory, page_size)
        self.reach = max(0, self.reach - 1)


class FreesWhatTailsHold(GroupPages):
    def release(self, row: int) -> None:
        self._by_tails[self.pages(row, int(self.first[row]), int(self.stop[row]))] = 0
        super().release(row)


class PromisesNothing(GroupPages):
    """To requests that decode."""

    def bound_of(self, limit: int) -> int:
        return 1


class CountsSharedPagesOnce(GroupPages):
    """Until requests part with them."""

    def spoken_for(self) -> int:
        return self.held


class FreesByWhatIsScheduled(WindowPages):
    def extend(self, reqs: Sequence[Req], rows: Array, starts: Array, stops: Array) -> list[Array]:
        found = super().extend(reqs, rows, starts, stops)
        for group in self.groups:
            for row, stop in zip(rows.tolist(), stops.tolist(), strict=True):
                group.settle(row, stop)
        return found


class ForgetsTheTableOfTails(WindowPages):
    def extend(self, reqs: Sequence[Req], rows: Array, starts: Array, stops: Array) -> list[Array]:
        fresh = ~self._seated[rows]
        found = super().extend(reqs, rows, starts, stops)
        return [places[len(places) - 1 :] for places in found] if starts[fresh].any() else found


class KeepsTailsOnePageOff(WindowPages):
    def _keep_tail(self, req: Req, use: pages.Use, length: int) -> None:
        shifted = tuple(np.roll(group.tail(use.row, length), 1) for group in self.groups)
        for group, own in zip(self.groups, shifted, strict=True):
            group.keep(own)
        if not self.tails.add(req, Tail(length, shifted)):
            self._gone(Tail(length, shifted))


class BeginsBehindAnyTail(WindowPages):
    def _tail(self, req: Req, start: int) -> Tail | None:
        return self.tails.use(req, start) if start else None


class SeatsBeforeAllTailsAreFound(WindowPages):
    def extend(self, reqs: Sequence[Req], rows: Array, starts: Array, stops: Array) -> list[Array]:
        for at in np.flatnonzero(~self._seated[rows]).tolist():
            tail = self._tail(reqs[at], int(starts[at]))
            self._seat(reqs[at], int(rows[at]), int(starts[at]), tail)
        return super().extend(reqs, rows, starts, stops)


GROUPS = [(ReachesOnePageTooFew, 1), (FreesWhatTailsHold, 1), (PromisesNothing, 6), (CountsSharedPagesOnce, 3)]
ALL = [(FreesByWhatIsScheduled, 1), (ForgetsTheTableOfTails, 1), (KeepsTailsOnePageOff, 1)]


@pytest.mark.parametrize(("mutant", "seed"), GROUPS, ids=lambda one: getattr(one, "__name__", None))
def test_pages_of_a_group(mutant: type[GroupPages], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "GroupPages", mutant)
    with pytest.raises(AssertionError):
        test_windows.TestGames().play(seed)


@pytest.mark.parametrize(("mutant", "seed"), ALL, ids=lambda one: getattr(one, "__name__", None))
def test_pages_of_all_groups(mutant: type[WindowPages], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_harness, "WindowPages", mutant)
    with pytest.raises(AssertionError):
        test_windows.TestGames().play(seed)


def test_tails_of_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_length(req: Req, lengths: Iterable[int]) -> dict[int, bytes]:
        return {length: str(length).encode() for length in lengths}

    monkeypatch.setattr(kept_prefixes, "digests", by_length)
    with pytest.raises(AssertionError):
        test_windows.test_windows_of_other_tokens_are_not_taken()


def test_chunks_behind_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_harness, "WindowPages", BeginsBehindAnyTail)
    with pytest.raises(AssertionError):
        test_windows.test_a_chunk_does_not_begin_behind_a_tail_before_the_chunk_before_it()


def test_requests_that_have_pages_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_harness, "WindowPages", SeatsBeforeAllTailsAreFound)
    with pytest.raises(AssertionError):
        test_windows.test_no_request_has_pages_where_a_tail_of_another_one_is_gone()
