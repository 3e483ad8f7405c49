"""Broken model families on several ranks, each caught by the test that is meant for it."""

from __future__ import annotations

from typing import ClassVar

import pytest

from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.network import DecoderLayer, DenseNetwork
from pegboard.plugins.runner_layered.runner import LayeredRunner
from pegboard.toolkit.model.ranks import Cut, Ranks


class OneLlama(ModelFamilyContract):
    """The suite on one architecture, for speed."""

    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("llama",)


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


CAUGHT = {
    AddsNothingUp: "test_ranks_have_the_logits_of_one",
    LooksUpOthersRows: "test_ranks_have_the_logits_of_one",
    KnowsItsOwnIds: "test_ids_that_only_rank_0_knows",
    RefusesNothing: "test_sizes_that_do_not_divide_are_refused",
}
ROWS = "test_the_same_rows_of_logits_with_and_without_draws"
MUTANTS = [
    *(Mutant(cls, suite=OneLlama, caught_by=test) for cls, test in CAUGHT.items()),
    *(
        Mutant(cls, suite=ModelRunnerContract, caught_by=ROWS)
        for cls in (SkipsLogitsThatNobodyDraws, AsksForAllRowsWhereNobodyDraws)
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
