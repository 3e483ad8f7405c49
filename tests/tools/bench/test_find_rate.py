"""The search for the highest rate: the search itself, bounds, and what ends a trial early."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.bench.figures import figures, spread
from pegboard.tools.bench.find_rate import Bound, Trial, search, stop_early, verdict
from pegboard.tools.bench.load import Outcome
from pegboard.tools.bench.records import Record


def found(capacity: float, guess: float, precision: float = 0.05) -> tuple[list[Trial], float | None]:
    """Of a server that keeps every rate up to its capacity."""

    async def attempt(rate: float) -> Trial:
        return Trial(rate, "" if rate <= capacity else "too much")

    return asyncio.run(search(attempt, guess, precision))


class TestSearch:
    @pytest.mark.parametrize("capacity", [0.07, 1.0, 4.9, 12.3, 400.0])
    @pytest.mark.parametrize("guess", [0.5, 5.0, 50.0])
    def test_it_finds_the_capacity(self, capacity: float, guess: float) -> None:
        trials, rate = found(capacity, guess)
        if rate is None or not any(not one.kept for one in trials):
            assert len(trials) == 24, "it gave up before its time"
            return
        assert rate <= capacity < rate * 1.05 * 1.001

    def test_it_goes_straight_to_it(self) -> None:
        trials, rate = found(10.0, 9.0)
        assert len(trials) <= 6
        assert rate == max(one.rate for one in trials if one.kept)

    def test_a_finer_one(self) -> None:
        _, rate = found(10.0, 9.0, precision=0.005)
        assert rate is not None
        assert rate <= 10.0 < rate * 1.006

    def test_nothing_is_kept(self) -> None:
        trials, rate = found(0.0, 1.0)
        assert rate is None
        assert len(trials) == 24

    def test_the_last_trial_is_the_last(self) -> None:
        async def attempt(rate: float) -> Trial:
            return Trial(rate, "interrupted", last=True)

        trials, rate = asyncio.run(search(attempt, 1.0, 0.05))
        assert (len(trials), rate) == (1, None)


class TestBounds:
    def test_texts(self) -> None:
        assert Bound.parse("ttft:p99:1000, tpot:mean:50") == (Bound("ttft", "p99", 1000), Bound("tpot", "mean", 50))

    @pytest.mark.parametrize("text", ["ttft", "ttft:1000", "ttft:p98:1", "x:p99:1", "ttft:p99:x", "ttft:p99:-1", " "])
    def test_what_is_none(self, text: str) -> None:
        with pytest.raises(PegboardError, match="--find-rate"):
            Bound.parse(text)

    def test_verdicts(self) -> None:
        bounds = Bound.parse("ttft:p99:1000")
        outcome = Outcome(3, [done(0.5), done(0.9)], 0.0, 2.0)
        assert verdict(outcome, figures(outcome), bounds) == ""
        outcome.records.append(done(1.5))
        assert verdict(outcome, figures(outcome), bounds).startswith("p99 of TTFT was 14")
        outcome.records[-1].error = "full"
        assert verdict(outcome, figures(outcome), bounds) == "1 requests failed: full"
        outcome.stopped = "interrupted"
        assert verdict(outcome, figures(outcome), bounds) == "interrupted"


def done(ttft: float) -> Record:
    return Record(0, sent=0.0, times=[ttft, ttft + 0.1], end=ttft + 0.1, output_tokens=2, over=True)


class TestEarlyStops:
    @pytest.mark.parametrize("total", [1, 7, 50, 99, 100, 101, 250, 301])
    @pytest.mark.parametrize("statistic", ["p50", "p90", "p95", "p99", "max"])
    def test_never_too_early_nor_too_late(self, total: int, statistic: str) -> None:
        """With just so many slow ones that it stops, the bound is broken even if all others are as quick as can be;
        with one slow one less it could still be kept.
        """
        bound = Bound("ttft", statistic, 1000)
        least = next(n for n in range(total + 1) if bound.surely_broken([done(1.0)] * n, total, 5.0))
        for slow, kept in ((least, False), (least - 1, True)):
            # The slow ones have just missed it, or are so slow that any mixture with them misses it.
            values = spread([1.0 if not kept else 1.0 - 1e-9] * slow + [0.0] * (total - slow))
            assert values is not None
            assert (values[statistic] < 1000) is kept

    def test_those_who_wait_count(self) -> None:
        look = stop_early(Bound.parse("ttft:p99:1000"), 100)
        waiting = [Record(0, sent=0.0), Record(1, sent=0.0)]
        assert look(waiting, 0.9) == ""
        assert look(waiting, 1.1) == "not p99 of TTFT below 1000 ms"
        waiting[0].times = [0.5]
        assert look(waiting, 9.0) == ""

    def test_a_failure_ends_it(self) -> None:
        look = stop_early(Bound.parse("e2e:p50:1000"), 100)
        assert look([Record(0, error="full", over=True)], 0.0) == "a request failed"

    def test_whole_answers(self) -> None:
        bound = Bound("e2e", "max", 1000)
        assert not bound.surely_broken([Record(0, sent=0.0, times=[0.1])], 10, 0.9)
        assert bound.surely_broken([Record(0, sent=0.0, times=[0.1])], 10, 1.2)

    def test_means_are_known_at_the_end(self) -> None:
        assert not Bound("ttft", "mean", 1).surely_broken([done(9.0)] * 5, 5, 9.0)


def test_percentiles_are_of_the_kind_that_the_early_stop_takes_them_for() -> None:
    values: Any = np.arange(100) / 100
    assert spread(values.tolist())["p99"] == pytest.approx(980.1)  # type: ignore[index]
