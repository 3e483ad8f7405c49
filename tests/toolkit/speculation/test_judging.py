"""Judging drafts: equal decisions to plain statements of the algorithms, and what both promise at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pegboard.conformance.properties import properties
from pegboard.conformance.sampler import CASES, LARGE_CASES, Row, exact_probabilities, make_sampling
from pegboard.core.interfaces.sampler import SamplerContext
from pegboard.core.interfaces.trees import Accepted, TokenTrees
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from pegboard.toolkit.sampling import tree
from pegboard.toolkit.speculation.judging import accept_by_thresholds, probabilities, toss
from tests.toolkit.sampling.test_tree import one_tree

VOCAB = 6
CHAIN = tree.chains([(1, [2, 3])])


def random_probs(random: np.random.Generator, rows: int) -> torch.Tensor:
    """Return float32 [rows, VOCAB], some of them 0, and some rows with nothing but one token."""
    weights = random.gamma(0.7, size=(rows, VOCAB)) * (random.random((rows, VOCAB)) < 0.8)
    weights[random.random(rows) < 0.1] = 0.0
    empty = weights.sum(-1) == 0
    weights[empty, random.integers(VOCAB, size=int(empty.sum()))] = 1.0
    return torch.from_numpy((weights / weights.sum(-1, keepdims=True)).astype(np.float32))


def random_coins(random: np.random.Generator, count: int) -> torch.Tensor:
    """Return float32 [count] in (0, 1)."""
    return torch.from_numpy(((random.integers(2**23, size=count) + 0.5) / 2**23).astype(np.float32))


def draw(weights: list[float], whole: list[float], coin: float) -> int:
    """Return the token at which the weights added up go beyond the coin's share of all."""
    weights = weights if sum(weights) > 0 else whole
    total = 0.0
    for weight in weights:
        total += weight
    so_far = 0.0
    for token, weight in enumerate(weights):
        so_far += weight
        if so_far > coin * total:
            return token
    raise AssertionError("a coin of 1")


def plain_thresholds(trees: TokenTrees, probs, coins, finals, single: float, acc: float) -> Accepted:
    """Say `accept_by_thresholds` once more: request by request, child by child, in Python's floats."""
    probs, coins, finals = probs.tolist(), coins.tolist(), finals.tolist()
    counts: list[int] = []
    nodes: list[int] = []
    tokens: list[int] = []
    start = 0
    for request, count in enumerate(trees.counts.tolist()):
        at, path = start, [start]
        while True:
            left, so_far, found = list(probs[at]), 0.0, None
            for child in range(start + 1, start + count):
                if start + trees.parents[child] != at:
                    continue
                token = int(trees.tokens[child])
                so_far += probs[at][token]
                stands = coins[at] <= so_far / max(acc, 1e-9) or probs[at][token] >= single
                if stands and probs[at][token] > 0:
                    found = child
                    break
                left[token] = 0.0
            if found is None:
                break
            tokens.append(int(trees.tokens[found]))
            at = found
            path.append(at)
        tokens.append(draw(left, probs[at], finals[request]))
        counts.append(len(path))
        nodes += path
        start += count
    return Accepted(np.array(counts, np.int64), np.array(nodes, np.int64), np.array(tokens, np.int64))


def assert_same(found: Accepted, expected: Accepted) -> None:
    for name in ("counts", "nodes", "tokens"):
        one = getattr(found, name)
        assert one.dtype == np.int64
        assert one.tolist() == getattr(expected, name).tolist(), name


@properties(150)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.05, 0.3, 0.7, 1.0]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([1, 4, 12, 40]),
)
def test_thresholds_decide_as_the_plain_statement(seed: int, single: float, acc: float, most: int) -> None:
    random = np.random.default_rng(seed)
    trees = tree.join(one_tree(random, most, VOCAB) for _ in range(int(random.integers(12))))
    probs = random_probs(random, len(trees.tokens))
    coins, finals = random_coins(random, len(trees.tokens)), random_coins(random, len(trees))
    found = accept_by_thresholds(trees, probs.clone(), coins, finals, single, acc)
    assert_same(found, plain_thresholds(trees, probs, coins, finals, single, acc))


@properties(60)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.4, 1.0]), st.sampled_from([0.0, 0.4, 1.0]))
def test_greedy_requests_are_walked_by_their_maxima(seed: int, single: float, acc: float) -> None:
    random = np.random.default_rng(seed)
    trees = tree.join(one_tree(random, 20, VOCAB) for _ in range(5))
    logits = torch.from_numpy(random.normal(size=(len(trees.tokens), VOCAB)).astype(np.float32))
    probs = probabilities(logits, make_sampling([{}] * len(logits), VOCAB))
    coins, finals = random_coins(random, len(logits)), random_coins(random, len(trees))
    expected = tree.walk(trees, logits.argmax(-1).numpy())
    assert_same(accept_by_thresholds(trees, probs, coins, finals, single, acc), expected)


@pytest.mark.parametrize("threshold", [-0.1, 1.01, float("nan")])
@pytest.mark.parametrize("name", ["single", "acc"])
def test_thresholds_are_shares(name: str, threshold: float) -> None:
    given = {"single": 1.0, "acc": 1.0, name: threshold}
    with pytest.raises(ValueError, match=f"threshold {name} must be from 0 to 1, got {threshold}"):
        accept_by_thresholds(CHAIN, torch.ones(3, 4) / 4, torch.ones(3) / 2, torch.ones(1) / 2, **given)


@pytest.mark.parametrize("single", [0.0, 1.0])
def test_what_is_impossible_never_stands(single: float) -> None:
    """Not with a threshold of 0, and not for a coin of 0, though coins lie above it."""
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).repeat(3, 1)
    zeros, half = torch.zeros(3), torch.tensor([0.7])
    assert accept_by_thresholds(CHAIN, probs, zeros, half, single, 0.0).tokens.tolist() == [1]


def test_what_rounding_leaves_nothing_of() -> None:
    """Two children have all of the probability, but for rounding, and the coin is beyond them: one of them is drawn. So
    is a token for coins that were rounded to 1.
    """
    trees = TokenTrees(np.array([3]), np.array([1, 2, 3]), np.array([-1, 0, 0]))
    probs = torch.tensor([[0.0, 0.0, 0.5, 0.4999999]]).repeat(3, 1)
    one = torch.ones(1)
    for coin, token in ((0.1, 2), (0.9, 3), (1.0, 2)):
        found = accept_by_thresholds(trees, probs, one.repeat(3), one * coin, 1.0, 1.0)
        assert found.counts.tolist() == [1]
        assert found.tokens.tolist() == [token]


def test_coins_come_from_seeds_and_steps() -> None:
    trees = tree.chains([(1, [2, 3]), (4, []), (5, [1])])
    seeds, steps = torch.tensor([7, 7, 7, 8, 7, 7]), torch.tensor([0, 1, 2, 0, 1, 2])
    coins, finals = toss(trees, seeds, steps)
    assert coins.dtype == finals.dtype == torch.float64
    assert (coins.shape, finals.shape) == ((6,), (3,))
    assert coins[1] == coins[4], "seed and step alone decide"
    assert len({*coins.tolist(), *finals.tolist()}) == 7
    again = toss(tree.take_part(trees, np.array([2])), seeds[4:], steps[4:])
    assert again[0].tolist() == coins[4:].tolist()
    assert again[1].tolist() == finals[2:].tolist()


def test_coins_are_uniform_and_apart() -> None:
    """Means of 100,000 are 0.5, and coins do not go with final coins, to 5 standard errors."""
    count = 100_000
    roots = TokenTrees(np.ones(count, np.int64), np.zeros(count, np.int64), np.full(count, -1))
    coins, finals = (one.numpy() for one in toss(roots, torch.arange(count), torch.arange(count) % 5))
    error = 5 / np.sqrt(count)
    for one in (coins, finals):
        assert ((one > 0) & (one < 1)).all()
        assert abs(one.mean() - 0.5) < error * np.sqrt(1 / 12)
        assert abs(one.var() - 1 / 12) < error * np.sqrt(1 / 180)
    assert abs(np.corrcoef(coins, finals)[0, 1]) < error


def expected_rows(logits: NDArray[np.float32], rows: list[Row]) -> NDArray[np.float64]:
    return np.stack([exact_probabilities(one, row) for one, row in zip(logits, rows, strict=True)])


def test_probabilities_are_the_samplers() -> None:
    """1e-6 is a few roundings to float32."""
    rows = [*CASES.values(), {"temperature": 0.1, "top_k": 3}, {"temperature": 100.0, "top_p": 0.5}]
    logits = np.random.default_rng(1).normal(0.0, 2.0, (len(rows), 300)).astype(np.float32)
    given = torch.from_numpy(logits.copy())
    found = probabilities(given, make_sampling(rows, 300))
    assert found.dtype == torch.float32
    assert (given.numpy() == logits).all()
    np.testing.assert_allclose(found.numpy(), expected_rows(logits, rows), rtol=1e-6, atol=1e-9)
    assert ((found.numpy() == 0) == (expected_rows(logits, rows).astype(np.float32) == 0)).all()


def test_probabilities_of_many_rows() -> None:
    """More than are worked on at once."""
    rows = [{}, *LARGE_CASES.values()] * 25
    logits = np.random.default_rng(2).normal(0.0, 1.5, (len(rows), 6000)).astype(np.float32)
    found = probabilities(torch.from_numpy(logits), make_sampling(rows, 6000)).numpy()
    for row in (*range(8), 100, 191, 192, 193, 194, 195, 196, 197, 198, 199):
        if rows[row]:
            np.testing.assert_allclose(found[row], exact_probabilities(logits[row], rows[row]), rtol=1e-5, atol=1e-9)
        else:
            assert found[row].argmax() == logits[row].argmax()
            assert found[row].sum() == found[row].max() == 1


def test_probabilities_of_greedy_rows_and_ties() -> None:
    """The first maximum; and of equal logits at a cut what the sampler keeps."""
    logits = torch.tensor([2.0, 5.0, 5.0, -1.0, 5.0, 2.0]).repeat(4, 1)
    rows: list[Row] = [{}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_k": 2}]
    rows.append({"temperature": 1.0, "top_p": 0.5})
    found = probabilities(logits, make_sampling(rows, 6))
    assert found[:2].tolist() == [[0, 1, 0, 0, 0, 0]] * 2
    assert found[2:].tolist() == [[0, 0.5, 0.5, 0, 0, 0]] * 2
    sampler = TorchSampler(None, SamplerContext(6, torch.device("cpu")))
    for row in range(4):
        batch = make_sampling([{**rows[row], "seed": seed} for seed in range(64)], 6)
        drawn = sampler.sample(logits[:1].repeat(64, 1), batch)
        assert set(drawn.tolist()) == set(found[row].nonzero().flatten().tolist())


def test_probabilities_of_odd_logits() -> None:
    inf = float("inf")
    sampling = make_sampling([{"temperature": 0.5}] * 2, 3)
    found = probabilities(torch.tensor([[-inf, 1.0, -inf], [inf, 3.0, -inf]]), sampling)
    assert found.tolist() == [[0, 1, 0], [1, 0, 0]]
    for bad in ([-inf] * 3, [1.0, float("nan"), 0.0]):
        with pytest.raises(ValueError, match="row 1 has no probabilities"):
            probabilities(torch.tensor([[0.0, 1.0, 2.0], bad]), sampling)


def test_nothing_to_judge() -> None:
    none, empty = tree.chains([]), torch.empty(0)
    found = accept_by_thresholds(none, torch.empty(0, 4), empty, empty, 1.0, 1.0)
    assert_same(found, tree.walk(none, np.empty(0, np.int64)))
    assert probabilities(torch.empty(0, 4), make_sampling([], 4)).shape == (0, 4)
