"""The lab's mover: moves take virtual time, one after the other in each lane, and storages have what was written."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.plugins.kv_tiers.api import PageMover
from pegboard.tools.lab.clock import VirtualClock
from pegboard.tools.lab.moves import NEVER, Speed, VirtualMover, VirtualStore

SECOND = Speed(read=1.0, write=2.0, latency=0.5)
KEYS = [bytes([number]) * 32 for number in range(8)]


def pages(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def blocks(*numbers: int) -> NDArray[np.int64]:
    return pages(*numbers).reshape(-1, 2)


def rig(*rooms: float) -> tuple[VirtualMover, VirtualClock]:
    """Return a mover with sixteen host pages, two to a block, and storages for so many blocks."""
    clock = VirtualClock()
    stores = [VirtualStore(f"s{number}", SECOND, room) for number, room in enumerate(rooms)]
    mover: PageMover = VirtualMover(16, 2, Speed(0.1, 0.1), stores, clock)
    assert isinstance(mover, VirtualMover)
    return mover, clock


def filled(mover: VirtualMover) -> list[int]:
    return np.flatnonzero(mover.filled).tolist()


def test_copies_are_made_one_after_the_other() -> None:
    mover, clock = rig()
    first, second = mover.save(pages(5, 6), pages(1, 2)), mover.save(pages(7), pages(3))
    clock.now = 0.19
    assert (first.done, second.done) == (False, False)
    clock.now = 0.2
    assert (first.done, second.done, first.result) == (True, False, 2)
    assert filled(mover) == [1, 2]
    assert mover.next_end == pytest.approx(0.3)
    clock.now = 5.0
    assert (second.done, second.result, filled(mover), mover.next_end) == (True, 1, [1, 2, 3], NEVER)
    third = mover.save(pages(8), pages(4))
    assert not third.done
    assert mover.next_end == pytest.approx(5.1)


def test_what_is_not_written_yet_is_not_found() -> None:
    mover, clock = rig(100)
    written = mover.store(0, KEYS[:2], blocks(1, 2, 3, 4))
    early = mover.find(KEYS[:3])
    clock.now = 4.4
    assert (early.done, early.result, written.done) == (True, 0, False)
    clock.now = 4.5  # half a second, and two for each of two blocks
    late, other = mover.find(KEYS[:3]), mover.find(KEYS[2:])
    assert (written.done, written.result) == (True, 2)
    clock.now = 10.0
    assert (late.done, late.result, other.result) == (True, 2, 0)


def test_reads_do_not_wait_for_writes_and_fetch_what_is_there() -> None:
    mover, clock = rig(100)
    mover.store(0, KEYS[:3], blocks(1, 2, 3, 4, 5, 6))
    clock.now = 10.0
    mover.store(0, KEYS[4:], blocks(1, 2, 3, 4, 5, 6, 7, 8))
    fetched = mover.fetch(KEYS[2:5], blocks(9, 10, 11, 12, 13, 14))
    clock.now = 11.4
    assert not fetched.done
    clock.now = 11.5
    assert (fetched.done, fetched.result) == (True, 1)
    assert filled(mover) == [9, 10]


def test_what_one_storage_lacks_is_asked_of_the_next() -> None:
    mover, clock = rig(100, 100)
    mover.store(0, KEYS[:1], blocks(1, 2))
    mover.store(1, KEYS[:3], blocks(1, 2, 3, 4, 5, 6))
    clock.now = 10.0
    found, fetched = mover.find(KEYS[:4]), mover.fetch(KEYS[:4], blocks(1, 2, 3, 4, 5, 6, 7, 8))
    clock.now = 30.0
    assert (found.done, found.result) == (True, 3)
    assert (fetched.done, fetched.result) == (True, 3)
    assert mover.moved() == {"saved_pages": 0, "s0_read": 1, "s0_written": 1, "s1_read": 2, "s1_written": 3}


def test_a_full_storage_forgets_what_was_used_least_recently() -> None:
    mover, clock = rig(3)
    for number in range(3):
        mover.store(0, KEYS[number : number + 1], blocks(1, 2))
    clock.now = 20.0
    mover.fetch(KEYS[:1], blocks(1, 2))
    clock.now = 30.0
    mover.store(0, KEYS[3:4], blocks(1, 2))
    clock.now = 40.0
    mover.advance()
    (store,) = mover.storages
    assert [store.known([key]) for key in KEYS[:5]] == [1, 0, 1, 1, 0]
    assert (len(store), store.evicted) == (3, 1)


def test_what_a_storage_has_is_not_written_again() -> None:
    mover, clock = rig(100)
    mover.store(0, KEYS[:2], blocks(1, 2, 3, 4))
    clock.now = 10.0
    again = mover.store(0, KEYS[:3], blocks(1, 2, 3, 4, 5, 6))
    clock.now = 12.5
    assert (again.done, again.result) == (True, 3)
    assert mover.moved()["s0_written"] == 3


def test_a_cancelled_move_ends_with_what_was_moved_and_lets_the_next_begin() -> None:
    mover, clock = rig(100)
    first, second = mover.store(0, KEYS[:3], blocks(1, 2, 3, 4, 5, 6)), mover.store(0, KEYS[3:5], blocks(1, 2, 3, 4))
    third = mover.store(0, KEYS[5:6], blocks(1, 2))
    clock.now = 3.0
    mover.cancel(first)
    mover.cancel(third)
    assert (first.done, first.result, third.done, third.result) == (True, 1, True, 0)
    clock.now = 7.5
    assert (second.done, second.result) == (True, 2)
    assert mover.storages[0].known(KEYS) == 1
    assert mover.storages[0].known(KEYS[3:]) == 2


def test_waiting_lets_virtual_time_pass() -> None:
    mover, clock = rig()
    first, second = mover.save(pages(5), pages(1)), mover.save(pages(7), pages(3))
    assert mover.wait([first], 1.0)
    assert clock.now == pytest.approx(0.1)
    assert not mover.wait([first, second], 0.05)
    assert clock.now == pytest.approx(0.15)


def test_without_storages_nothing_is_found() -> None:
    mover, _ = rig()
    found = mover.find(KEYS)
    assert (found.done, found.result, found.error, mover.stores) == (True, 0, "", ())
