"""DRY against its formula, written down plainly; what a request may say; and what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.logits_processor import LogitsProcessorContext
from pegboard.core.interfaces.sampling import SamplingParams, SamplingRow
from pegboard.plugins.logits_custom.dry import LARGEST_PENALTY, LONGEST_MATCH, Dry
from pegboard.plugins.logits_custom.options import DryOptions

VOCAB = 128


def make(longest_range: int = 8192) -> Dry:
    ctx = LogitsProcessorContext(VOCAB, torch.device("cpu"), frozenset(), FakeTokenizer())
    return Dry(DryOptions(longest_range=longest_range), ctx)


def penalised(prompt: Sequence[int], output: Sequence[int], longest_range: int = 8192, **said: Any) -> dict[int, float]:
    """What each token loses."""
    processor = make(longest_range)
    params = SamplingParams(extra={"dry": said})
    assert processor.wants(params)
    row = SamplingRow(params, np.array(prompt, dtype=np.int64), np.array(output, dtype=np.int64))
    logits = torch.zeros(1, VOCAB)
    state = processor.prepare([row])
    if state is not None:
        processor.apply(logits, state)
    return {token: -float(logits[0, token]) for token in logits[0].nonzero().flatten().tolist()}


def common_end(tokens: Sequence[int], place: int, breakers: set[int]) -> int:
    """How many tokens up to `place` equal those at the end, without a breaker among them."""
    length = 0
    while place - length >= 0 and tokens[place - length] == tokens[-1 - length] not in breakers:
        length += 1
    return length


def reference(
    tokens: Sequence[int], breakers: set[int], multiplier: float, base: float, allowed: int
) -> dict[int, float]:
    """Every earlier place that ends as the text does now speaks against the token that followed it there."""
    lengths: dict[int, int] = {}
    for place in range(len(tokens) - 1):
        length, following = common_end(tokens, place, breakers), tokens[place + 1]
        if length and following not in breakers:
            lengths[following] = max(length, lengths.get(following, 0))
    return {token: multiplier * base ** (n - allowed) for token, n in lengths.items() if n >= allowed}


_TOKENS = st.lists(st.sampled_from([97, 98, 99, 10, 58]), max_size=30)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    prompt=_TOKENS,
    output=_TOKENS,
    breakers=st.lists(st.sampled_from(["\n", ":", "b"]), unique=True, max_size=2),
    multiplier=st.sampled_from([0.5, 0.8, 3.0]),
    base=st.sampled_from([1.0, 1.75, 2.0]),
    allowed=st.integers(1, 4),
    latest=st.integers(0, 20),
)
def test_equals_the_formula(
    prompt: list[int], output: list[int], breakers: list[str], multiplier: float, base: float, allowed: int, latest: int
) -> None:
    said = {"multiplier": multiplier, "base": base, "allowed_length": allowed, "range": latest}
    tokens = (prompt + output)[-latest:]
    expected = reference(tokens, set(map(ord, breakers)), multiplier, base, allowed)
    found = penalised(prompt, output, sequence_breakers=breakers, **said)  # type: ignore[arg-type]
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_longer_the_repetition_the_more_its_continuation_loses() -> None:
    """ "the cat" stood there before a space, and the "at" of "sat" before a full stop."""
    tokens = [ord(char) for char in "the cat sat. the dog ran. the cat"]
    assert penalised([], tokens) == pytest.approx({32: 0.8 * 1.75**5, 46: 0.8}, rel=1e-5)


def test_breakers_are_ends_of_texts() -> None:
    """As in text-generation-webui, a breaker of several tokens is its last one."""
    tokens = [ord(char) for char in "xyzxy"]
    assert penalised([], tokens, sequence_breakers=["ay"]) == {}
    assert penalised([], tokens, sequence_breakers=["ax"], allowed_length=1) == {122: pytest.approx(0.8)}


def test_prompt_and_output_are_one_text() -> None:
    assert penalised([97, 98, 99, 97], [98]) == penalised([], [97, 98, 99, 97, 98]) == {99: pytest.approx(0.8)}


def test_the_range_of_the_server_bounds_that_of_requests() -> None:
    tokens = [97, 98, 99, *([100] * 3), 97, 98]
    assert penalised(tokens, [], 8) == {99: pytest.approx(0.8)}
    assert penalised(tokens, [], 7, range=1000) == {}
    assert penalised(tokens[:4], tokens[4:], 5) == {}


def test_very_long_repetitions_count_as_long_ones() -> None:
    once = list(np.random.default_rng(1).integers(60, 90, LONGEST_MATCH + 40))
    penalty = max(penalised(once + once[:-1], [], base=1.01).values())
    assert penalty == pytest.approx(0.8 * 1.01 ** (LONGEST_MATCH - 2), rel=1e-5)
    (penalty,) = penalised([97] * 600, [], base=100.0).values()
    assert penalty == pytest.approx(LARGEST_PENALTY, rel=1e-6)


def test_a_multiplier_of_nothing_takes_no_part() -> None:
    assert not make().wants(SamplingParams(extra={"dry": {"multiplier": 0}}))


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"multiplier": -1}, "multiplier"),
        ({"multiplier": float("nan")}, "multiplier"),
        ({"base": 0.5}, "base"),
        ({"base": float("inf")}, "base"),
        ({"allowed_length": 0}, "allowed_length"),
        ({"allowed_length": 2.5}, "allowed_length"),
        ({"range": -1}, "range"),
        ({"sequence_breakers": "\n"}, "sequence_breakers"),
        ({"sequence_breakers": [""]}, "sequence_breakers"),
        ({"sequence_breakers": ["a"] * 65}, "sequence_breakers"),
    ],
)
def test_refused(said: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make().wants(SamplingParams(extra={"dry": said}))
    assert (caught.value.status, caught.value.param) == (400, f"custom_params.dry.{param}")
