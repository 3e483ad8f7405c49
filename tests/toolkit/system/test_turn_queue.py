"""The order in which jobs of several askers are done, and threads that keep to it."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from pegboard.toolkit.system.turn_queue import PATIENCE, TurnQueue
from pegboard.toolkit.system.turn_threads import TurnThreads

Queue = TurnQueue[str]


def order(queue: Queue, count: int) -> str:
    """Who is next, so many times; each job is done before the next one begins."""
    names = ""
    for _ in range(count):
        found = queue.get()
        assert found is not None
        queue.done(found[0])
        names += found[1]
    return names


def test_askers_take_turns() -> None:
    """However many jobs one of them has, and however long these are."""
    queue = Queue(clock=lambda: 0.0)
    for job in "abcd":
        queue.put(job, "first", seconds=9.0)
    assert order(queue, 1) == "a"
    for job in "xy":
        queue.put(job, "second", seconds=20.0)
    queue.put("m", "third")
    assert order(queue, 6) == "bxmcyd"


def test_short_jobs_of_one_asker_go_first_and_none_waits_for_ever() -> None:
    now = 0.0
    queue = Queue(clock=lambda: now)
    queue.put("l", seconds=1.0)
    queue.put("m", seconds=0.5)
    queue.put("s", seconds=0.0)
    queue.put("t", seconds=0.0)
    assert order(queue, 3) == "stm"
    now = PATIENCE * 0.9
    queue.put("u", seconds=0.05)
    assert order(queue, 1) == "u"
    queue.put("v", seconds=0.2)
    assert order(queue, 2) == "lv"


def test_one_asker_has_so_many_under_way() -> None:
    queue = Queue(most_each=2)
    for job in "abc":
        queue.put(job, "first")
    assert [queue.get(), queue.get()] == [("first", "a"), ("first", "b")]
    queue.put("x", "second")
    assert queue.get() == ("second", "x")
    queue.done("first")
    assert queue.get() == ("first", "c")


def test_dead_jobs_take_no_turn() -> None:
    dropped: list[str] = []
    queue = Queue(dead=str.isupper, dropped=dropped.append)
    for job in "aBCd":
        queue.put(job, "first")
    for job in "xy":
        queue.put(job, "second")
    assert order(queue, 4) == "axdy"
    assert dropped == ["B", "C"]


def test_closing_returns_what_waits() -> None:
    queue = Queue()
    for job in "abc":
        queue.put(job, job)
    assert queue.get() == ("a", "a")
    assert queue.close() == ["b", "c"]
    assert queue.get() is None
    assert not queue.put("d")
    queue.done("a")


@pytest.mark.parametrize("seed", range(20))
def test_no_asker_is_passed_over(seed: int) -> None:
    """Whatever comes when: each job is done once, and between two turns of one asker no other has two."""
    rng = random.Random(seed)
    now, queue = 0.0, Queue(clock=lambda: now)
    waiting: Counter[str] = Counter()
    since: dict[str, Counter[str]] = {}
    put: list[str] = []
    done: list[str] = []
    while len(done) < 300:
        now += rng.random()
        if len(put) < 300 and (not waiting.total() or rng.random() < 0.6):
            asker = rng.choice("abcdef")
            put.append(f"{asker}{len(put)}")
            queue.put(put[-1], asker, rng.random())
            waiting[asker] += 1
            if waiting[asker] == 1:
                since[asker] = Counter()
            continue
        found = queue.get()
        assert found is not None
        asker, job = found
        queue.done(asker)
        done.append(job)
        waiting[asker] -= 1
        for other, turns in since.items():
            turns[asker] += 1
            if other != asker and waiting[other]:
                assert max(turns.values()) == 1, f"{other} waits, and {turns} had turns"
        since[asker] = Counter()
    assert sorted(done) == sorted(put)


def test_threads_are_not_all_one_askers() -> None:
    threads = TurnThreads(3, "test", most_each=2)
    begun, release = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        begun.release()
        assert release.wait(60)

    try:
        blocked = [threads.submit(wait, "one") for _ in range(4)]
        for _ in range(2):
            assert begun.acquire(timeout=60)
        ran = threading.Event()
        threads.submit(ran.set, "other").result(60)
        assert ran.is_set()
        assert blocked[3].cancel()
        release.set()
        for future in blocked[:3]:
            future.result(60)

        def fail() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            threads.submit(fail).result(60)
    finally:
        release.set()
        threads.close()
    with pytest.raises(RuntimeError):
        threads.submit(wait)
