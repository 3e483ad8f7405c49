"""Broken model families and runners with additions, each caught by the test that is meant for it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.model_family.additions import AdditionTests
from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.model_runner.additions import RunnerAdditionTests
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.cpu_native.runner import CpuNativeRunner
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.network import DecoderLayer, DenseNetwork
from pegboard.plugins.runner_layered.runner import LayeredRunner
from pegboard.toolkit.model.layers import FusedLinear
from pegboard.toolkit.model.linear import SITES, NetworkSites


class OneLlama(ModelFamilyContract):
    """The suite on one architecture, for speed."""

    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("llama",)


class Spoiled(DenseFamily):
    """`spoil` changes each linear layer of a loaded network."""

    def load(self):
        network = super().load()
        assert isinstance(network, DenseNetwork)
        for layer in network.layers:
            assert isinstance(layer, DecoderLayer)
            self.spoil(layer)
        return network

    def spoil(self, layer):
        pass


class ForgetsTheOutput(Spoiled):
    def spoil(self, layer):
        layer.o.site = None


class ForgetsTheMLP(Spoiled):
    def spoil(self, layer):
        layer.mlp.gate_up.site = layer.mlp.down.site = None


class TwoOfOneNumber(Spoiled):
    def spoil(self, layer):
        layer.qkv.site = replace(layer.qkv.site, number=layer.layer.layer_id and 0)


class AddsToACopy(Spoiled):
    def spoil(self, layer):
        class Copying(FusedLinear):
            def forward(self, x, additions=None):
                out = super().forward(x)
                if additions is not None:
                    assert self.site is not None
                    additions.add(self.site.number, x, out.clone())
                return out

        layer.mlp.down.__class__ = Copying


class AddsTwice(Spoiled):
    def spoil(self, layer):
        class Twice(FusedLinear):
            def forward(self, x, additions=None):
                out = super().forward(x, additions)
                if additions is not None:
                    assert self.site is not None
                    additions.add(self.site.number, x, out)
                return out

        layer.o.__class__ = Twice


class KeepsAdditions(Spoiled):
    def spoil(self, layer):
        class Keeping(FusedLinear):
            kept = None

            def forward(self, x, additions=None):
                Keeping.kept = additions or Keeping.kept
                return super().forward(x, Keeping.kept)

        layer.o.__class__ = Keeping


def sites_of(family: DenseFamily) -> NetworkSites:
    found = family.ctx.services.get(SITES, NetworkSites())
    assert isinstance(found, NetworkSites)
    return found


class TellsNone(DenseFamily):
    def load(self):
        network = super().load()
        sites_of(self).all = ()
        return network


class TellsOtherNames(DenseFamily):
    def load(self):
        network = super().load()
        sites = sites_of(self)
        sites.all = tuple(
            replace(site, parts=tuple(replace(part, name=part.name.replace("model.", "")) for part in site.parts))
            for site in sites.all
        )
        return network


class TellsOneTwice(DenseFamily):
    def load(self):
        network = super().load()
        sites = sites_of(self)
        sites.all = (*sites.all, sites.all[0])
        return network


class RunsWithout(LayeredRunner):
    def execute(self, batch, sampling, **wants):
        return super().execute(replace(batch, additions=None), sampling, **wants)


class RunsWithThoseBefore(LayeredRunner):
    before = None

    def execute(self, batch, sampling, **wants):
        batch.additions = self.before = batch.additions or self.before
        return super().execute(batch, sampling, **wants)


class OneNative(ModelRunnerContract):
    """The suite on the native runner."""

    contract = "runner"
    provider = "cpu_native"
    dtype = "bfloat16"
    tolerance = 0.15


class LeavesThemOut(CpuNativeRunner):
    def execute(self, batch, sampling, **wants):
        return super().execute(replace(batch, additions=None), sampling, **wants)


NAMES, COUNT, NOTHING = (
    "test_it_names_its_sites",
    "test_what_is_added_counts",
    "test_nothing_is_added_where_nothing_is_said",
)
CAUGHT = {
    ForgetsTheOutput: COUNT,
    ForgetsTheMLP: COUNT,
    TwoOfOneNumber: COUNT,
    AddsToACopy: COUNT,
    AddsTwice: COUNT,
    KeepsAdditions: NOTHING,
    TellsNone: NAMES,
    TellsOtherNames: NAMES,
    TellsOneTwice: NAMES,
}
MUTANTS = [
    *(Mutant(cls, suite=OneLlama, caught_by=test, provides=frozenset({"additions"})) for cls, test in CAUGHT.items()),
    *(
        Mutant(cls, suite=ModelRunnerContract, caught_by="test_additions_reach_the_network")
        for cls in (RunsWithout, RunsWithThoseBefore)
    ),
    Mutant(LeavesThemOut, suite=OneNative, caught_by="test_additions_that_it_does_not_know_are_refused"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_suites_have_these_tests() -> None:
    assert issubclass(ModelFamilyContract, AdditionTests)
    assert issubclass(ModelRunnerContract, RunnerAdditionTests)
