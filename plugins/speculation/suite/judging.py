"""What a speculator owes that decides which drafts stand: the part of the suite about the capability `judges`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pegboard.conformance.sampler import CASES, DRAWS, P_VALUE, Row, chi_square, exact_probabilities, make_sampling
from pegboard.conformance.suite import ContractSuite, capability, lacks
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.core.interfaces.trees import Accepted, TokenTrees
from pegboard.plugins.speculation.api import Speculator
from pegboard.plugins.speculation.suite.model import toy_context
from pegboard.toolkit.sampling import tree

WORDS = 23
"""Tokens of the model whose drafts are judged: few, so that random drafts stand at times."""
NODES = 6
"""Most nodes of a tree."""

PARAMS: tuple[Row, ...] = ({"temperature": 0.0}, *CASES.values(), {"temperature": 2.0, "top_k": 1})
"""Greedy rows, and what the suite of samplers draws from."""


@dataclass(frozen=True)
class Trial:
    """A request at its verification: its tree, logits float32 [nodes, WORDS], parameters, and its row."""

    trees: TokenTrees
    logits: torch.Tensor
    params: Row
    row: int

    def sampling(self) -> list[Row]:
        """Return what is sampled at each node."""
        step = self.params.get("step", 0)
        return [{**self.params, "step": step + depth} for depth in tree.depths(self.trees).tolist()]


def trials(seed: int, count: int, branches: bool, params: Sequence[Row] = PARAMS) -> list[Trial]:
    """Return requests with likely drafts, some of them forbidden, and logits with ties."""
    rng = np.random.default_rng(seed)
    found = []
    for index in range(count):
        size = int(rng.integers(1, NODES + 1))
        logits = (rng.normal(size=(size, WORDS)) * 2).round(1).astype(np.float32)
        hidden = rng.random((size, WORDS)) < rng.choice([0.0, 0.6, 0.9])
        hidden[np.arange(size), rng.integers(0, WORDS, size)] = False
        tokens, parents = [int(rng.integers(WORDS))], [-1]
        while len(tokens) < size:
            parent = int(rng.integers(len(tokens))) if branches else len(tokens) - 1
            token = int(rng.choice(logits[parent].argsort()[-4:]))
            if (parent, token) not in zip(parents, tokens, strict=True):
                parents.append(parent)
                tokens.append(token)
        trees = TokenTrees(np.array([size]), np.array(tokens), np.array(parents))
        masked = torch.from_numpy(np.where(hidden, -np.inf, logits).astype(np.float32))
        own = {**params[index % len(params)], "seed": int(rng.integers(2**40)), "step": int(rng.integers(50))}
        found.append(Trial(trees, masked, own, index + 1))
    return found


class JudgingTests(ContractSuite):
    """The author's class says whether tokens follow the model's probabilities, and how the speculator is asked."""

    lossless: ClassVar[bool] = True
    """Whether what is gained is distributed as without drafts. False: it may favour them."""

    def accept(
        self,
        speculator: Speculator,
        trees: TokenTrees,
        logits: torch.Tensor,
        sampling: SamplingBatch,
        rows: NDArray[np.int64],
    ) -> Accepted:
        """Ask which drafts stand. Override this where that needs what `draft` keeps, to bring that about first."""
        return speculator.accept(trees, logits, sampling, rows)

    def judge(self, speculator: Speculator, asked: Sequence[Trial]) -> list[tuple[list[int], list[int]]]:
        """Have all these requests judged at once. Return each one's nodes in its own tree, and tokens."""
        trees = tree.join(one.trees for one in asked)
        logits = torch.cat([one.logits for one in asked])
        sampling = make_sampling([row for one in asked for row in one.sampling()], WORDS)
        rows = np.array([one.row for one in asked], np.int64)
        kept, before = tree.join([trees]), logits.clone()
        with torch.inference_mode():
            found = self.accept(speculator, trees, logits, sampling, rows)
        assert torch.equal(logits, before), "it changes the logits, which logprobs are still to be taken from"
        same = (np.array_equal(getattr(trees, name), getattr(kept, name)) for name in ("counts", "tokens", "parents"))
        assert all(same), "it changes the trees"
        assert isinstance(found, Accepted), f"accept returns {type(found).__name__}"
        fault = tree.accepted_fault(trees, found, WORDS)
        assert fault is None, f"the answer is ill-formed: {fault}"
        ruled_out = logits[torch.from_numpy(found.nodes), torch.from_numpy(found.tokens)] == -torch.inf
        assert not bool(ruled_out.any()), "a token is gained that the logits rule out"
        ends, starts = np.cumsum(found.counts), tree.starts(trees.counts)
        parts = [slice(end - count, end) for end, count in zip(ends, found.counts, strict=True)]
        return [
            ((found.nodes[part] - start).tolist(), found.tokens[part].tolist())
            for part, start in zip(parts, starts, strict=True)
        ]

    def judging(self) -> Speculator:
        """Return a new speculator for the model of these tests."""
        made: Speculator = self.build(toy_context(NODES, 2 * DRAWS, WORDS))
        return made

    def trials(self, seed: int, count: int, params: Sequence[Row] = PARAMS) -> list[Trial]:
        return trials(seed, count, "branches" in self.capabilities, params)

    @lacks("judges")
    def test_it_does_not_judge(self) -> None:
        (one,) = self.trials(0, 1)
        with pytest.raises(Unsupported):
            self.judge(self.judging(), [one])

    @capability("judges")
    def test_judgements_are_well_formed(self) -> None:
        """Also where most tokens are ruled out, drafted ones among them. Some drafts stand."""
        speculator, gained = self.judging(), 0
        for seed in range(8):
            asked = self.trials(seed, 4 * len(PARAMS))
            gained += sum(len(tokens) - 1 for _, tokens in self.judge(speculator, asked))
        assert gained, "no draft ever stands"

    @capability("judges")
    def test_greedy_requests_get_the_maxima(self) -> None:
        """Beside requests that are sampled. With top_k 1 any of those that are equally likely will do."""
        speculator, kinds = self.judging(), (PARAMS[0], PARAMS[1], PARAMS[-1])
        for seed in range(4):
            asked = self.trials(seed, 30, kinds)  # so many that some have two maxima
            for one, (nodes, tokens) in zip(asked, self.judge(speculator, asked), strict=True):
                if one.params["temperature"] == 0.0:
                    expected = tree.walk(one.trees, one.logits.numpy().argmax(-1))
                    assert (nodes, tokens) == (expected.nodes.tolist(), expected.tokens.tolist()), _NOT_GREEDY
                elif one.params.get("top_k") == 1:
                    assert (one.logits[nodes, tokens] == one.logits.amax(-1)[nodes]).all(), _NOT_GREEDY

    @capability("judges")
    def test_other_requests_do_not_matter_to_judgements(self) -> None:
        """Alone, in another order and asked again a request is judged as among all: batches that fail run in parts."""
        speculator = self.judging()
        for seed in range(3):
            asked = self.trials(seed, 2 * len(PARAMS))
            together = self.judge(speculator, asked)
            assert self.judge(speculator, asked) == together, _AGAIN
            assert self.judge(speculator, asked[::-1]) == together[::-1], _MIXED_UP
            for one, expected in zip(asked, together, strict=True):
                assert self.judge(speculator, [one]) == [expected], _MIXED_UP

    @capability("judges")
    @pytest.mark.parametrize("case", CASES)
    def test_judged_tokens_follow_the_model(self, case: str) -> None:
        """A request with a likely draft and one after it, with many seeds: the first token, and the second one given
        that the first draft stood. Without filters there are thousands; what a filter drops must never come.
        """
        if not self.lossless:
            pytest.skip("it does not promise that (lossless is False)")
        params, rng = CASES[case], np.random.default_rng(17)
        draws = DRAWS // 2 if set(params) == {"temperature"} else DRAWS // 8
        logits = torch.from_numpy((rng.normal(size=(3, WORDS)) * 1.5).astype(np.float32))
        likely = logits.argsort(-1)
        first, second = int(likely[0, -1]), int(likely[1, -2])
        trees = tree.chains([(0, (first, second))])
        asked = [Trial(trees, logits, {**params, "seed": seed, "step": 5}, seed + 1) for seed in range(draws)]
        found = [tokens for _, tokens in self.judge(self.judging(), asked)]
        for depth, said in enumerate(([one[0] for one in found], [one[1] for one in found if len(one) > 1])):
            counts = np.bincount(said, minlength=WORDS)
            p = chi_square(counts, exact_probabilities(logits[depth].numpy(), params))
            assert p > P_VALUE, f"p = {p:.2g} for the tokens at depth {depth}: {_SKEWED}"
        assert any(len(one) > 1 for one in found), "a likely draft never stands"


_NOT_GREEDY = "a greedy request gets another token than the first maximum"
_MIXED_UP = "a judgement depends on the batch: take coins from seeds and steps, not from places"
_AGAIN = "asked again, it decides something else: take coins from seeds and steps"
_SKEWED = (
    "they are not distributed as the model says. Filters are those of `Sampler`, a draft stands with its own "
    "probability, and what is drawn after a rejection leaves out what was tried; or set lossless = False"
)
