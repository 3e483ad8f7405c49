"""Broken samplers, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.sampler import Row, SamplerContract, exact_probabilities
from pegboard.core.interfaces.forward import LogprobOutput
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from pegboard.toolkit.sampling.noise import bits, keys


def uniforms(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """float64 [n] in [0, 1)."""
    return bits(keys(seeds, steps), torch.zeros(1, dtype=torch.int64)).squeeze(1).to(torch.float64) * 2.0**-32 + 0.5


class TakesTheLastMaximum(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        last = logits.shape[1] - 1 - logits.flip(-1).max(dim=-1).indices
        return torch.where(batch.temperatures == 0, last, super().sample(logits, batch))


class TreatsAMixedBatchAsSampled(TorchSampler):
    """Greedy rows are drawn at a low temperature where somebody else samples."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if not batch.all_greedy:
            batch = replace(batch, temperatures=batch.temperatures.clamp(min=0.5))
        return super().sample(logits, batch)


class ForgetsTheTemperature(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return super().sample(logits, replace(batch, temperatures=(batch.temperatures > 0).float()))


class KeepsOneMore(TorchSampler):
    """top_k keeps k + 1."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        more = torch.where(batch.top_ks > 1, batch.top_ks + 1, batch.top_ks)
        return super().sample(logits, replace(batch, top_ks=more))


class TakesTopPOfEverything(TorchSampler):
    """top_p before top_k: the nucleus of the whole distribution, then the k largest of it."""

    def _draw(
        self, logits: torch.Tensor, peaks: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor
    ) -> torch.Tensor:
        p, order = (logits / batch.temperatures[:, None].clamp(min=1e-3)).softmax(-1).sort(dim=-1, descending=True)
        outside = p.cumsum(-1) - p >= batch.top_ps[:, None]
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)
        return super()._draw(
            logits, peaks, replace(batch, need_top_p=False, top_ps=torch.ones_like(batch.top_ps)), rows
        )


class DropsTheTokenThatReachesTopP(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        less = torch.where(batch.top_ps < 1, batch.top_ps * 0.75, batch.top_ps)
        return super().sample(logits, replace(batch, top_ps=less))


class ForgetsMinPBesideOthers(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        cut = (batch.top_ks < logits.shape[1]) | (batch.top_ps < 1)
        return super().sample(logits, replace(batch, min_ps=batch.min_ps.masked_fill(cut, 0.0)))


class LooksAt64Candidates(TorchSampler):
    """The nucleus never grows beyond 64 tokens."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        batch = replace(batch, top_ks=batch.top_ks.clamp(max=64), need_top_k=True)
        return super().sample(logits, batch)


class UsesOneParameterForAll(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        first = batch.min_ps[:1].expand(len(batch)).clone()
        return super().sample(logits, replace(batch, min_ps=first))


class DrawsByThePlaceInTheBatch(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return super().sample(logits, replace(batch, seeds=batch.seeds + torch.arange(len(batch))))


class IgnoresTheStep(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return super().sample(logits, replace(batch, steps=torch.zeros_like(batch.steps)))


class AddsSeedAndStep(TorchSampler):
    """Seed 3 at step 5 draws as seed 5 at step 3."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        together = batch.seeds + batch.steps
        return super().sample(logits, replace(batch, seeds=together, steps=torch.zeros_like(together)))


class CutsSeedsTo32Bits(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return super().sample(logits, replace(batch, seeds=batch.seeds & 0xFFFFFFFF))


class DrawsFromOneStream(TorchSampler):
    """A generator for all rows, as torch.multinomial has it."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        seeds = torch.randint(2**62, (len(batch),))
        return super().sample(logits, replace(batch, seeds=seeds))


class LooksUpOneNumber(TorchSampler):
    """The token at which the cumulated probabilities exceed a uniform number: the same in any batch, as long as logits
    are the same to the last bit.
    """

    def _draw(
        self, logits: torch.Tensor, peaks: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor
    ) -> torch.Tensor:
        scaled = logits[rows].to(torch.float64) / batch.temperatures[rows, None]
        p, order = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
        p[torch.arange(p.shape[1]) >= batch.top_ks[rows, None]] = 0.0
        p /= p.sum(-1, keepdim=True)
        p[p.cumsum(-1) - p >= batch.top_ps[rows, None]] = 0.0
        p[p < batch.min_ps[rows, None] * p[:, :1]] = 0.0
        cumulated = torch.zeros_like(p).scatter_(1, order, p).cumsum(-1)
        share = uniforms(batch.seeds[rows], batch.steps[rows]) * cumulated[:, -1]
        return (cumulated <= share[:, None]).sum(-1)


class RoundsUpToTheNextToken(TorchSampler):
    """Leaves the support: a token next to one of positive mass is as good."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        tokens = super().sample(logits, batch)
        slip = uniforms(batch.seeds + 1, batch.steps) < 0.05
        return torch.where(slip & (batch.temperatures > 0), (tokens + 1) % logits.shape[1], tokens)


class SamplesAnything(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return super().sample(torch.nan_to_num(logits, nan=0.0, neginf=-3e38), batch)


class CountsNothingBelowMinus3(TorchSampler):
    """Logits below -3 are as good as -3."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return super().sample(torch.where(logits.isfinite(), logits.clamp(min=-3.0), logits), batch)


class RaisesForThem(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        tokens = super().sample(logits, batch)
        if bool((tokens < 0).any()):
            raise ValueError("no finite logit")
        return tokens


class GivesThemAll(TorchSampler):
    """One such row spoils its neighbours."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        tokens = super().sample(logits, batch)
        return torch.where((tokens < 0).any(), -1, tokens)


class ScalesLogprobs(TorchSampler):
    """Logprobs of the sampling distribution instead of the model's."""

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        return super().logprobs(logits / batch.temperatures[:, None], tokens, batch)


class OverwritesLogits(TorchSampler):
    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        logits -= logits.logsumexp(-1, keepdim=True)
        return super().logprobs(logits, tokens, batch)


class ChoosesOfTheFirstRow(TorchSampler):
    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        output = super().logprobs(logits, tokens, batch)
        first = super().logprobs(logits[:1].expand_as(logits), tokens, batch)
        output.chosen = first.chosen
        return output


class SubtractsWithoutThePeak(TorchSampler):
    """Loses digits where logits are large."""

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        output = super().logprobs(logits, tokens, batch)
        output.token_logprobs = logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)
        return output


class LeavesTheVocabulary(TorchSampler):
    """Counts from one."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return super().sample(logits, batch) + 1


class AnswersAColumn(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return super().sample(logits, batch)[:, None]


class AnswersInt32(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return super().sample(logits, batch).to(torch.int32)


class AnswersAList(TorchSampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return super().sample(logits, batch).tolist()  # type: ignore[return-value]


class Sharper(TorchSampler):
    """Another distribution: proportional to the squares of the probabilities that the filters leave."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        scaled = (logits / batch.temperatures[:, None].clamp(min=1e-6)).double()
        p = torch.zeros_like(scaled)
        for place, row in enumerate(scaled):
            one = {"temperature": 1.0, "top_k": int(batch.top_ks[place]), "top_p": float(batch.top_ps[place])}
            finite = torch.isfinite(logits[place]).any()
            if finite and batch.temperatures[place] > 0:
                kept = exact_probabilities(row.numpy(), {**one, "min_p": float(batch.min_ps[place])})
                p[place] = torch.from_numpy(kept)
        sharper = torch.where(batch.temperatures[:, None] > 0, 2 * p.log().float(), logits)
        sharper[~torch.isfinite(logits).any(-1)] = -torch.inf
        ones = torch.ones_like(batch.top_ps)
        plain = replace(
            batch,
            temperatures=(batch.temperatures > 0).float(),
            top_ps=ones,
            top_ks=torch.full_like(batch.top_ks, logits.shape[1]),
            min_ps=torch.zeros_like(ones),
            need_top_k=False,
            need_top_p=False,
            need_min_p=False,
        )
        return super().sample(sharper, plain)


class SharperSuite(SamplerContract):
    def probabilities(self, logits: NDArray[np.floating[Any]], row: Row) -> NDArray[np.float64]:
        p = exact_probabilities(logits, row) ** 2
        return np.asarray(p / p.sum())


class SharperButNotGreedy(Sharper):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        warm = torch.where(batch.temperatures > 0, batch.temperatures, 3.0)
        return super().sample(logits, replace(batch, temperatures=warm, all_greedy=False))


class AsSharpAsOthers(Sharper):
    """Not the distribution that its author says."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return TorchSampler.sample(self, logits, batch)


class WithinASigma(TorchSampler):
    """Another distribution: of the tokens within a standard deviation of the largest logit. Noise moves its cut."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        values = logits.double()
        lowest = values.max(-1, keepdim=True).values - values.std(-1, correction=0, keepdim=True)
        return super().sample(logits.masked_fill(values < lowest, -torch.inf), batch)


class WithinASigmaSuite(SamplerContract):
    def probabilities(self, logits: NDArray[np.floating[Any]], row: Row) -> NDArray[np.float64]:
        within = logits >= logits.max() - logits.astype(np.float64).std()
        return exact_probabilities(np.where(within, logits, -np.inf), row)


class LooksUpOneNumberWithinASigma(WithinASigma):
    _draw = LooksUpOneNumber._draw


def sharper(factory: type, caught_by: str) -> Mutant:
    return Mutant(factory, suite=SharperSuite, caught_by=caught_by)


def mutant(factory: type, caught_by: str) -> Mutant:
    return Mutant(factory, suite=SamplerContract, caught_by=caught_by)


MUTANTS = [
    mutant(TakesTheLastMaximum, "test_greedy_takes_the_first_maximum"),
    mutant(TreatsAMixedBatchAsSampled, "test_greedy_rows_are_untouched_by_their_neighbours"),
    mutant(ForgetsTheTemperature, "test_distribution"),
    mutant(KeepsOneMore, "test_distribution"),
    mutant(TakesTopPOfEverything, "test_distribution"),
    mutant(DropsTheTokenThatReachesTopP, "test_distribution"),
    mutant(ForgetsMinPBesideOthers, "test_distribution"),
    mutant(LooksAt64Candidates, "test_distribution_over_a_large_vocabulary"),
    mutant(UsesOneParameterForAll, "test_distribution_of_a_mixed_batch"),
    mutant(DrawsByThePlaceInTheBatch, "test_a_draw_does_not_depend_on_the_batch"),
    mutant(IgnoresTheStep, "test_draws_vary"),
    mutant(IgnoresTheStep, "test_the_steps_of_one_seed_follow_the_distribution"),
    mutant(AddsSeedAndStep, "test_neighbouring_seeds_and_steps_are_independent"),
    mutant(CutsSeedsTo32Bits, "test_neighbouring_seeds_and_steps_are_independent"),
    mutant(DrawsFromOneStream, "test_a_draw_does_not_depend_on_what_was_drawn_before"),
    mutant(LooksUpOneNumber, "test_rounding_of_the_logits_seldom_changes_a_draw"),
    mutant(RoundsUpToTheNextToken, "test_forbidden_tokens_are_never_drawn"),
    mutant(CountsNothingBelowMinus3, "test_last_resorts_are_as_good_as_forbidden"),
    mutant(SamplesAnything, "test_a_row_without_a_finite_logit_gets_no_token"),
    mutant(RaisesForThem, "test_a_row_without_a_finite_logit_gets_no_token"),
    mutant(GivesThemAll, "test_a_row_without_a_finite_logit_gets_no_token"),
    mutant(ScalesLogprobs, "test_logprobs_of_the_tokens"),
    mutant(OverwritesLogits, "test_logprobs_of_the_tokens"),
    mutant(ChoosesOfTheFirstRow, "test_top_and_chosen_logprobs"),
    mutant(LeavesTheVocabulary, "test_distribution"),
    mutant(LeavesTheVocabulary, "test_uniform_logits"),
    mutant(AnswersAColumn, "test_distribution"),
    mutant(AnswersInt32, "test_distribution"),
    mutant(AnswersAList, "test_distribution"),
    Mutant(LooksUpOneNumberWithinASigma, WithinASigmaSuite, "test_rounding_of_the_logits_seldom_changes_a_draw"),
    sharper(SharperButNotGreedy, "test_greedy_ignores_the_other_parameters"),
    sharper(AsSharpAsOthers, "test_distribution"),
    mutant(SubtractsWithoutThePeak, "test_logprobs_of_huge_logits"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
