"""The line in the log for each finished request."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.plugins.operator_controls.request_log import log_finished, time_stats


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


def test_a_rid_makes_no_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    rid = "a\n12:00:00 scheduler ERROR stolen\x1b[2J\u2028" + "x" * 5000
    req = Req(rid, np.arange(3), SamplingParams(max_new_tokens=5))
    req.output.finish_reason = FinishReason(FinishType.LENGTH)
    with caplog.at_level("INFO"):
        log_finished([req])
    line = caplog.records[0].getMessage()
    assert line.isprintable()
    assert len(line) < 1000
