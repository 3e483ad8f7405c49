from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.plugins.cache_block.lru import LinkedOrder


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_push_and_pop() -> None:
    order = LinkedOrder(5)
    assert order.pop(3).tolist() == []
    order.push(pages(3, 1))
    order.push(pages(5))
    order.push(pages())
    assert order.pages() == [5, 3, 1]
    assert order.pop(2).tolist() == [1, 3]
    assert order.pop(0).tolist() == []
    assert order.pop(9).tolist() == [5]
    assert order.pages() == []


def test_remove_takes_runs_and_single_pages() -> None:
    order = LinkedOrder(6)
    order.push(pages(1, 2, 3, 4, 5, 6))
    order.remove(pages(2, 3, 5))
    assert order.pages() == [1, 4, 6]
    order.remove(pages(6, 1))
    assert order.pages() == [4]
    order.remove(pages(4))
    assert order.pages() == []


def test_broken_links_are_noticed() -> None:
    order = LinkedOrder(3)
    order.push(pages(1, 2))
    order.before[2] = 3
    with pytest.raises(AssertionError, match="page 2 follows 1, but says 3"):
        order.pages()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "pop"]), st.permutations(range(1, 9)), st.integers(0, 5))))
def test_it_behaves_like_a_list(calls: list[tuple[str, list[int], int]]) -> None:
    order, expected = LinkedOrder(8), []  # type: ignore[var-annotated]
    for call, shuffled, count in calls:
        if call == "push":
            new = [page for page in shuffled if page not in expected][:count]
            order.push(pages(*new))
            expected = new + expected
        elif call == "remove":
            old = [page for page in shuffled if page in expected][:count]
            order.remove(pages(*old))
            expected = [page for page in expected if page not in old]
        else:
            popped = order.pop(count).tolist()
            assert popped == expected[::-1][:count]
            expected = expected[: len(expected) - len(popped)]
        assert order.pages() == expected
