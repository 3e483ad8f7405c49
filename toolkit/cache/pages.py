"""Slots and pages: slot = page * page_size + offset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.token_allocator import TokenAllocator


def slots_of(pages: NDArray[np.int64], page_size: int) -> NDArray[np.int64]:
    """Return all slots of `pages` int64 [n], in order, as a new array int64 [n * page_size]."""
    if page_size == 1:
        return pages.copy()
    return (pages[:, None] * page_size + np.arange(page_size, dtype=np.int64)).reshape(-1)


def pages_of(slots: NDArray[np.int64], page_size: int) -> NDArray[np.int64]:
    """Return the pages int64 [n] that `slots` int64 [n * page_size] fill one after the other.

    A copy for pages of several slots, a view for pages of one. Raises ValueError where the slots are not whole pages in
    their order.
    """
    if page_size == 1:
        return slots
    if slots.shape[0] % page_size:
        raise ValueError(f"{slots.shape[0]} slots are no whole pages of {page_size}")
    by_page = slots.reshape(-1, page_size)
    pages = by_page[:, 0] // page_size
    if (by_page != pages[:, None] * page_size + np.arange(page_size, dtype=np.int64)).any():
        raise ValueError(f"the slots are not whole pages of {page_size} in their order")
    return pages


def merge_pages(
    allocator: TokenAllocator,
    owned: NDArray[np.bool_],
    cached: NDArray[np.int64],
    given: NDArray[np.int64],
    canonical: NDArray[np.int64],
) -> None:
    """Free those of the `given` pages int64 [n] of an insert that duplicate the `cached` ones int64 [at most n], and
    write these ones' slots into `canonical`, the slots of the given pages and of what comes after them.

    `owned` bool [num_pages + 1] marks all pages that the cache has. Raises ValueError, with nothing changed, for a page
    that does not exist or is cached for other tokens already.
    """
    if given.size and (given.min() < 1 or given.max() > allocator.num_pages):
        raise ValueError(f"slots outside of pages 1 to {allocator.num_pages} are inserted")
    covered = given[: cached.shape[0]]
    duplicates = covered[covered != cached]
    if owned[duplicates].any() or owned[given[cached.shape[0] :]].any():
        raise ValueError("a page is inserted that the cache already holds for other tokens")
    if duplicates.size:
        allocator.free(duplicates)
        page_size = allocator.page_size
        canonical[: cached.shape[0] * page_size] = slots_of(cached, page_size)
