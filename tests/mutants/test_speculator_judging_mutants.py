"""Speculators that judge badly, and the tests of the suite that notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.trees import Accepted
from pegboard.plugins.spec_ngram.speculator import NgramSpeculator
from pegboard.plugins.speculation.suite import SpeculatorContract
from pegboard.toolkit.sampling import tree
from pegboard.toolkit.speculation.judging import accept_by_thresholds, probabilities, toss


def decide(trees, probs, coins, acc=1.0):
    each, final = coins
    return accept_by_thresholds(trees, probs, each, final, single=1.0, acc=acc)


class JudgesUnasked(NgramSpeculator):
    """Without a word about it."""

    def accept(self, trees, logits, sampling, rows):
        return tree.walk(trees, logits.argmax(-1).numpy())


class GainsNothing(NgramSpeculator):
    """Where no draft stands, no token either."""

    def accept(self, trees, logits, sampling, rows):
        found = super().accept(trees, logits, sampling, rows)
        return Accepted(found.counts - 1, found.nodes[:0], found.tokens[:0])


class TakesABranchTwice(NgramSpeculator):
    """Goes on from the root, wherever it is."""

    def accept(self, trees, logits, sampling, rows):
        found = super().accept(trees, logits, sampling, rows)
        long = np.flatnonzero(found.counts > 2)
        found.nodes[tree.starts(found.counts)[long] + 1] += 1
        return found


class SaysAnything(NgramSpeculator):
    """The last token is a child's, however likely."""

    def accept(self, trees, logits, sampling, rows):
        found = super().accept(trees, logits, sampling, rows)
        found.tokens[np.cumsum(found.counts) - 1] = trees.tokens[found.nodes[np.cumsum(found.counts) - 1] - 1]
        return found


class ScalesInPlace(NgramSpeculator):
    def accept(self, trees, logits, sampling, rows):
        logits.mul_(0.5)
        return super().accept(trees, logits, sampling, rows)


class RarelyDares(NgramSpeculator):
    """No draft ever stands."""

    def accept(self, trees, logits, sampling, rows):
        alone = tree.first_nodes(trees, np.ones_like(trees.counts))
        roots = torch.from_numpy(tree.starts(trees.counts))
        probs = probabilities(logits, sampling)[roots]
        found = decide(alone, probs, toss(alone, sampling.seeds[roots], sampling.steps[roots]))
        return replace(found, nodes=roots.numpy())


class IsNeverGreedy(NgramSpeculator):
    def accept(self, trees, logits, sampling, rows):
        warm = replace(sampling, temperatures=sampling.temperatures.clamp(min=0.3))
        return super().accept(trees, logits, warm, rows)


class TakesTheLastMaximum(NgramSpeculator):
    def accept(self, trees, logits, sampling, rows):
        probs = probabilities(logits, sampling)
        greedy = sampling.temperatures == 0.0
        last = logits.shape[1] - 1 - logits.flip(-1).argmax(-1)
        probs[greedy] = torch.nn.functional.one_hot(last, logits.shape[1]).float()[greedy]
        return decide(trees, probs, toss(trees, sampling.seeds, sampling.steps))


class TossesByPlace(NgramSpeculator):
    """Coins are numbered through the batch."""

    def accept(self, trees, logits, sampling, rows):
        return super().accept(trees, logits, replace(sampling, seeds=torch.arange(len(logits))), rows)


class TossesAnew(NgramSpeculator):
    """Coins of its own, call by call."""

    def accept(self, trees, logits, sampling, rows):
        coins = torch.rand(len(logits)), torch.rand(len(trees))
        return decide(trees, probabilities(logits, sampling), coins)


class LikesItsDrafts(NgramSpeculator):
    """Lossy, without a word about it."""

    def accept(self, trees, logits, sampling, rows):
        return decide(trees, probabilities(logits, sampling), toss(trees, sampling.seeds, sampling.steps), acc=0.7)


class ForgetsTheFilters(NgramSpeculator):
    def accept(self, trees, logits, sampling, rows):
        plain = replace(sampling, need_top_k=False, need_top_p=False, min_ps=torch.zeros_like(sampling.min_ps))
        return super().accept(trees, logits, plain, rows)


class TossesOneCoinTwice(NgramSpeculator):
    """What rejects a draft draws the token in its place, too."""

    def accept(self, trees, logits, sampling, rows):
        coins, _ = toss(trees, sampling.seeds, sampling.steps)
        last = torch.from_numpy(tree.starts(trees.counts))
        return decide(trees, probabilities(logits, sampling), (coins, coins[last]))


THRESHOLDS = {"accept": "thresholds"}
WELL_FORMED, GREEDY = "test_judgements_are_well_formed", "test_greedy_requests_get_the_maxima"
APART, FOLLOWS = "test_other_requests_do_not_matter_to_judgements", "test_judged_tokens_follow_the_model"
MUTANTS = [
    Mutant(JudgesUnasked, SpeculatorContract, "test_it_does_not_judge", provides=frozenset()),
    *(
        Mutant(cls, SpeculatorContract, test, options=THRESHOLDS, says=says)
        for cls, test, says in [
            (GainsNothing, WELL_FORMED, "each gains 1 at least"),
            (TakesABranchTwice, WELL_FORMED, "not a path"),
            (SaysAnything, WELL_FORMED, "the logits rule out"),
            (ScalesInPlace, WELL_FORMED, "changes the logits"),
            (RarelyDares, WELL_FORMED, "no draft ever stands"),
            (IsNeverGreedy, GREEDY, "another token than the first maximum"),
            (TakesTheLastMaximum, GREEDY, "another token than the first maximum"),
            (TossesByPlace, APART, "not from places"),
            (TossesAnew, APART, "asked again"),
            (LikesItsDrafts, FOLLOWS, "not distributed as the model says"),
            (ForgetsTheFilters, FOLLOWS, "not distributed as the model says"),
            (TossesOneCoinTwice, FOLLOWS, "not distributed as the model says"),
        ]
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
