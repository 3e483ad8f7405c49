"""Lanes: which of two batches runs when, and what happens to one that raises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from pegboard.plugins.parallel.lanes import FollowingLanes, Lanes

SECONDS = 20.0


class Job:
    """What is run: it notes its beginning, its wait for `comes`, and its end."""

    def __init__(self, name: str, lanes: Lanes, log: list[str], *, waits: bool = True, fails: bool = False) -> None:
        self.name, self.lanes, self.log, self.waits, self.fails = name, lanes, log, waits, fails
        self.comes = threading.Event()
        self.receives = threading.Event()

    def __call__(self) -> str:
        self.log.append(f"{self.name} begins")
        if self.waits:
            with self.lanes.waiting():
                self.receives.set()
                assert self.comes.wait(SECONDS)
                if self.fails:
                    raise ValueError(f"{self.name} has got nothing")
        self.log.append(f"{self.name} ends")
        return self.name


def jobs(lanes: Lanes, log: list[str], names: str = "abc", **how: bool) -> list[Job]:
    return [Job(name, lanes, log, **how) for name in names]


def test_the_next_one_begins_while_one_waits() -> None:
    log: list[str] = []
    lanes = Lanes(lambda: log.append("goes on"))
    a, b, c = jobs(lanes, log)
    first, second = lanes.submit(a), lanes.submit(b)
    while log != ["a begins", "b begins"]:
        assert a.receives.wait(SECONDS)
    b.comes.set()
    assert not b.receives.wait(0.05), "what b waits for comes after what a waits for"
    a.comes.set()
    assert first.result(SECONDS) == "a"
    assert second.result(SECONDS) == "b"
    third = lanes.submit(c)
    c.comes.set()
    assert third.result(SECONDS) == "c"
    lanes.close()
    assert log[2:] == ["goes on", "a ends", "goes on", "b ends", "c begins", "goes on", "c ends"]


def test_one_that_is_alone_waits_for_all_before() -> None:
    log: list[str] = []
    lanes = Lanes()
    a, b, _ = jobs(lanes, log)
    b.waits = False
    first, second = lanes.submit(a), lanes.submit(b, alone=True)
    assert a.receives.wait(SECONDS)
    assert not second.done()
    a.comes.set()
    assert [first.result(SECONDS), second.result(SECONDS)] == ["a", "b"]
    lanes.close()
    assert log == ["a begins", "a ends", "b begins", "b ends"]


def test_only_one_runs_at_a_time() -> None:
    """One that could go on waits until the other one has ended or waits itself."""
    log: list[str] = []
    lanes, going = Lanes(), threading.Event()
    a, *_ = jobs(lanes, log)

    def long() -> None:
        log.append("b begins")
        a.comes.set()
        assert not going.wait(0.05)
        log.append("b ends")

    first, second = lanes.submit(a), lanes.submit(long)
    first.add_done_callback(lambda _: going.set())
    first.result(SECONDS)
    second.result(SECONDS)
    lanes.close()
    assert log == ["a begins", "b begins", "b ends", "a ends"]


def test_one_that_fails_keeps_no_other() -> None:
    log: list[str] = []
    lanes = Lanes(lambda: log.append("goes on"))
    a, b, _ = jobs(lanes, log)
    a.fails = True
    futures: list[Future[str]] = [lanes.submit(a), lanes.submit(b)]
    a.comes.set()
    b.comes.set()
    with pytest.raises(ValueError, match="a has got nothing"):
        futures[0].result(SECONDS)
    assert futures[1].result(SECONDS) == "b"
    lanes.close()
    assert log.count("goes on") == 1


def test_a_follower_does_what_it_is_told() -> None:
    """It goes on with the one that has waited for longest, whatever has come."""
    log: list[str] = []
    lanes = FollowingLanes()
    a, b, c = jobs(lanes, log)
    c.waits = False
    for job in (a, b):
        job.comes.set()
        lanes.run(job)
    assert log == ["a begins", "b begins"]
    lanes.go_on()
    assert log[2:] == ["a ends"]
    lanes.run(c)
    assert log[3:] == ["c begins", "c ends"]
    lanes.go_on()
    assert log[5:] == ["b ends"]
    lanes.close()


@pytest.mark.parametrize("told", [FollowingLanes.go_on, FollowingLanes.close])
def test_a_follower_whose_batch_fails(told: Callable[[FollowingLanes], None]) -> None:
    """It learns of it when it is told to go on; its end does not wait to be told."""
    lanes = FollowingLanes()
    a, *_ = jobs(lanes, [], fails=True)
    a.comes.set()
    lanes.run(a)
    if told is FollowingLanes.go_on:
        with pytest.raises(ValueError, match="a has got nothing"):
            told(lanes)
    lanes.close()


def test_a_follower_whose_pass_raises() -> None:
    lanes = FollowingLanes()
    with pytest.raises(ZeroDivisionError):
        lanes.run(lambda: 1 // 0)
    lanes.close()
