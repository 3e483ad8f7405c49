"""Threads that leave the cores to others."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pegboard.toolkit.system import compute
from pegboard.toolkit.system.compute import LESS, MOST, PIECE, REST, give_way, rest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_only_the_thread_that_asks_gives_way() -> None:
    before, found = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), list[int]()

    def work() -> None:
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [min(19, LESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


class Clocks:
    """In the place of `time`: seconds that the thread and the process have computed, on two cores, and how long it
    slept.
    """

    def __init__(self) -> None:
        self.own = self.all = self.now = 100.0
        self.slept: list[float] = []

    def thread_time(self) -> float:
        return self.own

    def process_time(self) -> float:
        return self.all

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def work(self, own: float, others: float, idle: float = 0.0) -> None:
        self.own += own
        self.all += own + others
        self.now += (own + others + idle) / 2


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(compute, "time", made)
    monkeypatch.setattr(compute, "_cores", lambda: 2)
    return made


def in_a_thread(work: Callable[[], None]) -> None:
    """Run `work`, which may give way, in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_it_rests_in_proportion_while_others_compute(clocks: Clocks) -> None:
    def work() -> None:
        give_way()
        clocks.work(PIECE / 2, PIECE)
        rest()
        assert not clocks.slept, "pieces are not that small"
        clocks.work(PIECE, PIECE)
        rest()
        assert clocks.slept == [pytest.approx(1.5 * PIECE * REST)]
        rest()
        assert len(clocks.slept) == 1, "it has computed nothing since"

    in_a_thread(work)


def test_it_does_not_rest_where_no_other_thread_computes(clocks: Clocks) -> None:
    def work() -> None:
        give_way()
        clocks.work(1.0, 0.5)
        rest()
        assert not clocks.slept
        clocks.work(PIECE, PIECE)
        rest()
        assert clocks.slept == [pytest.approx(PIECE * REST)], "what was before does not count any more"

    in_a_thread(work)


def test_it_does_not_rest_where_cores_are_free_and_never_for_long(clocks: Clocks) -> None:
    def work() -> None:
        give_way()
        clocks.work(PIECE, PIECE, idle=2 * PIECE)
        rest()
        assert not clocks.slept
        clocks.work(0.3, 0.4)
        rest()
        assert clocks.slept == [MOST * REST], "a piece that could not be cut"

    in_a_thread(work)


def test_a_thread_that_does_not_give_way_never_rests(clocks: Clocks) -> None:
    def work() -> None:
        clocks.work(1.0, 5.0)
        rest()
        assert not clocks.slept

    in_a_thread(give_way)
    in_a_thread(work)
    work()
