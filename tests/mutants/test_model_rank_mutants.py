"""Broken model families on several ranks or in sections, and runners, each caught by the test that is meant for it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.rig import ranks
from pegboard.plugins.cpu_native.runner import CpuNativeRunner
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.network import DecoderLayer, DenseNetwork
from pegboard.plugins.runner_layered.runner import LayeredRunner
from pegboard.toolkit.model.ranks import PENDING, SERVICE, Cut, Ranks, ranks_of
from pegboard.toolkit.model.sections import Sections


class OneLlama(ModelFamilyContract):
    """The suite on one architecture, for speed."""

    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("llama",)


class NativeSuite(ModelRunnerContract):
    """The suite in the only type that the native runner computes in."""

    contract = "runner"
    dtype = "bfloat16"
    tolerance = 0.15


class AddsNothingUp(DenseFamily):
    def load(self):
        network = super().load()
        assert isinstance(network, DenseNetwork)
        for layer in network.layers:
            assert isinstance(layer, DecoderLayer)
            layer.o.share = None
        return network


class LooksUpOthersRows(DenseFamily):
    def load(self):
        network = super().load()
        assert isinstance(network, DenseNetwork)
        assert network.embedding is not None
        network.embedding.cut = Cut(0, network.embedding.cut.length, 0)
        return network


class KnowsItsOwnIds(DenseFamily):
    def load(self):
        network = super().load()
        assert isinstance(network, DenseNetwork)
        network.ranks = Ranks()
        return network


class RefusesNothing(DenseFamily):
    @classmethod
    def supports(cls, options, ctx):
        return None


class SkipsLogitsThatNobodyDraws(LayeredRunner):
    def _output(self, hidden, batch, sampling, return_logits, return_hidden_states):
        return super()._output(hidden, batch, sampling, return_logits and sampling is not None, return_hidden_states)


class AsksForAllRowsWhereNobodyDraws(LayeredRunner):
    def execute(self, batch, sampling, **wants):
        if sampling is None:
            batch.logits_indices = None
        return super().execute(batch, sampling, **wants)


class TakesIdsAsTheyCome(LayeredRunner):
    def execute(self, batch, sampling, **wants):
        batch.extras.pop(PENDING, None)
        return super().execute(batch, sampling, **wants)


class HasItsOwnLogits(LayeredRunner):
    """Rank 0 has those of half of the vocabulary."""

    def execute(self, batch, sampling, **wants):
        output = super().execute(batch, sampling, **wants)
        if output.logits is not None and ranks_of(self.ctx.model).size > 1:
            output.logits[:, output.logits.shape[1] // 2 :] = -30
        return output


class RoundsForItself(LayeredRunner):
    def execute(self, batch, sampling, **wants):
        output = super().execute(batch, sampling, **wants)
        if output.row_states is not None:
            output.row_states *= 1 + 1e-7 * ranks_of(self.ctx.model).index
        return output


class RefusesNoSize(CpuNativeRunner):
    @classmethod
    def supports(cls, options, ctx):
        return None


class ForgetsTheFinalNorm(DenseFamily):
    """Where it is not in the first section."""

    def load(self):
        network = super().load()
        assert isinstance(network, DenseNetwork)
        if network.norm is not None and not network.sections.first:
            torch.nn.init.ones_(network.norm.weight)
        return network


class Around(Sections):
    """Sections that do something else with `own`."""

    def __init__(self, own):
        super().__init__(own.count, own.index, own.layers)
        self.own_sections = own

    def receive(self, like):
        return self.own_sections.receive(like)


class Normed(Around):
    norm: DecoderLayer

    def hand_on(self, states, batch):
        return self.own_sections.hand_on(states if self.last else self.norm.post_norm(states), batch)


class AllRows(Around):
    def hand_on(self, states, batch):
        kept = batch.logits_indices
        batch.logits_indices = kept if self.first else None
        found = self.own_sections.hand_on(states, batch)
        batch.logits_indices = kept
        return found


class HandsOnWhatIsNormed(DenseFamily):
    def load(self):
        network = super().load()
        assert isinstance(network, DenseNetwork)
        layer = network.layers[0]
        assert isinstance(layer, DecoderLayer)
        network.sections = sections = Normed(network.sections)
        sections.norm = layer
        return network


class SendsAllRowsBack(DenseFamily):
    def load(self):
        network = super().load()
        assert isinstance(network, DenseNetwork)
        network.sections = AllRows(network.sections)
        return network


class NumbersItsLayersFromZero(DenseFamily):
    @property
    def spec(self):
        spec = super().spec
        layers = tuple(replace(layer, layer_id=index) for index, layer in enumerate(spec.layers))
        return replace(spec, layers=layers)


class DividesByItself(DenseFamily):
    def __init__(self, options, ctx):
        ranks = ranks_of(ctx)
        own = Ranks(ranks.size, ranks.index, Sections(ranks.sections.count, ranks.sections.index))
        super().__init__(options, replace(ctx, services={SERVICE: own}))


class ReadsAllStates(LayeredRunner):
    def _output(self, hidden, *args):
        return super()._output(hidden + 0 * hidden.mean(), *args)


SECTIONS = {
    ForgetsTheFinalNorm: "test_sections_have_the_logits_of_one",
    HandsOnWhatIsNormed: "test_sections_have_the_logits_of_one",
    SendsAllRowsBack: "test_sections_have_the_logits_of_one",
    NumbersItsLayersFromZero: "test_each_layer_is_in_one_section",
    DividesByItself: "test_layers_are_divided_as_the_config_says",
    RefusesNothing: "test_sections_without_layers_are_refused",
}
CAUGHT = {
    AddsNothingUp: "test_ranks_have_the_logits_of_one",
    LooksUpOthersRows: "test_ranks_have_the_logits_of_one",
    KnowsItsOwnIds: "test_ids_that_only_rank_0_knows",
    RefusesNothing: "test_sizes_that_do_not_divide_are_refused",
}
ROWS = "test_the_same_rows_of_logits_with_and_without_draws"
MUTANTS = [
    *(Mutant(cls, suite=OneLlama, caught_by=test) for cls, test in (*CAUGHT.items(), *SECTIONS.items())),
    Mutant(TakesIdsAsTheyCome, ModelRunnerContract, "test_ids_that_only_rank_0_knows"),
    Mutant(HasItsOwnLogits, ModelRunnerContract, "test_ranks_have_the_logits_of_one"),
    Mutant(RoundsForItself, ModelRunnerContract, "test_ranks_hold_the_same_states"),
    Mutant(RefusesNoSize, NativeSuite, "test_sizes_that_do_not_divide_are_refused"),
    Mutant(ReadsAllStates, ModelRunnerContract, "test_reads_no_states_but_those_that_are_wanted"),
    *(
        Mutant(cls, suite=ModelRunnerContract, caught_by=ROWS)
        for cls in (SkipsLogitsThatNobodyDraws, AsksForAllRowsWhereNobodyDraws)
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant.factory is SendsAllRowsBack:
        # Another rank waits until the suite's patience ends.
        monkeypatch.setattr(ranks, "SECONDS", 4.0)
    assert_caught(mutant)
