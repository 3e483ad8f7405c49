"""Log lines about batches, and where a request's time went."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.interfaces.ahead import LogPart
from pegboard.toolkit.system.step_report import StepReport
from tests.plugins.media.media_harness import Album, media_harness, submit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def decode(report: StepReport, clock: Clock, steps: int, total: int, **figures: Any) -> int:
    """Steps of 0.5 s with 4 tokens each; the total afterwards."""
    for _ in range(steps):
        clock.now += 0.5
        total += 4
        if report.decode_due(total):
            report.decode(**{"running": 4, "queued": 2, "used_tokens": 250, **figures})
    return total


def test_a_prefill_line_has_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        StepReport(40, total_tokens=1000).prefill(
            requests=2, new_tokens=30, cached_tokens=90, running=5, queued=7, used_tokens=250
        )
    [record] = caplog.records
    assert record.getMessage() == (
        "Prefill batch. #new-seq: 2, #new-token: 30, #cached-token: 90, cache hit rate: 0.75, token usage: 0.25, "
        "#running-req: 5, #queue-req: 7"
    )
    fields: dict[str, Any] = vars(record)
    assert (fields["event"], fields["hit_rate"], fields["queued"]) == ("prefill", 0.75, 7)


def test_a_model_with_media_tells_of_encoding_since_the_last_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three pictures, two at once, then one of them again with a new one."""
    harness, album = media_harness(tmp_path), Album(tmp_path)
    harness.scheduler.components.report = StepReport(40)
    with caplog.at_level(logging.DEBUG, "pegboard"):
        for rid, names in (("a", "xy"), ("b", "yz")):
            items = [album.item(name, 2, 3) for name in names]
            submit(harness, rid, album.prompt(album.words(3), *items))
            harness.run()
        harness.submit("c", [1, 2, 3, 4, 5])
        harness.run()
    lines = [record for record in caplog.records if vars(record).get("event") == "prefill"]
    assert [(vars(one)["encoded_pieces"], vars(one)["encoder_hits"]) for one in lines] == [(2, 0), (1, 1), (0, 0)]
    assert lines[1].getMessage().endswith("#queue-req: 0, #encoded-piece: 1, #encoder-hit: 1")
    steps = [record for record in caplog.records if record.getMessage().startswith("Encode batch")]
    assert [record.getMessage() for record in steps] == [
        "Encode batch. #piece: 2, #token: 12, took: 1.0 ms",
        "Encode batch. #piece: 1, #token: 6, took: 1.0 ms",
    ]
    assert {record.levelname for record in steps} == {"DEBUG"}


def test_a_prefill_says_nothing_above_info(caplog: pytest.LogCaptureFixture) -> None:
    report = StepReport(40)
    with caplog.at_level(logging.WARNING):
        assert not report.talks
        report.prefill(1, 1, 0, 0, 0, 1)
    assert caplog.records == []


def test_a_decode_line_every_interval_steps(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    report = StepReport(10, clock, total_tokens=1000)
    with caplog.at_level(logging.INFO):
        total = decode(report, clock, 10, 0)
        assert caplog.records == []
        total = decode(report, clock, 1, total)
        assert len(caplog.records) == 1
        total = decode(report, clock, 9, total)
        assert len(caplog.records) == 1
        decode(report, clock, 1, total)
    assert len(caplog.records) == 2
    assert {record.getMessage() for record in caplog.records} == {
        "Decode batch. #running-req: 4, #token: 250, token usage: 0.25, gen throughput (token/s): 8.00, #queue-req: 2"
    }


def test_idle_time_is_nobodys_throughput(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    report = StepReport(10, clock, total_tokens=1000)
    with caplog.at_level(logging.INFO):
        total = decode(report, clock, 5, 0)
        report.rest()
        clock.now += 10_000
        decode(report, clock, 11, total)
    [record] = caplog.records
    assert vars(record)["gen_throughput"] == 8.0


def test_interval_zero_is_silence(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    with caplog.at_level(logging.INFO):
        decode(StepReport(0, clock), clock, 200, 0)
    assert caplog.records == []


def test_stages_add_to_a_decode_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    report = StepReport(2, clock)
    parts = [LogPart(", a: 1", {"a": 1}), LogPart(", b: 2", {"b": 2})]
    with caplog.at_level(logging.INFO):
        decode(report, clock, 4, 0, parts=parts)
    first = caplog.records[0]
    assert first.getMessage().endswith(", a: 1, b: 2")
    assert (vars(first)["a"], vars(first)["b"]) == (1, 2)
