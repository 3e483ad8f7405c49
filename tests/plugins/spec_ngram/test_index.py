"""The index against a plain statement of the rule, and against prompt lookup in transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pegboard.plugins.spec_ngram import index
from pegboard.plugins.spec_ngram.index import GramHash, NgramIndex


def plain(tokens: list[int], shortest: int, longest: int) -> int:
    """The rule: of the longest sequence of `shortest` to `longest` tokens that the text ends with and that ends in an
    earlier place too, the latest such place.
    """
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for place in range(len(tokens) - 2, length - 2, -1):
            if tokens[place + 1 - length : place + 1] == tokens[-length:]:
                return place
    return -1


def text(rng: np.random.Generator) -> NDArray[np.int64]:
    """A text of few or many different tokens, now and then with a passage that comes again."""
    size, kinds = int(rng.integers(1, 200)), int(rng.choice([1, 2, 3, 8, 50, 1000]))
    tokens = rng.integers(0, kinds, size)
    for _ in range(int(rng.integers(0, 4))):
        start, to, length = rng.integers(0, size), rng.integers(0, size), rng.integers(1, 30)
        piece = tokens[start : start + length].copy()[: size - to]
        tokens[to : to + len(piece)] = piece
    return tokens.astype(np.int64)


def lengths(rng: np.random.Generator) -> tuple[int, int]:
    low, high = sorted(rng.integers(1, 17, 2).tolist()) if rng.random() < 0.5 else (2, 8)
    return low, high


def asked(found: NgramIndex, tokens: NDArray[np.int64]) -> int:
    """Its answer, however often it has to be asked for it."""
    while (place := found.find(tokens)) is None:
        pass
    return place


@pytest.mark.parametrize(("block", "at_once"), [(16, 64), (index.BLOCK, index.AT_ONCE)])
def test_as_the_plain_rule(block: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 texts, at once and as they grow, with blocks of several sizes."""
    monkeypatch.setattr(index, "BLOCK", block)
    monkeypatch.setattr(index, "AT_ONCE", at_once)
    rng = np.random.default_rng(block)
    found = 0
    for number in range(500):
        tokens, (low, high) = text(rng), lengths(rng)
        grown = NgramIndex(GramHash(low, high))
        # The plain rule takes quadratic time at each length: some lengths of each text are looked at.
        steps = rng.integers(1, len(tokens) + 1, 4 if number % 4 else 12)
        for stop in sorted({len(tokens), *steps.tolist()}):
            expected = plain(tokens[:stop].tolist(), low, high)
            assert asked(grown, tokens[:stop]) == expected
            found += expected >= 0
    assert found > 500, "most of them say nothing"


def test_what_is_found_does_not_depend_on_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BLOCK", 32)
    monkeypatch.setattr(index, "AT_ONCE", 64)
    tokens = np.random.default_rng(3).integers(0, 6, 900)
    grams = GramHash(2, 8)
    grown = NgramIndex(grams)
    for stop in range(1, 900, 7):
        assert asked(grown, tokens[:stop]) == asked(NgramIndex(grams), tokens[:stop])


def test_sequences_that_meet_in_a_hash_are_not_taken_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BLOCK", 16)
    grams = GramHash(2, 4)
    grams.weights[:] = 0  # every sequence meets every other one
    found = NgramIndex(grams)
    tokens = np.arange(200, dtype=np.int64)
    for stop in (20, 40, 60, 200):
        assert asked(found, tokens[:stop]) == -1


def test_a_call_indexes_so_much_and_no_more() -> None:
    """So a long prompt's first call takes no longer than others; and there are few runs to look in."""
    found = NgramIndex(GramHash(2, 8))
    tokens = np.random.default_rng(0).integers(0, 9, 5 * index.AT_ONCE + 3 * index.BLOCK + 9)
    answers = []
    for _ in range(7):
        before = found.known
        answers.append(found.find(tokens))
        assert found.known - before <= index.AT_ONCE
    assert [answer is None for answer in answers] == [True] * 5 + [False] * 2
    assert [run.size for run in found.runs] == [index.BLOCK * size for size in (64, 16, 2, 1)]
    assert len(found.newest) <= 7 * index.BLOCK


def test_as_prompt_lookup_in_transformers() -> None:
    """Its rule for the length of a match is ours: longest first, anywhere before the end. It takes the first occurrence
    where ours is the newest, and proposes nothing beyond the text's end; so lengths and the truth of what is proposed
    are compared.
    """
    generator = pytest.importorskip("transformers.generation.candidate_generator")
    rng = np.random.default_rng(1)
    both = 0
    for _ in range(120):
        tokens, (low, high) = text(rng), (1, 8)
        theirs = generator.PromptLookupCandidateGenerator(
            num_output_tokens=5, max_matching_ngram_size=high, max_length=10**6
        )
        ids: Any = torch.tensor(tokens)[None]
        if ids.shape[1] < 2:
            continue
        drafted = theirs.get_candidates(ids)[0][0, len(tokens) :].tolist()
        place = asked(NgramIndex(GramHash(low, high)), tokens)
        assert bool(drafted) == (place >= 0)
        if drafted:
            both += 1
            length = matched(tokens, place, high)
            assert any(
                matched(tokens, other, high) == length and tokens[other + 1 : other + 6].tolist() == drafted
                for other in range(len(tokens) - 1)
            ), "one of the occurrences of equal length is theirs"
    assert both > 60


def matched(tokens: NDArray[np.int64], place: int, most: int) -> int:
    """How many tokens up to a place are those that the text ends with."""
    length = 0
    while length < min(most, place + 1) and tokens[place - length] == tokens[len(tokens) - 1 - length]:
        length += 1
    return length
