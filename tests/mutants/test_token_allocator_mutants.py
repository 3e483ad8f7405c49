"""Broken allocators, and the tests of the suite that notice."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.token_allocator import TokenAllocatorContract
from pegboard.plugins.memory_paged.allocators import FifoAllocator, StackAllocator


class AllowsDoubleFree(StackAllocator):
    def free(self, pages):
        self._is_free[pages] = False
        super().free(pages)


class AllowsTwiceInOneCall(StackAllocator):
    def free(self, pages):
        super().free(np.unique(pages))


class AllowsStrays(FifoAllocator):
    def free(self, pages):
        super().free(pages[(pages > 0) & (pages <= self.num_pages)])


class HandsOutPageZero(StackAllocator):
    def _refill(self):
        self._stack = np.arange(self.num_pages - 1, -1, -1, dtype=np.int64)


class ForgetsToTakeOut(StackAllocator):
    def _take(self, n):
        return self._stack[:n].copy()


class ForgetsTheHead(FifoAllocator):
    def _take(self, n):
        return self._ring[self._places(self._head, n)]


class FailsHalfway(StackAllocator):
    def alloc(self, n):
        if n > self._num_free:
            super().alloc(self._num_free)
            return None
        return super().alloc(n)


class GivesWhatThereIs(StackAllocator):
    def alloc(self, n):
        return super().alloc(min(n, self._num_free))


class GivesAView(StackAllocator):
    def _take(self, n):
        return self._stack[self._num_free - n : self._num_free]


class KeepsTheFreedArray(StackAllocator):
    """Puts the caller's own array on its shelf, to hand it out again."""

    def __init__(self, options, ctx):
        self._shelf = None
        super().__init__(options, ctx)

    def free(self, pages):
        super().free(pages)
        self._shelf = pages

    def _take(self, n):
        taken = super()._take(n)
        if self._shelf is not None and n == 1 and taken[0] not in self._shelf:
            taken[0] = self._shelf[-1]
        return taken


class FreesBeforeChecking(FifoAllocator):
    def free(self, pages):
        for page in pages:
            super().free(np.array([page]))


class TakesNegativeNumbers(StackAllocator):
    def alloc(self, n):
        return super().alloc(max(n, 0))


class ResetForgetsTheCount(StackAllocator):
    def reset(self):
        count = self._num_free
        super().reset()
        self._num_free = count or self.num_pages


class CountsOneShort(FifoAllocator):
    @property
    def free_pages(self):
        return max(0, self._num_free - 1)


class GivesSmallIntegers(StackAllocator):
    def alloc(self, n):
        pages = super().alloc(n)
        return pages if pages is None else pages.astype(np.int32)


CAUGHT = {
    AllowsDoubleFree: "test_a_double_free_raises_and_changes_nothing",
    AllowsTwiceInOneCall: "test_a_page_given_twice_raises_and_changes_nothing",
    AllowsStrays: "test_a_page_out_of_range_raises_and_changes_nothing",
    HandsOutPageZero: "test_page_zero_is_never_handed_out",
    ForgetsToTakeOut: "test_every_page_is_handed_out_once",
    ForgetsTheHead: "test_every_page_is_handed_out_once",
    FailsHalfway: "test_too_many_gives_none_and_changes_nothing",
    GivesWhatThereIs: "test_too_many_gives_none_and_changes_nothing",
    GivesAView: "test_the_result_belongs_to_the_caller",
    KeepsTheFreedArray: "test_the_result_belongs_to_the_caller",
    FreesBeforeChecking: "test_a_page_given_twice_raises_and_changes_nothing",
    TakesNegativeNumbers: "test_a_negative_number_raises",
    ResetForgetsTheCount: "test_reset_frees_everything",
    CountsOneShort: "test_counts_after_construction",
    GivesSmallIntegers: "test_a_call_gives_distinct_pages_as_int64",
}
MUTANTS = [Mutant(cls, suite=TokenAllocatorContract, caught_by=test) for cls, test in CAUGHT.items()]
# What the directed tests notice, the state machine has to notice by itself.
MUTANTS += [
    Mutant(cls, suite=TokenAllocatorContract, caught_by="test_any_sequence_of_calls_agrees_with_a_set")
    for cls in (AllowsDoubleFree, ForgetsToTakeOut, FailsHalfway, FreesBeforeChecking)
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
