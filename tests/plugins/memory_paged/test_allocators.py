"""The orders, which the contract leaves open."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.token_allocator import TokenAllocatorContext
from pegboard.plugins.memory_paged.allocators import FifoAllocator, PageAllocator, StackAllocator


def make(cls: type[PageAllocator]) -> PageAllocator:
    return cls(NoOptions(), TokenAllocatorContext(num_pages=6, page_size=2))


def take(allocator: PageAllocator, n: int) -> list[int]:
    pages = allocator.alloc(n)
    assert pages is not None
    return pages.tolist()


def test_the_stack_hands_out_the_last_freed_first() -> None:
    allocator = make(StackAllocator)
    assert take(allocator, 4) == [1, 2, 3, 4]
    allocator.free(np.array([2]))
    allocator.free(np.array([4, 1]))
    assert take(allocator, 4) == [4, 1, 2, 5]


def test_the_stack_keeps_neighbours_together() -> None:
    allocator = make(StackAllocator)
    assert take(allocator, 6) == [1, 2, 3, 4, 5, 6]
    allocator.free(np.array([2, 3, 4]))
    assert take(allocator, 2) == [2, 3]
    assert take(allocator, 1) == [4]


def test_the_ring_hands_out_the_first_freed_first_and_wraps() -> None:
    allocator = make(FifoAllocator)
    assert take(allocator, 4) == [1, 2, 3, 4]
    allocator.free(np.array([2]))
    allocator.free(np.array([4, 1]))
    assert take(allocator, 4) == [5, 6, 2, 4]
    allocator.free(np.array([6, 5, 4]))
    assert take(allocator, 4) == [1, 6, 5, 4]


@pytest.mark.parametrize("cls", [StackAllocator, FifoAllocator])
def test_free_wants_a_flat_array_of_integers(cls: type[PageAllocator]) -> None:
    allocator = make(cls)
    take(allocator, 6)
    for wrong in (np.array([1.0]), np.array([[1, 2]]), np.array(1)):
        with pytest.raises(ValueError, match="flat array of integers"):
            allocator.free(wrong)
    allocator.free(np.array([3, 4], dtype=np.int32))
    assert allocator.free_pages == 2


def test_errors_name_the_page() -> None:
    allocator = make(StackAllocator)
    take(allocator, 3)
    with pytest.raises(ValueError, match="page 5 is free already"):
        allocator.free(np.array([1, 5]))
    with pytest.raises(ValueError, match="page 2 is given twice"):
        allocator.free(np.array([2, 1, 2]))
    with pytest.raises(ValueError, match="cannot free page 7: pages run from 1 to 6"):
        allocator.free(np.array([1, 7]))
