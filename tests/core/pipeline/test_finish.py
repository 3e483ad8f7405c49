"""Why requests end: each reason alone, and which comes first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.finish import END_TOKENS, LENGTH, StopText, first_reason

EOS = 2


def req_with(*output: int, **params: Any) -> Req:
    req = Req("r", np.array([5, 6], np.int64), SamplingParams(**params), eos_ids=frozenset({EOS}))
    for token in output:
        req.tokens.append(token)
    return req


@pytest.mark.parametrize(
    ("params", "token", "ends"),
    [
        ({}, EOS, True),
        ({}, 9, False),
        ({"ignore_eos": True}, EOS, False),
        ({"stop_token_ids": (9,)}, 9, True),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, EOS, True),
    ],
)
def test_tokens(params: dict[str, Any], token: int, ends: bool) -> None:
    found = END_TOKENS.after(req_with(token, **params), token)
    assert found == (FinishReason(FinishType.STOP, matched=token) if ends else None)


def test_length() -> None:
    assert LENGTH.after(req_with(7, max_new_tokens=2), 7) is None
    assert LENGTH.after(req_with(7, 8, max_new_tokens=2), 8) == FinishReason(FinishType.LENGTH)


def test_a_text_that_ends_across_tokens() -> None:
    req = req_with(stop=("bc",), min_new_tokens=0)
    stop = StopText.of(req, FakeTokenizer())
    found = []
    for token in map(ord, "abc"):
        req.tokens.append(token)
        found.append(stop.after(req, token))
    assert found == [None, None, FinishReason(FinishType.STOP, matched="bc")]


def test_the_first_reason_counts_and_later_ones_are_not_asked() -> None:
    asked: list[str] = []

    class One:
        def __init__(self, name: str, reason: FinishReason | None) -> None:
            self.name, self.reason = name, reason

        def after(self, req: Req, token: int) -> FinishReason | None:
            asked.append(self.name)
            return self.reason

    stop, length = FinishReason(FinishType.STOP, matched=9), FinishReason(FinishType.LENGTH)
    finishers = [One("a", None), One("b", stop), One("c", length)]
    assert first_reason(finishers, req_with(9), 9) is stop
    assert asked == ["a", "b"]
    assert first_reason(finishers[:1], req_with(9), 9) is None
