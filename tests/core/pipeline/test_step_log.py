"""Log lines about batches, and where a request's time went."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard.core.engine.time_stats import log_finished, time_stats
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.step_log import DraftFigures, StepReport
from tests.core.pipeline.media_harness import Album, media_harness, submit


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
    harness.scheduler.stages.report = StepReport(40)
    with caplog.at_level(logging.DEBUG, "pegboard.core.pipeline.step_log"):
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


def finished_req() -> Req:
    req = Req("r1", np.arange(10), SamplingParams(max_new_tokens=5), arrived=1.0)
    for token in range(5):
        req.tokens.append(token)
    times = req.timing
    times.ready, times.queued, times.first_scheduled, times.first_token, times.finished = 2.0, 2.0, 5.0, 6.5, 8.5
    req.output.cached_tokens, req.output.num_retractions = 4, 1
    req.output.finish_reason = FinishReason(FinishType.LENGTH)
    return req


def test_time_stats_of_a_whole_request() -> None:
    assert time_stats(finished_req()) == {
        "rid": "r1",
        "prompt_tokens": 10,
        "output_tokens": 5,
        "cached_tokens": 4,
        "retractions": 1,
        "finish_reason": "length",
        "gates_s": 1.0,
        "queue_s": 3.0,
        "prefill_s": 1.5,
        "decode_s": 2.0,
        "ttft_s": 5.5,
        "e2e_s": 7.5,
        "decode_tokens_per_s": 2.0,
    }


def test_time_stats_leave_out_what_never_came() -> None:
    req = Req("r2", np.arange(3), SamplingParams(max_new_tokens=5), arrived=1.0)
    req.timing.finished = 4.0
    req.output.finish_reason = FinishReason(FinishType.ABORT, message="aborted", status=499)
    stats = time_stats(req)
    assert stats["e2e_s"] == 3.0
    assert not {"ttft_s", "queue_s", "prefill_s", "decode_s", "gates_s", "decode_tokens_per_s"} & set(stats)


def test_one_line_per_finished_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_finished([finished_req(), finished_req()])
    assert len(caplog.records) == 2
    assert "rid='r1'" in caplog.records[0].getMessage()
    fields: dict[str, Any] = vars(caplog.records[0])
    assert (fields["event"], fields["rid"], fields["ttft_s"]) == ("request", "r1", 5.5)


def test_a_decode_line_tells_of_drafts_since_the_last_one(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    report = StepReport(2, clock)
    with caplog.at_level(logging.INFO):
        total = decode(report, clock, 4, 0, drafts=DraftFigures(10, 40, 20))
        decode(report, clock, 2, total, drafts=DraftFigures(14, 56, 22))
    first, second = caplog.records[0], caplog.records[-1]
    assert "accept len: 3.00, accept rate: 0.50" in first.getMessage()
    assert "accept len: 1.50, accept rate: 0.12" in second.getMessage()
    assert (vars(second)["drafted_tokens"], vars(second)["accepted_tokens"]) == (16, 2)
