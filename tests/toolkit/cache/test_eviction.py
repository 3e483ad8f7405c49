"""The heap of victims: in order, and a victim is found without a look at the others."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.toolkit.cache.eviction import History, VictimHeap


class Kept(History):
    """Something that can be evicted while it is not locked."""

    def __init__(self, tick: int) -> None:
        super().__init__(tick, 0)
        self.locked = False

    def evictable(self) -> bool:
        return not self.locked


@pytest.mark.parametrize("leaves", [100, 10_000])
def test_finding_a_victim_does_not_look_at_the_others(leaves: int) -> None:
    """Not even when each of them was used since the last search."""
    looks = 0

    def key(entry: Kept) -> int:
        nonlocal looks
        looks += 1
        return entry.last_access

    heap = VictimHeap[Kept](key, Kept.evictable)
    entries = [Kept(tick) for tick in range(leaves)]
    for entry in entries:
        heap.update(entry)
    for entry in entries:
        entry.last_access += leaves
        heap.update(entry)
    entries[1].locked = True
    heap.update(entries[1])
    looks = 0
    assert [heap.pop() for _ in range(5)] == [entries[0], *entries[2:6]]
    assert looks == 0


class CountedKey(int):
    """A key that counts how often keys are compared."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        CountedKey.comparisons += 1
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        CountedKey.comparisons += 1
        return int(self) <= int(other)


def test_finding_a_victim_does_not_make_up_for_uses() -> None:
    """Lazy deletion would: it drops an outdated item per use before it finds the first victim."""
    leaves = 4096
    heap = VictimHeap[Kept](lambda entry: CountedKey(entry.last_access), Kept.evictable)
    entries = [Kept(tick) for tick in range(leaves)]
    for turn in range(2):
        for entry in entries:
            entry.last_access += turn * leaves
            heap.update(entry)
    CountedKey.comparisons = 0
    assert heap.pop() is entries[0]
    # Two per level of the heap on the way down.
    assert 0 < CountedKey.comparisons <= 2 * leaves.bit_length()


def test_the_heap_agrees_with_a_sorted_list() -> None:
    random = np.random.default_rng(0)
    heap = VictimHeap[Kept](lambda entry: entry.last_access, Kept.evictable)
    entries = [Kept(tick) for tick in range(40)]
    for tick in range(3000):
        entry = entries[random.integers(40)]
        entry.locked = bool(random.random() < 0.3)
        entry.last_access = int(random.integers(10_000)) * 3000 + tick  # all different
        heap.update(entry)
        heap.check()
        if tick % 7 == 0 and len(heap):
            inside = [other for other in entries if other.place >= 0]
            assert heap.pop() is min(inside, key=lambda other: other.last_access)
            heap.check()


def test_those_before_a_key_are_found_without_a_look_at_the_others() -> None:
    random = np.random.default_rng(0)
    heap = VictimHeap[Kept](lambda entry: CountedKey(entry.last_access), Kept.evictable)
    assert (heap.first_key, list(heap.before(5))) == (None, [])
    for tick in random.permutation(4096).tolist():
        heap.update(Kept(tick))
    CountedKey.comparisons = 0
    assert sorted(entry.last_access for entry in heap.before(50)) == list(range(50))
    assert CountedKey.comparisons <= 2 * 50 + 1
    assert heap.first_key == 0
