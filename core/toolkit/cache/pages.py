"""Slots and pages: slot = page * page_size + offset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
