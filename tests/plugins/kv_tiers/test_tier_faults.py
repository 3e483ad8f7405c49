"""What storages do wrong: they hang, fail, die and answer nonsense. It costs reuse, and nothing else."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.fakes.storages import FakeStorage, Faults
from tests.plugins.kv_tiers.tier_rig import PAGES, Rig, blocks, names, until

Make = Callable[..., Rig]
ALONE = "the storage 'store0' is left alone for a while"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Rig] = []

    def make(stores: int = 1, **more: Any) -> Rig:
        made.append(Rig(monkeypatch, stores, **more))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def asked(storage: FakeStorage) -> int:
    return sum(storage.faults.calls.values())


@pytest.mark.parametrize("views", [False, True])
def test_a_call_that_hangs_is_abandoned_and_its_pages_stay_in_use(make: Make, views: bool) -> None:
    rig = make(views=views)
    expected = rig.fill(names(6))
    faults = rig.storages[0].faults
    faults.hang()
    job, behind = rig.mover.fetch(names(6), blocks(6)), rig.mover.fetch(names(6), blocks(6, 50))
    until(lambda: faults.hanging == 1)
    rig.clock.now += 5.9
    rig.mover.supervise()
    assert not behind.done
    rig.clock.now += 0.2
    rig.mover.supervise()
    until(lambda: behind.done)  # the mover's own thread may have come before
    assert not job.done
    assert (behind.result, behind.error) == (0, ALONE)
    before = asked(rig.storages[0])
    for late in (
        rig.mover.find(names(6)),
        rig.mover.fetch(names(6), blocks(6)),
        rig.mover.store(0, names(6), blocks(6)),
    ):
        assert (late.done, late.result, late.error) == (True, 0, ALONE)
    assert asked(rig.storages[0]) == before
    assert rig.mover.stats()["store0_breaker_open"] == rig.mover.stats()["store0_hanging"] == 1

    rig.clock.now += 30
    faults.only = ()  # it works again, while the one call goes on hanging
    assert rig.ended(rig.mover.fetch(names(6), blocks(6, 50))) == (6, "")
    assert (rig.block(blocks(6, 50)) == expected).all()
    assert not job.done
    faults.release()
    result, error = rig.ended(job)
    assert result == 0
    assert "overran its deadline of 5 s" in error
    stats = rig.mover.stats()
    assert stats["store0_breaker_open"] == stats["store0_hanging"] == 0
    assert stats["store0_abandoned_total"] == stats["store0_failures_total"] == 1
    assert rig.ended(rig.mover.fetch(names(6), blocks(6))) == (6, "")  # nothing that had come back disturbs it


def test_calls_under_way_are_watched_without_being_asked_to(make: Make) -> None:
    rig = make()
    rig.storages[0].faults.hang()
    job = rig.mover.find(names(1))
    until(lambda: rig.storages[0].faults.hanging == 1)
    rig.clock.now += 10
    until(lambda: rig.mover.stats()["store0_abandoned_total"] == 1)
    rig.storages[0].faults.release()
    assert rig.ended(job)[0] == 0


def test_only_some_threads_are_written_off(make: Make) -> None:
    """Four hang and were replaced, a fifth hangs: then there is none for a probe, and no job waits for one."""
    rig = make()
    rig.fill(names(1))
    jobs = []
    for _ in range(5):
        jobs.append(rig.hang())
        rig.clock.now += 30
    assert rig.mover.stats()["store0_hanging"] == 5
    for _ in range(2):
        job = rig.mover.find(names(1))
        assert job.done
        assert "no thread is free" in job.error
    assert not any(job.done for job in jobs)
    rig.storages[0].faults.release()
    assert rig.mover.wait(jobs, 10)
    until(lambda: rig.mover.stats()["store0_hanging"] == 0)
    until(lambda: rig.ended(rig.mover.find(names(1))) == (1, ""))


def test_a_writer_without_a_thread_goes_on_when_reads_are_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four reads and a write hang. The write does not come back, and its thread was not replaced at that time."""
    rig = make()
    storage, begun, end = rig.storages[0], threading.Event(), threading.Event()

    def hangs(keys: Sequence[bytes], data: object, deadline: float) -> int:
        begun.set()
        end.wait(60)
        return 0

    for _ in range(4):
        rig.hang()
        rig.clock.now += 31
    storage.faults.only = ()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "set", hangs)
        stuck = rig.mover.store(0, names(1), blocks(1))
        assert begun.wait(10)
        rig.clock.now += 40
        rig.mover.supervise()
    assert rig.mover.stats()["store0_hanging"] == 5
    storage.faults.mend()
    until(lambda: rig.mover.stats()["store0_hanging"] == 1)
    rig.clock.now += 31
    until(lambda: rig.ended(rig.mover.store(0, names(2), blocks(2))) == (2, ""))
    assert not stuck.done
    end.set()


def test_a_writer_has_more_time_and_holds_no_reader_up(make: Make) -> None:
    rig = make()
    rig.fill(names(1))
    faults = rig.storages[0].faults
    faults.only = ("set",)
    faults.hang()
    job = rig.mover.store(0, names(2), blocks(2))
    until(lambda: faults.hanging == 1)
    rig.clock.now += 29
    rig.mover.supervise()
    assert rig.ended(rig.mover.fetch(names(1), blocks(1))) == (1, "")
    rig.clock.now += 3
    rig.mover.supervise()
    assert rig.mover.find(names(1)).error == ALONE
    faults.release()
    assert rig.ended(job)[0] == 1  # what was there


def test_three_failures_in_a_row_and_a_probe_decides(make: Make) -> None:
    rig = make()
    rig.fill(names(1))
    storage = rig.storages[0]
    for failures in (2, 3):
        storage.faults.fail()
        for _ in range(failures):
            assert rig.ended(rig.mover.find(names(1)))[1] == "the storage 'store0': StorageError: broken on demand"
        storage.faults.mend()
        assert rig.ended(rig.mover.find(names(1))) == ((1, "") if failures == 2 else (0, ALONE))
    for outcome in ("fails", "works"):
        rig.clock.now += 29.9
        assert rig.ended(rig.mover.find(names(1))) == (0, ALONE)
        rig.clock.now += 0.2
        storage.faults.hang()
        probe = rig.mover.find(names(1))
        until(lambda: storage.faults.hanging == 1)
        before = asked(storage)
        for late in (rig.mover.find(names(1)), rig.mover.store(0, names(1), blocks(1))):
            assert (late.done, late.error) == (True, ALONE)  # nothing waits for the probe
        assert asked(storage) == before
        if outcome == "fails":
            storage.faults.fail()
        storage.faults.release()
        assert rig.ended(probe)[0] == (outcome == "works")
        storage.faults.mend()
    assert rig.ended(rig.mover.find(names(1))) == (1, "")
    stats = rig.mover.stats()
    assert (stats["store0_failures_total"], stats["store0_breaker_openings_total"]) == (6, 2)


def test_what_works_does_not_hide_what_fails(make: Make) -> None:
    """A full disk answers all that is looked for and read; to write to it fails each time."""
    rig = make()
    rig.fill(names(1))
    faults = rig.storages[0].faults
    faults.only = ("set",)
    faults.fail()
    for _ in range(3):
        result, error = rig.ended(rig.mover.store(0, names(2), blocks(2)))
        assert (result, error) == (1, "the storage 'store0': StorageError: broken on demand")
        assert rig.ended(rig.mover.fetch(names(1), blocks(1)))[0] == rig.ended(rig.mover.find(names(1)))[0]
    assert rig.ended(rig.mover.store(0, names(2), blocks(2))) == (0, ALONE)
    # What is asked next works, and then one more failure in the row is enough.
    rig.clock.now += 31
    assert rig.ended(rig.mover.find(names(1))) == (1, "")
    assert rig.ended(rig.mover.store(0, names(2), blocks(2)))[0] == 1
    assert rig.ended(rig.mover.find(names(1))) == (0, ALONE)
    assert rig.mover.stats()["store0_failures_total"] == 4


def test_a_probe_that_asks_nothing_leaves_it_to_another(make: Make) -> None:
    rig = make()
    rig.fill(names(1))
    rig.storages[0].faults.fail()
    for _ in range(3):
        rig.ended(rig.mover.find(names(1)))
    rig.storages[0].faults.mend()
    rig.clock.now += 31
    assert rig.ended(rig.mover.find([])) == (0, "")  # which needs no call
    rig.host.error = OSError("no memory")
    rig.storages[0].faults.hang()
    probe = rig.mover.find(names(1))
    until(lambda: rig.storages[0].faults.hanging == 1)
    rig.mover.cancel(probe)
    rig.host.error = None
    rig.storages[0].faults.release()
    assert rig.ended(probe) == (1, "")
    assert rig.ended(rig.mover.find(names(1))) == (1, "")


def test_while_one_storage_is_left_alone_the_next_is_asked(make: Make) -> None:
    rig = make(2)
    expected = rig.fill(names(4), store=1)
    rig.fill(names(2), store=0)
    rig.storages[0].faults.fail()
    for _ in range(3):
        assert rig.ended(rig.mover.find(names(5)))[0] == 4
    before = asked(rig.storages[0])
    assert rig.ended(rig.mover.fetch(names(4), blocks(4))) == (4, "")
    assert (rig.block(blocks(4)) == expected).all()
    assert rig.ended(rig.mover.fetch(names(5), blocks(5))) == (4, ALONE)
    assert asked(rig.storages[0]) == before


def test_a_thread_that_dies_is_started_again(make: Make) -> None:
    rig = make()
    rig.fill(names(2))
    for call, begin in (
        ("exists", lambda: rig.mover.find(names(2))),
        ("get", lambda: rig.mover.fetch(names(2), blocks(2))),
    ):
        rig.storages[0].faults.only = (call,)
        rig.storages[0].faults.error = SystemExit(1)
        result, error = rig.ended(begin())
        assert result == 0
        assert "died of SystemExit" in error
        rig.storages[0].faults.mend()
        assert rig.ended(begin()) == (2, "")
    stats = rig.mover.stats()
    assert stats["store0_restarts_total"] == stats["store0_failures_total"] == 2


@pytest.mark.parametrize("answer", [-1, 3, "all", None])
def test_a_count_that_cannot_be_is_a_failure(make: Make, monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    rig = make()
    for call in ("exists", "get"):
        monkeypatch.setattr(rig.storages[0], call, lambda *args: answer)
    for job in (rig.mover.find(names(2)), rig.mover.fetch(names(2), blocks(2))):
        result, error = rig.ended(job)
        assert result == 0
        assert error
    assert rig.mover.stats()["store0_failures_total"] == 2


def test_what_came_by_the_deadline_counts_and_so_does_the_failure(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    expected = rig.fill(names(4))
    get = rig.storages[0].get

    def slow(keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> int:
        found = get(keys[:1], into[:1], deadline)
        rig.clock.now = deadline
        return found

    monkeypatch.setattr(rig.storages[0], "get", slow)
    result, error = rig.ended(rig.mover.fetch(names(4), blocks(4)))
    assert result == 1
    assert "did not get through in 5 s" in error
    assert (rig.block(blocks(1)) == expected[:1]).all()
    assert rig.mover.stats()["store0_failures_total"] == 1


def test_numbers_that_cannot_be_had_do_no_harm(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    monkeypatch.setattr(rig.storages[0], "stats", lambda: {"blocks": "many"})
    rig.fill(names(1))
    until(lambda: rig.mover.stats()["store0_failures_total"] == 1)
    assert "store0_blocks" not in rig.mover.stats()
    assert rig.ended(rig.mover.find(names(1))) == (1, "")


def test_closing_ends_all_but_a_call_that_hangs(make: Make) -> None:
    rig = make(2)
    rig.storages[1].faults.hang()
    hanging, waiting = rig.mover.fetch(names(1), blocks(1)), rig.mover.fetch(names(1), blocks(1, 3))
    until(lambda: rig.storages[1].faults.hanging == 1 and rig.storages[0].faults.calls["get"] == 2)
    began = time.monotonic()
    assert rig.mover.close(0.2) == ("store1",)
    assert time.monotonic() - began < 5
    assert (hanging.done, waiting.done) == (False, True)
    assert rig.mover.find(names(1)).done
    save = rig.mover.save(np.arange(1, 2), np.arange(1, 2))
    assert save.done
    assert save.error
    rig.storages[1].faults.release()
    assert rig.ended(hanging)[0] == 0


class Ordeal:
    """Jobs of all kinds on two storages that fail, hang, die and lose blocks at random. A key stands for its number."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.dice = rig, random.Random(seed)
        self.rig.host.pages[PAGES - 1 :] = 1
        self.free = list(range(1, PAGES - 2, 2))
        self.jobs: list[tuple[str, Any, list[bytes], NDArray[np.int64]]] = []
        self.hanging: set[Faults] = set()
        self.seen: Counter[str] = Counter()

    def disturb(self) -> None:
        faults = self.dice.choice(self.rig.storages).faults
        what = self.dice.choice([faults.mend] * 4 + [faults.fail, faults.hang])
        what()
        if what == faults.hang:
            self.hanging.add(faults)
        elif what == faults.mend:
            self.hanging.discard(faults)
        if self.dice.random() < 0.1:
            faults.error = SystemExit(1)
        self.dice.choice(self.rig.storages).place.lose(names(1, self.dice.randrange(12)))
        self.rig.clock.now += self.dice.choice([0.0, 1.0, 7.0, 31.0])
        self.rig.mover.supervise()

    def begin(self) -> None:
        mover, kind = self.rig.mover, self.dice.choice(["store", "find", "fetch", "fetch"])
        keys = names(self.dice.randint(1, 4), self.dice.randrange(8))
        pages = np.array([[page, page + 1] for page in (self.free.pop() for _ in keys)])
        self.rig.host.pages[pages] = np.array([int(key) + 1 for key in keys])[:, None, None] if kind == "store" else 0
        if kind == "store":
            job: Any = mover.store(self.dice.randrange(2), keys, pages)
        else:
            job = mover.find(keys) if kind == "find" else mover.fetch(keys, pages)
        self.jobs.append((kind, job, keys, pages))
        mover.wait([job], 0.001 if self.hanging else self.dice.choice([0, 5, 5]))
        if self.dice.random() < 0.1:
            mover.cancel(self.dice.choice(self.jobs)[1])

    def calm(self) -> None:
        """Let the storages be well, and all that is under way end."""
        mover = self.rig.mover
        for storage in self.rig.storages:
            storage.faults.mend()
        self.hanging.clear()
        assert mover.wait([job for _, job, _, _ in self.jobs], 10)
        until(lambda: mover.stats()["store0_hanging"] == mover.stats()["store1_hanging"] == 0)
        self.collect()

    def all_closed(self) -> bool:
        """Let time go by and a probe try each storage; whether they are well again."""
        mover = self.rig.mover
        self.rig.clock.now += 5
        for number in range(2):
            self.rig.ended(mover.store(number, names(1), np.array([[PAGES - 1, PAGES]])))
        return not any(mover.stats()[f"store{number}_breaker_open"] for number in range(2))

    def collect(self) -> None:
        """Look at what has ended, and use its pages again."""
        ended = [one for one in self.jobs if one[1].done]
        self.jobs = [one for one in self.jobs if not any(one is other for other in ended)]
        for kind, job, keys, pages in ended:
            assert 0 <= job.result <= len(keys)
            if kind == "fetch":
                expected = [int(key) + 1 for key in keys[: job.result]]
                assert (self.rig.host.pages[pages[: job.result]] == np.array(expected)[:, None, None]).all()
            self.seen[kind] += job.result
            self.seen["errors"] += bool(job.error)
            self.free += pages[:, 0].tolist()


@pytest.mark.parametrize("views", [False, True])
def test_all_jobs_end_and_what_counts_is_right_whatever_goes_wrong(make: Make, views: bool) -> None:
    rig = make(2, views=views)
    ordeal = Ordeal(rig, seed=views)
    for _ in range(400):
        ordeal.begin()
        ordeal.collect()
        if ordeal.dice.random() < 0.2:
            ordeal.disturb()
        if len(ordeal.free) < 10:
            ordeal.calm()
    assert ordeal.seen["errors"] >= 10
    ordeal.calm()
    until(ordeal.all_closed)
    ordeal.seen.clear()
    for _ in range(60):
        ordeal.begin()
    ordeal.calm()
    assert len(ordeal.free) == PAGES // 2 - 1
    assert ordeal.seen["errors"] == 0
    assert min(ordeal.seen[what] for what in ("store", "find", "fetch")) >= 10
