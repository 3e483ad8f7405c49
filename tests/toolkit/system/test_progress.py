"""Progress: lines in the log, and what a program shows in their place."""

from __future__ import annotations

import logging
import threading
from typing import ClassVar

import pytest

from pegboard.toolkit.system.progress import LogLines, progress, shown_by


class Kept:
    """What was shown of all work."""

    shares: ClassVar[dict[str, list[float | None]]] = {}
    seen = threading.Event()

    def __init__(self, what: str) -> None:
        self.what = what
        self.shares[what] = []

    def show(self, share: float | None, seconds: float) -> None:
        self.shares[self.what].append(share)
        self.seen.set()

    def close(self) -> None:
        self.shares[f"{self.what}, closed"] = []


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard.toolkit.system.progress._TICK", 0.001)
    Kept.shares.clear()


def wait_for_a_look() -> None:
    """Until a thread has looked twice, so once at what is done by now."""
    for _ in range(2):
        Kept.seen.clear()
        assert Kept.seen.wait(60)


def read_and_fail() -> None:
    with progress("reading", 8) as done:
        done(2)
        wait_for_a_look()
        done(6)
        wait_for_a_look()
        raise OSError


def test_work_is_shown_while_it_goes_on_and_closed_when_it_fails() -> None:
    with shown_by(Kept):
        with pytest.raises(OSError):
            read_and_fail()
        with progress("compiling"):
            wait_for_a_look()
    shares = [share for share in Kept.shares["reading"] if share is not None]
    assert shares == sorted(shares)
    assert {0.25, 1.0} <= {*shares}
    assert {*Kept.shares["compiling"]} == {None}
    assert {"reading, closed", "compiling, closed"} <= {*Kept.shares}


def test_a_line_per_tenth_once_it_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    lines = LogLines("reading weights")
    with caplog.at_level(logging.INFO):
        for share, seconds in [(0.0, 0.1), (0.15, 1.9), (0.18, 2.1), (0.19, 2.2), (0.41, 3.0), (0.42, 3.1), (1.0, 9.0)]:
            lines.show(share, seconds)
    assert caplog.messages == [f"reading weights: {done}" for done in ("10%, 2 s", "40%, 3 s", "100%, 9 s")]


def test_a_line_per_ten_seconds_where_the_end_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    lines = LogLines("compiling")
    with caplog.at_level(logging.INFO):
        for seconds in (0.5, 9.9, 10.1, 10.4, 20.2):
            lines.show(None, seconds)
    assert caplog.messages == ["compiling: 10 s", "compiling: 20 s"]
