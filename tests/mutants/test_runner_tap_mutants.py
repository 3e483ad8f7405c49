"""Broken model runners with taps and ends, each caught by the test that is meant for it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import pytest
import torch

from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.model_runner.taps import RunnerTapTests
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput, Taps
from pegboard.core.interfaces.model_runner import ModelEnds, ModelRunnerContext
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.model_dense.network import DecoderLayer, DenseNetwork
from pegboard.plugins.runner_layered.runner import LayeredRunner

States = Mapping[int, torch.Tensor]


class All(Taps):
    """Takes the states of every place."""

    def __init__(self, layers: int) -> None:
        super().__init__(tuple(range(layers + 2)))
        self.states: dict[int, torch.Tensor] = {}

    def note(self, place: int, states: torch.Tensor) -> None:
        self.states[place] = states


class Showing(LayeredRunner):
    """Not broken: `show` passes on what the network has shown, and may spoil it."""

    def __init__(self, options: Any, ctx: ModelRunnerContext) -> None:
        super().__init__(options, ctx)
        self.layers = len(ctx.spec.layers)

    @property
    def network(self) -> DenseNetwork:
        assert isinstance(self.ctx.network, DenseNetwork)
        return self.ctx.network

    def show(self, batch: ForwardBatch, states: States) -> States:
        return states

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        taps, own = batch.taps, All(self.layers)
        if taps is None:
            return super().execute(batch, sampling, **wants)
        batch.taps = own
        output = super().execute(batch, sampling, **wants)
        with torch.inference_mode():
            for place, states in self.show(batch, own.states).items():
                taps.note(place, states)
        return output


class AfterTheNorm(Showing):
    """What a layer's attention reads."""

    def show(self, batch: ForwardBatch, states: States) -> States:
        layers = [layer for layer in self.network.layers if isinstance(layer, DecoderLayer)]
        return {**states, **{place: layer.input_norm(states[place]) for place, layer in enumerate(layers)}}


class OneLayerLate(Showing):
    """What leaves a layer, not what enters it."""

    def show(self, batch: ForwardBatch, states: States) -> States:
        return {place: states[min(place + 1, self.layers + 1)] for place in states}


class WithoutTheResidual(Showing):
    """What the layer before has added, as code shows it that joins both only in the next norm."""

    def show(self, batch: ForwardBatch, states: States) -> States:
        before = {place: states[place] - states[place - 1] for place in range(1, self.layers)}
        return {**states, **before}


class OfSampledRows(Showing):
    """After the final norm, which is computed for no others."""

    def show(self, batch: ForwardBatch, states: States) -> States:
        if batch.logits_indices is None:
            return states
        shown = torch.zeros_like(states[0])
        shown[batch.logits_indices] = states[self.layers + 1][batch.logits_indices]
        return {**states, self.layers + 1: shown}


class InFloat64(Showing):
    def show(self, batch: ForwardBatch, states: States) -> States:
        return {place: one.double() for place, one in states.items()}


class InTheModelsOrder(LayeredRunner):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if batch.taps is not None:
            batch.taps.places = tuple(sorted(batch.taps.places))
        return super().execute(batch, sampling, **wants)


class Everything(LayeredRunner):
    """Whether it is wanted or not."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if batch.taps is not None:
            batch.taps.places = tuple(range(len(self.ctx.spec.layers) + 2))
        return super().execute(batch, sampling, **wants)


class NotOfDecodes(LayeredRunner):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if batch.forward_mode.is_decode:
            batch.taps = None
        return super().execute(batch, sampling, **wants)


class NotOfWhatSamplesNothing(LayeredRunner):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if sampling is None:
            batch.taps = None
        return super().execute(batch, sampling, **wants)


class TreesAreShownAsChains(LayeredRunner):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if batch.tail_lens is not None:
            lens, batch.tail_lens = batch.tail_lens, None
            super().execute(batch, sampling, **wants)
            batch.tail_lens, batch.taps = lens, None
        return super().execute(batch, sampling, **wants)


class BeforeDeepStates(Showing):
    def show(self, batch: ForwardBatch, states: States) -> States:
        if batch.overlay is None:
            return states
        deep, rows = dict(enumerate(batch.overlay.deep, 1)), batch.overlay.rows
        return {place: one.index_add(0, rows, -deep[place]) if place in deep else one for place, one in states.items()}


class ShowsTheTablesEmbeddings(Showing):
    def show(self, batch: ForwardBatch, states: States) -> States:
        return {**states, 0: self.network.embed(batch.input_ids)}


class Rounds(LayeredRunner):
    """What is shown goes on through the model a little changed."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        taps = batch.taps
        if taps is not None:
            batch.taps = Rounding(taps)
        return super().execute(batch, sampling, **wants)


class Rounding(Taps):
    def __init__(self, taps: Taps) -> None:
        super().__init__(taps.places)
        self.taps = taps

    def note(self, place: int, states: torch.Tensor) -> None:
        self.taps.note(place, states.mul_(1 + 1e-6))


class ReusesItsBuffers(Showing):
    def __init__(self, options: Any, ctx: ModelRunnerContext) -> None:
        super().__init__(options, ctx)
        self.kept = torch.zeros(self.layers + 2, 256, ctx.spec.hidden_size)

    def show(self, batch: ForwardBatch, states: States) -> States:
        with torch.inference_mode(False):
            for place, one in states.items():
                self.kept[place, : batch.num_tokens] = one
        return {place: self.kept[place, : batch.num_tokens] for place in states}


class PartsAreNotShown(LayeredRunner):
    def execute_in_parts(
        self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool
    ) -> Generator[None, None, ForwardOutput]:
        batch.taps = None
        return super().execute_in_parts(batch, sampling, **wants)


class PartsShareTaps(LayeredRunner):
    """States of the batch that runs in a pause take the place of those of the paused one."""

    paused: Taps | None = None

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        output = super().execute(batch, sampling, **wants)
        if self.paused is not None and batch.taps is not None:
            self.paused.note(0, batch.taps.joined()[:, : self.ctx.spec.hidden_size])
        return output

    def execute_in_parts(
        self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool
    ) -> Generator[None, None, ForwardOutput]:
        self.paused = batch.taps
        output = yield from super().execute_in_parts(batch, sampling, **wants)
        self.paused = None
        return output


class Refusing(LayeredRunner):
    """Not broken: a runner without either capability, which says so."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if batch.taps is not None:
            raise Unsupported("refusing", "runner.taps")
        return super().execute(batch, sampling, **wants)

    def ends(self) -> ModelEnds:
        raise Unsupported("refusing", "runner.ends")


class IgnoresInSilence(Refusing):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        batch.taps = None
        return super().execute(batch, sampling, **wants)


class Lending(LayeredRunner):
    """Not broken: it lends its own functions."""

    def ends(self) -> ModelEnds:
        return ModelEnds(self.embed, self.logits)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().ends().embed(ids)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return super().ends().logits(states)


class ScalesEmbeddings(Lending):
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids) * self.ctx.spec.hidden_size**0.5


class EmbedsEachIdOnce(Lending):
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids.unique())


class EmbedsInFloat64(Lending):
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids).double()


class NormsAgain(Lending):
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.ctx.network, DenseNetwork)
        assert self.ctx.network.norm is not None
        return super().logits(self.ctx.network.norm(states))


class LogitsInOneBuffer(Lending):
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        found = super().logits(states)
        self.kept: torch.Tensor = getattr(self, "kept", torch.zeros(256, found.shape[1]))
        with torch.inference_mode():
            return self.kept[: len(found)].copy_(found)


class RemembersLogits(Lending):
    """By where the states are."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        self.kept: dict[int, torch.Tensor] = getattr(self, "kept", {})
        if states.data_ptr() not in self.kept:
            self.kept[states.data_ptr()] = super().logits(states)
        return self.kept[states.data_ptr()][: len(states)]


class TapsTheLastOutput(Showing):
    """For the state after the final norm."""

    def show(self, batch: ForwardBatch, states: States) -> States:
        return {**states, self.layers + 1: states[self.layers]}


class EmbedsByAPass(Lending):
    """Whose keys and values go to the slots that the last batch was given."""

    last: ForwardBatch | None = None

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        self.last = batch
        return super().execute(batch, sampling, **wants)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            self.last.kv_pool.values(0)[self.last.kv_groups[0].out_cache_loc] = 0
        return super().embed(ids)


def mutant(factory: type, caught_by: str, base: type | None = None, provides: frozenset[str] | None = None) -> Mutant:
    return Mutant(factory, suite=ModelRunnerContract, caught_by=caught_by, base=base, provides=provides)


MUTANTS = [
    mutant(OneLayerLate, "test_states_of_every_place"),
    mutant(AfterTheNorm, "test_states_of_every_place"),
    mutant(WithoutTheResidual, "test_states_of_every_place"),
    mutant(OfSampledRows, "test_states_of_every_place"),
    mutant(InFloat64, "test_states_of_every_place"),
    mutant(InTheModelsOrder, "test_states_come_in_the_order_of_the_places"),
    mutant(Everything, "test_states_come_in_the_order_of_the_places"),
    mutant(NotOfDecodes, "test_states_of_chunks_and_decodes"),
    mutant(NotOfWhatSamplesNothing, "test_states_of_chunks_and_decodes"),
    mutant(TreesAreShownAsChains, "test_states_of_trees"),
    mutant(BeforeDeepStates, "test_states_under_an_overlay"),
    mutant(ShowsTheTablesEmbeddings, "test_states_under_an_overlay"),
    mutant(Rounds, "test_taps_change_nothing"),
    mutant(ReusesItsBuffers, "test_states_stay_as_they_are"),
    mutant(PartsAreNotShown, "test_states_of_parts"),
    mutant(PartsShareTaps, "test_states_of_parts"),
    mutant(IgnoresInSilence, "test_taps_are_refused", provides=frozenset()),
    mutant(ScalesEmbeddings, "test_the_embedding_is_lent"),
    mutant(EmbedsEachIdOnce, "test_the_embedding_is_lent"),
    mutant(EmbedsInFloat64, "test_the_embedding_is_lent"),
    mutant(NormsAgain, "test_the_head_is_lent"),
    mutant(LogitsInOneBuffer, "test_the_head_is_lent"),
    mutant(RemembersLogits, "test_the_head_is_lent"),
    mutant(TapsTheLastOutput, "test_logits_of_tapped_states"),
    mutant(NormsAgain, "test_logits_of_tapped_states"),
    mutant(EmbedsByAPass, "test_both_are_used_between_passes"),
    mutant(Lending, "test_ends_are_refused", base=Refusing, provides=frozenset()),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_of_taps_and_ends_has_a_mutant() -> None:
    own = {name for name in vars(RunnerTapTests) if name.startswith("test")}
    assert own == {mutant.caught_by for mutant in MUTANTS}
