"""Broken model runners, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.model_runner.fakes import WatchedNetwork
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, ForwardOutput
from pegboard.core.interfaces.model_runner import ModelRunnerContext
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.runner_layered.runner import LayeredRunner
from pegboard.toolkit.sampling.token_mask import apply_token_mask


class SamplesTheFirstToken(LayeredRunner):
    """The logits of a request's first token instead of its last."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if batch.logits_indices is not None and batch.extend_start_loc is not None and len(batch.logits_indices):
            batch = replace(batch, logits_indices=batch.extend_start_loc[: len(batch.logits_indices)])
        return super().execute(batch, sampling, **wants)


class SortsTheRows(LayeredRunner):
    """Results in the order of the request rows, not of the batch."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        output = super().execute(batch, sampling, **wants)
        order = batch.req_pool_indices.argsort()
        if len(order) == len(output.next_token_ids):
            output.next_token_ids = output.next_token_ids[order]
            output.logits = None if output.logits is None else output.logits[order]
        return output


class SkipsChunksThatSampleNothing(LayeredRunner):
    """No token, no forward pass: the KV is missing."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if sampling is None:
            return self._empty(False, False)
        return super().execute(batch, sampling, **wants)


class PreparesAttentionOnce(LayeredRunner):
    """Keeps the metadata of the first decode step, as a graph that was captured for it would."""

    def __init__(self, options: Any, ctx: ModelRunnerContext) -> None:
        super().__init__(options, ctx)
        prepare, kept = ctx.attention.prepare, []  # type: ignore[var-annotated]

        def once(batch: ForwardBatch) -> None:
            if batch.forward_mode is ForwardMode.DECODE and kept:
                batch.attn_metadata = kept[0]
                return
            prepare(batch)
            if batch.forward_mode is ForwardMode.DECODE:
                kept.append(batch.attn_metadata)

        ctx.attention.prepare = once  # type: ignore[method-assign]


class WritesKVOnlyOfSampledTokens(LayeredRunner):
    """Puts NaN back where nobody was sampled."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        output = super().execute(batch, sampling, **wants)
        if batch.logits_indices is not None:
            kept = torch.ones(batch.num_tokens, dtype=torch.bool)
            kept[batch.logits_indices] = False
            for layer in self.ctx.spec.layers:
                batch.kv_pool.keys(layer.layer_id)[batch.kv_groups[0].out_cache_loc[kept]] = torch.nan
        return output


class ComputesEveryLogit(LayeredRunner):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        output = super().execute(batch, sampling, **wants)
        self._network.logits(torch.zeros(batch.num_tokens, self.ctx.spec.hidden_size))
        return output


class SamplesWhereNothingIsWanted(LayeredRunner):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if sampling is None:
            wants = {**wants, "return_logits": True}
        return super().execute(batch, sampling, **wants)


class RunsIdleBatches(LayeredRunner):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if batch.forward_mode is ForwardMode.IDLE:
            return ForwardOutput(next_token_ids=torch.zeros(1, dtype=torch.int64))
        return super().execute(batch, sampling, **wants)


class ReversesProcessors(LayeredRunner):
    def __init__(self, options: Any, ctx: ModelRunnerContext) -> None:
        super().__init__(options, replace(ctx, processors=ctx.processors[::-1]))


class PreparesForNobody(LayeredRunner):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if sampling is not None and not sampling.rows:
            for processor in self.ctx.processors:
                processor.prepare(())
        return super().execute(batch, sampling, **wants)


class ForgetsProcessors(LayeredRunner):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if sampling is not None:
            sampling = replace(sampling, rows=())
        return super().execute(batch, sampling, **wants)


class GivesRawLogits(LayeredRunner):
    """Logits and logprobs from before the processors."""

    def _sample(
        self, hidden: torch.Tensor, sampling: SamplingBatch, output: ForwardOutput, return_logits: bool
    ) -> None:
        super()._sample(hidden, sampling, output, return_logits)
        raw = self._network.logits(hidden)
        if return_logits:
            output.logits = raw
        if sampling.want_logprobs:
            output.logprobs = self.ctx.sampler.logprobs(raw, output.next_token_ids, sampling)


class LetsTheSamplerSpoilLogits(LayeredRunner):
    """Keeps no copy of what the sampler may overwrite."""

    def _sample(
        self, hidden: torch.Tensor, sampling: SamplingBatch, output: ForwardOutput, return_logits: bool
    ) -> None:
        logits = self._network.logits(hidden)
        for processor in self.ctx.processors if sampling.rows else ():
            state = processor.prepare(sampling.rows)
            if state is not None:
                processor.apply(logits, state)
        output.next_token_ids = self.ctx.sampler.sample(logits, sampling)
        output.logits = logits
        output.logprobs = self.ctx.sampler.logprobs(logits, output.next_token_ids, sampling)


class AlwaysGreedy(LayeredRunner):
    """Never asks the sampler."""

    def _sample(
        self, hidden: torch.Tensor, sampling: SamplingBatch, output: ForwardOutput, return_logits: bool
    ) -> None:
        super()._sample(hidden, sampling, output, True)
        assert output.logits is not None
        output.next_token_ids = output.logits.argmax(-1)


class AlwaysReportsLogprobs(LayeredRunner):
    def _sample(
        self, hidden: torch.Tensor, sampling: SamplingBatch, output: ForwardOutput, return_logits: bool
    ) -> None:
        super()._sample(hidden, sampling, output, True)
        assert output.logits is not None
        output.logprobs = self.ctx.sampler.logprobs(output.logits, output.next_token_ids, sampling)


class HiddenStatesOfTheFirstRows(LayeredRunner):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        output = super().execute(batch, sampling, **wants)
        if output.hidden_states is not None:
            output.hidden_states = output.hidden_states.flip(0)
        return output


class MixesUpPausedBatches(LayeredRunner):
    """Metadata in a place that batches share: what runs in a pause spoils what is paused."""

    paused: ForwardBatch | None = None

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        output = super().execute(batch, sampling, **wants)
        if self.paused is not None:
            self.paused.attn_metadata = batch.attn_metadata
            self.paused.kv_groups = batch.kv_groups
        return output

    def execute_in_parts(
        self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool
    ) -> Generator[None, None, ForwardOutput]:
        self.paused = batch
        output = yield from super().execute_in_parts(batch, sampling, **wants)
        self.paused = None
        return output


class PartsHaveNoLogits(LayeredRunner):
    def execute_in_parts(
        self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool
    ) -> Generator[None, None, ForwardOutput]:
        return super().execute_in_parts(batch, sampling)


class NeverPauses(LayeredRunner):
    def execute_in_parts(
        self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool
    ) -> Generator[None, None, ForwardOutput]:
        yield from ()
        return self.execute(batch, sampling, **wants)


class StartsWithoutANetwork(LayeredRunner):
    """And fails at the first request."""

    def __init__(self, options: Any, ctx: ModelRunnerContext) -> None:
        if ctx.network is not None:
            super().__init__(options, ctx)


class GivesSampledRowsStates(LayeredRunner):
    """Hidden states of the sampled rows, whichever were asked for."""

    def _output(self, hidden: torch.Tensor, batch: ForwardBatch, *rest: Any) -> ForwardOutput:
        if batch.hidden_rows is not None:
            batch = replace(batch, hidden_rows=batch.logits_indices)
        return super()._output(hidden, batch, *rest)


class LogprobsOfTheTokensThemselves(LayeredRunner):
    """One position too late: a token's own logits instead of those before it."""

    def _output(self, hidden: torch.Tensor, batch: ForwardBatch, *rest: Any) -> ForwardOutput:
        if batch.logprob_rows is not None:
            batch = replace(batch, logprob_rows=(batch.logprob_rows + 1).clamp(max=len(hidden) - 1))
        return super()._output(hidden, batch, *rest)


class LogprobsOnlyWithSampling(LayeredRunner):
    """A chunk in the middle of a prompt samples nothing, and its logprobs are wanted all the same."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if sampling is None:
            batch = replace(batch, logprob_rows=None)
        return super().execute(batch, sampling, **wants)


class ComputesPromptsInOneBlock(LayeredRunner):
    def _output(self, hidden: torch.Tensor, batch: ForwardBatch, *rest: Any) -> ForwardOutput:
        if batch.logprob_rows is not None:
            self.ctx.network.logits(hidden)  # type: ignore[union-attr]
        return super()._output(hidden, batch, *rest)


def mutant(factory: type, caught_by: str, provides: frozenset[str] | None = None) -> Mutant:
    return Mutant(factory, suite=ModelRunnerContract, caught_by=caught_by, provides=provides)


class IgnoresMasks(LayeredRunner):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if sampling is not None:
            sampling = replace(sampling, mask=None)
        return super().execute(batch, sampling, **wants)


class MasksTheFirstRows(LayeredRunner):
    """Whoever they belong to."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if sampling is not None and sampling.mask is not None:
            sampling = replace(sampling, mask_rows=torch.arange(len(sampling.mask)))
        return super().execute(batch, sampling, **wants)


class MasksBeforeProcessors(LayeredRunner):
    """What a processor raises afterwards is sampled."""

    def __init__(self, options: Any, ctx: ModelRunnerContext) -> None:
        super().__init__(options, ctx)
        logits = self._network.logits
        self._sampling: SamplingBatch | None = None

        def masked(hidden: torch.Tensor) -> torch.Tensor:
            found = logits(hidden)
            if self._sampling is not None and self._sampling.mask is not None:
                apply_token_mask(found, self._sampling)
                self._sampling.mask = None
            return found

        self._network = WatchedNetwork(self._network)
        self._network.logits = masked  # type: ignore[method-assign]

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        self._sampling = sampling
        return super().execute(batch, sampling, **wants)


class CountsItsTimesTwice(LayeredRunner):
    """Tells the same seconds again."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        self._seconds = 1e-9
        return super().execute(batch, sampling, **wants)

    def stage_times(self) -> dict[str, float]:
        return {"everything": getattr(self, "_seconds", 0.0)}


MUTANTS = [
    mutant(CountsItsTimesTwice, "test_stage_times"),
    mutant(IgnoresMasks, "test_only_what_the_mask_allows"),
    mutant(MasksTheFirstRows, "test_only_what_the_mask_allows"),
    mutant(MasksBeforeProcessors, "test_only_what_the_mask_allows"),
    mutant(SamplesTheFirstToken, "test_prefill"),
    mutant(SortsTheRows, "test_ragged_prefill"),
    mutant(SkipsChunksThatSampleNothing, "test_prefill_in_chunks"),
    mutant(PreparesAttentionOnce, "test_decode"),
    mutant(WritesKVOnlyOfSampledTokens, "test_kv_of_all_tokens_is_in_the_pool"),
    mutant(WritesKVOnlyOfSampledTokens, "test_mixed_batch"),
    mutant(ComputesEveryLogit, "test_only_sampled_rows_get_logits"),
    mutant(SamplesWhereNothingIsWanted, "test_nothing_sampled_computes_no_logits"),
    mutant(RunsIdleBatches, "test_idle_batch"),
    mutant(ReversesProcessors, "test_processors_run_in_order"),
    mutant(PreparesForNobody, "test_processors_with_nothing_to_do"),
    mutant(ForgetsProcessors, "test_processors_are_given_the_rows"),
    mutant(GivesRawLogits, "test_logprobs"),
    mutant(LetsTheSamplerSpoilLogits, "test_tokens_are_the_samplers"),
    mutant(AlwaysGreedy, "test_tokens_are_the_samplers"),
    mutant(AlwaysReportsLogprobs, "test_logprobs_only_where_asked"),
    mutant(HiddenStatesOfTheFirstRows, "test_hidden_states"),
    mutant(StartsWithoutANetwork, "test_it_says_that_it_needs_a_network"),
    mutant(GivesSampledRowsStates, "test_hidden_states_of_any_rows"),
    mutant(LogprobsOfTheTokensThemselves, "test_prompt_logprobs"),
    mutant(LogprobsOnlyWithSampling, "test_prompt_logprobs"),
    mutant(ComputesPromptsInOneBlock, "test_not_all_logits_of_prompts_exist_at_once"),
    mutant(MixesUpPausedBatches, "test_other_batches_run_in_the_pauses"),
    mutant(PartsHaveNoLogits, "test_other_batches_run_in_the_pauses"),
    mutant(NeverPauses, "test_there_is_a_pause_after_every_layer"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


class RefusesHiddenStates(LayeredRunner):
    """Not broken: a runner without the capability, which says so."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        from pegboard.core.interfaces.errors import Unsupported

        if wants.pop("return_hidden_states", False) or batch.hidden_rows is not None:
            raise Unsupported("refuses", "runner.hidden_states")
        if batch.logprob_rows is not None:
            raise Unsupported("refuses", "runner.input_logprobs")
        return super().execute(batch, sampling, **wants)


class IgnoresTheWish(RefusesHiddenStates):
    """Returns none instead of raising."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        wants.pop("return_hidden_states", None)
        batch.hidden_rows = batch.logprob_rows = None
        return super().execute(batch, sampling, **wants)


@pytest.mark.parametrize(
    "test",
    ["test_hidden_states_are_refused", "test_hidden_states_of_rows_are_refused", "test_prompt_logprobs_are_refused"],
)
def test_a_silent_lack_is_caught(test: str) -> None:
    assert_caught(mutant(IgnoresTheWish, test, provides=frozenset()))
