"""What drafts leave of the sampler's distribution: nothing is changed by draw and match and by thresholds at 1, over
100,000 draws each.

Seeds are fixed, so a test passes always or never. A right function has a chance of a millionth per chi-square test, and
of 6e-7 per share, to fail for some other choice of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pegboard.conformance.sampler import P_VALUE, Row, chi_square, exact_probabilities, make_sampling
from pegboard.core.interfaces.sampler import SamplerContext
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.core.interfaces.trees import Accepted, TokenTrees
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from pegboard.toolkit.sampling import tree
from pegboard.toolkit.speculation.judging import accept_by_thresholds, probabilities, toss

DRAWS = 100_000
VOCAB = 8
STEP = 3
"""Of the root's token: some tokens have been generated."""

CASES = {
    "top_k": {"temperature": 0.9, "top_k": 4},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.95, "min_p": 0.05},
}
FILTERS = [pytest.param(row, id=name) for name, row in CASES.items()]
FEWER = [one if one.id != "all" else pytest.param(*one.values, id="all", marks=pytest.mark.full) for one in FILTERS]

_random = np.random.default_rng(11)
LOGITS = [(_random.normal(size=(VOCAB,) * depth) * 1.3).astype(np.float32) for depth in (1, 2, 3)]
"""A model: the logits of the first token, of the second given the first, of the third given both."""

TREE = TokenTrees(np.array([8]), np.array([7, 2, 3, 5, 1, 6, 4, 7]), np.array([-1, 0, 0, 1, 0, 1, 4, 5]))
"""The root's children are 2, 3 and 1; those of 2 are 5 and 6, and 1 has 4; 7 follows 2 and 6. Every filter drops 3."""

PARAMS = ("temperatures", "top_ps", "top_ks", "min_ps")
"""The fields of a SamplingBatch that say how to sample."""

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Many:
    """The same tree, many times, with a seed each; `logits` float32 [nodes of one, vocab]."""

    trees: TokenTrees
    logits: torch.Tensor
    sampling: SamplingBatch

    def thresholds(self, single: float, acc: float) -> Accepted:
        nodes = torch.arange(len(TREE.tokens))
        fields = {name: getattr(self.sampling, name)[nodes] for name in PARAMS}
        probs = probabilities(self.logits, replace(self.sampling, **fields)).repeat(DRAWS, 1)
        coins = toss(self.trees, self.sampling.seeds, self.sampling.steps)
        return accept_by_thresholds(self.trees, probs, *coins, single, acc)


def model(path: tuple[int, ...]) -> NDArray[np.float32]:
    """Return float32 [vocab], the logits after these tokens; what comes after three does not matter."""
    return LOGITS[len(path)][path] if len(path) < 3 else LOGITS[0]


def sampling(row: Row, seeds: torch.Tensor, steps: torch.Tensor) -> SamplingBatch:
    """Return parameters of many rows which differ in seed and step alone."""
    one = make_sampling([row], VOCAB)
    wide = {name: getattr(one, name).expand(len(seeds)) for name in PARAMS}
    return replace(one, **wide, seeds=seeds, steps=steps)


def many(row: Row) -> Many:
    assert exact_probabilities(LOGITS[0], row)[3] == 0
    count = len(TREE.tokens)
    logits = [model(tuple(TREE.tokens[tree.path(TREE, node)[1:]].tolist())) for node in range(count)]
    trees = TokenTrees(np.full(DRAWS, count), np.tile(TREE.tokens, DRAWS), np.tile(TREE.parents, DRAWS))
    steps = torch.from_numpy(tree.depths(TREE) + STEP).repeat(DRAWS)
    seeds = torch.arange(DRAWS).repeat_interleave(count)
    return Many(trees, torch.from_numpy(np.stack(logits)), sampling(row, seeds, steps))


def draw(logits: NDArray[np.float32] | torch.Tensor, batch: SamplingBatch) -> Tokens:
    sampler = TorchSampler(None, SamplerContext(VOCAB, torch.device("cpu")))
    tokens: Tokens = sampler.sample(torch.as_tensor(logits), batch).numpy()
    return tokens


def gained(accepted: Accepted) -> Tokens:
    """Return int64 [requests, 3], the first three tokens, -1 where there are fewer."""
    found = np.full((len(accepted.counts), 4), -1)
    found[np.repeat(np.arange(len(found)), accepted.counts), tree.places(accepted.counts)] = accepted.tokens
    return found[:, :3]


def check(tokens: Tokens, row: Row) -> None:
    """Test each token given those before it: the first of all draws, the others of those that come so far."""
    assert (tokens[:, 0] >= 0).all(), "each request gains one"
    for depth in range(3):
        here = tokens[tokens[:, depth] >= 0]
        shape = (VOCAB,) * (depth + 1)
        numbers = np.ravel_multi_index(tuple(here[:, : depth + 1].T), shape)
        counts = np.bincount(numbers, minlength=VOCAB ** (depth + 1)).reshape(shape)
        tests = [
            (path, chi_square(counts[path], exact_probabilities(model(path), row)), counts[path])
            for path in np.ndindex(shape[:-1])
            if counts[path].sum() >= 50
        ]
        assert tests, f"nothing to test at depth {depth}"
        for path, p, found in tests:
            assert p > P_VALUE / len(tests), f"after {path}: p = {p:.2g}, drew {found}"


def check_share(found: NDArray[np.bool_], expected: float) -> None:
    """Test how many drafts stand, to 5 standard errors."""
    error = 5 * np.sqrt(expected * (1 - expected) / len(found))
    assert abs(found.mean() - expected) < error, f"{found.mean():.4f} of the drafts stand, expected {expected:.4f}"


def share_of_tree(row: Row) -> float:
    """Return how likely the first token is one of the root's children."""
    return float(exact_probabilities(LOGITS[0], row)[TREE.tokens[TREE.parents == 0]].sum())


@pytest.mark.parametrize("row", FEWER)
def test_draw_and_match(row: Row) -> None:
    """Not only is the distribution the same: every token is the one that the seed gives without drafts."""
    given = many(row)
    accepted = tree.walk(given.trees, draw(given.logits.repeat(DRAWS, 1), given.sampling))
    found = gained(accepted)
    seeds, plain = torch.arange(DRAWS), np.empty((DRAWS, 3), np.int64)
    for depth in range(3):
        steps = torch.full((DRAWS,), STEP + depth)
        logits = LOGITS[depth][tuple(plain[:, :depth].T)]
        plain[:, depth] = draw(np.broadcast_to(logits, (DRAWS, VOCAB)).copy(), sampling(row, seeds, steps))
    assert (found == plain)[found >= 0].all()
    check(found, row)
    check_share(accepted.counts > 1, share_of_tree(row))


@pytest.mark.parametrize("row", FEWER)
def test_thresholds_at_1(row: Row) -> None:
    accepted = many(row).thresholds(1.0, 1.0)
    check(gained(accepted), row)
    check_share(accepted.counts > 1, share_of_tree(row))


def test_thresholds_below_1_change_the_distribution() -> None:
    """This is what they are for; and it shows that these tests see it."""
    for single, acc in ((1.0, 0.9), (0.3, 1.0)):
        accepted = many(CASES["top_p"]).thresholds(single, acc)
        with pytest.raises(AssertionError, match="p = "):
            check(gained(accepted), CASES["top_p"])
