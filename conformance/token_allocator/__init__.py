"""The conformance suite of TokenAllocator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pegboard.conformance.properties import properties
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.token_allocator import TokenAllocator, TokenAllocatorContext

NUM_PAGES = 12


class TokenAllocatorContract(ContractSuite):
    """Pages are handed out once, come back once, and an error changes nothing."""

    contract = "token_allocator"

    def allocator(self, num_pages: int = NUM_PAGES, page_size: int = 4) -> TokenAllocator:
        built: TokenAllocator = self.build(TokenAllocatorContext(num_pages=num_pages, page_size=page_size))
        return built

    def drained(self, allocator: TokenAllocator) -> list[int]:
        """Return all pages that are left, taken one by one."""
        pages: list[int] = []
        while (page := allocator.alloc(1)) is not None:
            pages += page.tolist()
            assert len(pages) <= allocator.num_pages, f"more pages handed out than there are: {pages}"
        return pages

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_counts_after_construction(self, page_size: int) -> None:
        allocator = self.allocator(7, page_size)
        assert (allocator.free_pages, allocator.num_pages, allocator.page_size) == (7, 7, page_size)
        assert (allocator.free_tokens, allocator.total_tokens) == (7 * page_size, 7 * page_size)

    def test_every_page_is_handed_out_once(self) -> None:
        assert sorted(self.drained(self.allocator())) == list(range(1, NUM_PAGES + 1))

    def test_page_zero_is_never_handed_out(self) -> None:
        allocator = self.allocator()
        for _ in range(3):
            pages = allocator.alloc(NUM_PAGES)
            assert pages is not None
            assert 0 not in pages
            allocator.free(pages)

    def test_a_call_gives_distinct_pages_as_int64(self) -> None:
        pages = self.allocator().alloc(NUM_PAGES)
        assert pages is not None
        assert pages.dtype == np.int64
        assert pages.shape == (NUM_PAGES,)
        assert sorted(pages.tolist()) == list(range(1, NUM_PAGES + 1))

    def test_counts_follow(self) -> None:
        allocator = self.allocator()
        pages = allocator.alloc(5)
        assert pages is not None
        assert (allocator.free_pages, allocator.free_tokens) == (NUM_PAGES - 5, 4 * (NUM_PAGES - 5))
        allocator.free(pages[:2])
        assert allocator.free_pages == NUM_PAGES - 3
        assert allocator.total_tokens == 4 * NUM_PAGES

    def test_too_many_gives_none_and_changes_nothing(self) -> None:
        allocator = self.allocator()
        first = allocator.alloc(4)
        assert first is not None
        assert allocator.alloc(NUM_PAGES - 3) is None
        assert allocator.free_pages == NUM_PAGES - 4
        assert sorted(first.tolist() + self.drained(allocator)) == list(range(1, NUM_PAGES + 1))

    def test_no_pages_are_an_empty_array(self) -> None:
        allocator = self.allocator()
        for _ in range(2):  # with all pages free, and with none
            pages = allocator.alloc(0)
            assert pages is not None
            assert pages.dtype == np.int64
            assert pages.shape == (0,)
            allocator.free(pages)
            self.drained(allocator)
        assert allocator.free_pages == 0

    def test_a_negative_number_raises(self) -> None:
        allocator = self.allocator()
        with pytest.raises(ValueError):
            allocator.alloc(-1)
        assert allocator.free_pages == NUM_PAGES

    def test_a_pool_without_pages(self) -> None:
        allocator = self.allocator(0)
        assert allocator.free_pages == 0
        assert allocator.alloc(1) is None

    def test_the_result_belongs_to_the_caller(self) -> None:
        """A caller who writes into its array, or into one that it has freed, does no harm."""
        allocator = self.allocator()
        first, second = allocator.alloc(5), allocator.alloc(NUM_PAGES - 5)
        assert first is not None
        assert second is not None
        freed = first.copy()
        allocator.free(freed)
        freed[:] = 0
        first[:] = 0
        assert sorted(second.tolist() + self.drained(allocator)) == list(range(1, NUM_PAGES + 1))

    def test_pages_come_back_in_any_order(self) -> None:
        allocator = self.allocator()
        first, second = allocator.alloc(6), allocator.alloc(6)
        assert first is not None
        assert second is not None
        for page in (*second[::-2], *first[::2]):
            allocator.free(np.array([page]))
        allocator.free(np.concatenate((first[1::2], second[-2::-2])))
        assert allocator.free_pages == NUM_PAGES
        assert sorted(self.drained(allocator)) == list(range(1, NUM_PAGES + 1))

    def test_a_double_free_raises_and_changes_nothing(self) -> None:
        allocator = self.allocator()
        pages = allocator.alloc(8)
        assert pages is not None
        allocator.free(pages[:1])
        with pytest.raises(ValueError):
            allocator.free(pages[:3])
        self.check_still_held(allocator, pages[1:].tolist())

    def test_freeing_what_was_never_handed_out_raises(self) -> None:
        allocator = self.allocator()
        with pytest.raises(ValueError):
            allocator.free(np.array([NUM_PAGES]))
        self.check_still_held(allocator, [])

    def test_a_page_given_twice_raises_and_changes_nothing(self) -> None:
        allocator = self.allocator()
        pages = allocator.alloc(4)
        assert pages is not None
        with pytest.raises(ValueError):
            allocator.free(pages[[0, 1, 0]])
        self.check_still_held(allocator, pages.tolist())

    @pytest.mark.parametrize("stray", [0, -1, NUM_PAGES + 1, 1 << 40])
    def test_a_page_out_of_range_raises_and_changes_nothing(self, stray: int) -> None:
        allocator = self.allocator()
        pages = allocator.alloc(NUM_PAGES)
        assert pages is not None
        with pytest.raises(ValueError):
            allocator.free(np.array([pages[0], stray]))
        self.check_still_held(allocator, pages.tolist())

    def test_reset_frees_everything(self) -> None:
        allocator = self.allocator()
        pages = allocator.alloc(7)
        assert pages is not None
        allocator.free(pages[3:])
        allocator.reset()
        assert allocator.free_pages == NUM_PAGES
        assert sorted(self.drained(allocator)) == list(range(1, NUM_PAGES + 1))

    def test_any_sequence_of_calls_agrees_with_a_set(self) -> None:
        self.allocator()  # skips here where the provider objects
        machine = type("Machine", (AllocatorMachine,), {"make": staticmethod(self.allocator)})
        run_state_machine_as_test(machine, settings=properties())

    def check_still_held(self, allocator: TokenAllocator, held: list[int]) -> None:
        """Exactly the pages of `held` are not free."""
        assert allocator.free_pages == NUM_PAGES - len(held)
        assert sorted(held + self.drained(allocator)) == list(range(1, NUM_PAGES + 1))


class AllocatorMachine(RuleBasedStateMachine):
    """Any calls, right and wrong ones, against a set of the pages that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator: TokenAllocator = self.make()
        self.held: set[int] = set()

    def make(self) -> TokenAllocator:
        raise NotImplementedError

    @rule(n=st.integers(0, NUM_PAGES + 2))
    def alloc(self, n: int) -> None:
        pages = self.allocator.alloc(n)
        if n > NUM_PAGES - len(self.held):
            assert pages is None, f"{n} pages handed out, though fewer were free"
            return
        assert pages is not None, f"{n} pages refused, though {NUM_PAGES - len(self.held)} were free"
        new = pages.tolist()
        assert len(new) == len(set(new)) == n
        assert not self.held & set(new), f"pages {sorted(self.held & set(new))} were handed out twice"
        assert set(new) <= set(range(1, NUM_PAGES + 1))
        self.held |= set(new)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.allocator.free(np.array(pages, dtype=np.int64))
        self.held -= set(pages)

    @rule(pages=st.lists(st.integers(-1, NUM_PAGES + 1), min_size=1, max_size=4))
    def free_anything(self, pages: list[int]) -> None:
        if len(set(pages)) == len(pages) and set(pages) <= self.held:
            self.allocator.free(np.array(pages))
            self.held -= set(pages)
        else:
            with pytest.raises(ValueError):
                self.allocator.free(np.array(pages))

    @rule()
    def reset(self) -> None:
        self.allocator.reset()
        self.held.clear()

    @invariant()
    def counts(self) -> None:
        assert self.allocator.free_pages == NUM_PAGES - len(self.held)
