"""The comparison that the correctness tests rest on must be able to fail."""

import pytest

from tests.e2e.reference import NEAR_TIE, Answer, Comparison

CLEAR, CLOSE = 1.0, NEAR_TIE / 2


def answer(gaps: list[float]) -> Answer:
    return Answer(tokens=list(range(len(gaps))), gaps=gaps, logprobs=[0.0] * len(gaps))


def test_equal_answers() -> None:
    comparison = Comparison()
    assert comparison.add([0, 1, 2], answer([CLEAR] * 3), "a") == 3
    comparison.finish()


def test_another_token_fails() -> None:
    with pytest.raises(AssertionError, match="token 1 is 9, transformers says 1"):
        Comparison().add([0, 9, 2], answer([CLEAR] * 3), "a")


def test_another_token_at_a_near_tie_ends_the_comparison() -> None:
    comparison = Comparison()
    assert comparison.add([0, 9, 8], answer([CLEAR, CLOSE, CLEAR]), "a") == 1
    assert (comparison.compared, comparison.total, comparison.near_ties) == (1, 3, 1)
    with pytest.raises(AssertionError, match="only 1 of 3 positions"):
        comparison.finish()


def test_a_near_tie_elsewhere_excuses_nothing() -> None:
    with pytest.raises(AssertionError, match="token 2"):
        Comparison().add([0, 1, 9], answer([CLEAR, CLOSE, CLEAR]), "a")


def test_short_answers_fail() -> None:
    with pytest.raises(AssertionError, match="2 tokens instead of 3"):
        Comparison().add([0, 1], answer([CLEAR] * 3), "a")
