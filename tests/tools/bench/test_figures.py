"""Figures of records whose times are known, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.tools.bench.figures import figures, median, meets, spread
from pegboard.tools.bench.load import Outcome
from pegboard.tools.bench.records import Record

SECONDS = np.random.default_rng(0).gamma(2.0, 0.05, 137).tolist()


def record(
    number: int = 0, *, sent: float = 10.0, times: tuple[float, ...] = (10.5, 10.6, 10.8), end: float | None = None
) -> Record:
    """One that has got a token at each of these times."""
    return Record(
        number, sent=sent, due=sent, times=list(times), end=times[-1] if end is None else end, over=True,
        prompt_tokens=100, output_tokens=len(times), cached_tokens=25, counted="usage", finish_reason="length",
    )  # fmt: skip


class TestSpread:
    def test_it_is_numpys(self) -> None:
        found = spread(SECONDS)
        assert found is not None
        values = np.array(SECONDS) * 1000
        expected = {
            "mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max(),
            **{f"p{p}": np.percentile(values, p) for p in (50, 90, 95, 99)},
        }  # fmt: skip
        assert found == pytest.approx(expected)

    def test_of_one_value_all_are_that(self) -> None:
        assert spread([0.25]) == {
            "mean": 250, "std": 0, "min": 250, "p50": 250, "p90": 250, "p95": 250, "p99": 250, "max": 250
        }  # fmt: skip

    def test_of_nothing_there_is_none(self) -> None:
        assert spread([]) is None


class TestRecord:
    def test_latencies(self) -> None:
        one = record()
        assert (one.ttft, one.e2e) == pytest.approx((0.5, 0.8))
        assert one.tpot == pytest.approx(0.15)
        assert one.intervals() == pytest.approx([0.1, 0.2])

    def test_tokens_that_came_together_share_the_time_before_them(self) -> None:
        one = record()
        one.counts, one.output_tokens = [2, 4, 1], 7
        assert one.intervals() == pytest.approx([0.025] * 4 + [0.2])
        assert one.tpot == pytest.approx(0.3 / 5)

    def test_pieces_of_several_tokens_do_not_spoil_tpot(self) -> None:
        one = record()
        one.output_tokens = 31
        assert one.tpot == pytest.approx(0.3 / 30)

    @pytest.mark.parametrize(("times", "tokens"), [((10.5,), 1), ((10.5,), 8), ((), 3)])
    def test_without_a_second_piece_there_is_no_tpot(self, times: tuple[float, ...], tokens: int) -> None:
        one = record()
        one.times, one.output_tokens = list(times), tokens
        assert one.tpot is None
        assert one.intervals() == []

    def test_an_answer_without_text_came_at_its_end(self) -> None:
        one = record()
        one.times = []
        assert one.ttft == one.e2e == pytest.approx(0.8)


class TestFigures:
    @pytest.fixture
    def outcome(self) -> Outcome:
        records = [record(0), record(1, sent=11.0, times=(11.1, 11.3), end=11.4)]
        failed = record(2, sent=12.0, times=(12.1,), end=15.0)
        failed.error = "status 503: full"
        return Outcome(5, [*records, failed], start=10.0, end=15.0, stopped="the server is gone", cpu_seconds=0.01)

    def test_rates(self, outcome: Outcome) -> None:
        found = figures(outcome)
        assert (found["requests"], found["completed"], found["failed"], found["unfinished"]) == (5, 2, 1, 2)
        assert (found["input_tokens"], found["output_tokens"], found["cached_tokens"]) == (200, 5, 50)
        assert found["hit_rate"] == 0.25
        assert found["request_throughput"] == pytest.approx(2 / 5)
        assert found["output_throughput"] == pytest.approx(5 / 5)
        assert found["total_throughput"] == pytest.approx(205 / 5)
        assert found["mean_concurrency"] == pytest.approx((0.8 + 0.4 + 3.0) / 5)
        assert found["errors"] == [{"message": "status 503: full", "count": 1}]
        assert found["client"]["cpu_us_per_token"] == pytest.approx(2000)

    def test_latencies_are_those_of_the_good_ones(self, outcome: Outcome) -> None:
        found = figures(outcome)
        assert found["ttft_ms"]["max"] == pytest.approx(500)
        assert found["ttft_ms"]["p50"] == pytest.approx(300)
        assert found["e2e_ms"]["mean"] == pytest.approx(600)
        assert found["tpot_ms"]["mean"] == pytest.approx((150 + 300) / 2)
        assert found["itl_ms"]["mean"] == pytest.approx((100 + 200 + 200) / 3)

    def test_goodput(self, outcome: Outcome) -> None:
        assert figures(outcome)["goodput"] is None
        assert figures(outcome, {"ttft": 200})["goodput"] == pytest.approx(1 / 5)
        assert figures(outcome, {"ttft": 500.1, "tpot": 301})["goodput"] == pytest.approx(2 / 5)
        assert not meets(outcome.records[0], {"e2e": 799})

    def test_a_server_that_tells_nothing_of_its_cache(self, outcome: Outcome) -> None:
        for one in outcome.records:
            one.cached_tokens = None
        found = figures(outcome)
        assert found["hit_rate"] is None
        assert found["cached_tokens"] is None

    def test_nothing_has_succeeded(self) -> None:
        found = figures(Outcome(3, [], 1.0, 1.0))
        assert found["ttft_ms"] is None
        assert found["unfinished"] == 3
        assert found["client"]["cpu_us_per_token"] is None


def test_medians_of_runs() -> None:
    runs = [
        {"rate": 1.0, "count": 3, "ttft": {"p50": 10.0}, "none": None, "text": "a", "some": None},
        {"rate": 9.0, "count": 3, "ttft": {"p50": 30.0}, "none": None, "text": "b", "some": 4.0},
        {"rate": 2.0, "count": 5, "ttft": {"p50": 20.0}, "none": None, "text": "c", "some": 6.0},
    ]
    assert median(runs) == {
        "rate": 2.0, "count": 3, "ttft": {"p50": 20.0}, "none": None, "text": "a", "some": 5.0
    }  # fmt: skip
