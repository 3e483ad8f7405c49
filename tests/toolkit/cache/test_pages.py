from __future__ import annotations

import numpy as np
import pytest

from pegboard.toolkit.cache.pages import pages_of, slots_of


@pytest.mark.parametrize("page_size", [1, 4])
def test_there_and_back(page_size: int) -> None:
    pages = np.array([3, 1, 7])
    slots = slots_of(pages, page_size)
    assert slots.tolist() == [page * page_size + offset for page in (3, 1, 7) for offset in range(page_size)]
    assert pages_of(slots, page_size).tolist() == [3, 1, 7]
    assert not np.shares_memory(slots, pages)


@pytest.mark.parametrize("slots", [[4, 5, 6], [4, 5, 7, 6], [5, 6, 7, 8], [4, 5, 6, 7, 8, 9, 10, 12]])
def test_what_is_no_page(slots: list[int]) -> None:
    with pytest.raises(ValueError, match="whole pages of 4"):
        pages_of(np.array(slots), 4)
