"""Broken model families with scales of 8-bit KV, each caught by the test that is meant for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.model_family.scales import ScaleTests
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_family import Network
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.toolkit.model.weights import checkpoint_files, read_header

Scales = Mapping[int, tuple[float, float]]


class OneLlama(ModelFamilyContract):
    """The suite on one architecture, for speed."""

    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("llama",)


class SaysOneForAll(DenseFamily):
    def kv_scales(self) -> Scales:
        return super().kv_scales() or {layer.layer_id: (1.0, 1.0) for layer in self.spec.layers}


class Silent(DenseFamily):
    """Not broken: without the capability."""

    def kv_scales(self) -> Scales:
        return {}


class ReadsWithoutSayingSo(DenseFamily):
    pass


class TakesValuesForKeys(DenseFamily):
    def kv_scales(self) -> Scales:
        return {layer: (v, k) for layer, (k, v) in super().kv_scales().items()}


class KnowsOneName(DenseFamily):
    def kv_scales(self) -> Scales:
        names = (name for file in checkpoint_files(self.ctx.directory) for name in read_header(file))
        return super().kv_scales() if any(name.endswith("self_attn.k_scale") for name in names) else {}


class ReadsOneScaleForKeysAlone(DenseFamily):
    def kv_scales(self) -> Scales:
        names = [name for file in checkpoint_files(self.ctx.directory) for name in read_header(file)]
        joint = any(name.endswith("kv_scale") for name in names)
        return {layer: (k, 1.0 if joint else v) for layer, (k, v) in super().kv_scales().items()}


class Forgives(DenseFamily):
    """As vLLM does: what cannot be used is 1."""

    def kv_scales(self) -> Scales:
        try:
            return super().kv_scales()
        except ModelError:
            return {}


class NamesNoTensor(DenseFamily):
    def kv_scales(self) -> Scales:
        try:
            return super().kv_scales()
        except ModelError as error:
            raise ModelError(f"{self.ctx.directory}: the scales of KV cannot be used") from error


class HasNoPlaceForThem(DenseFamily):
    def load(self) -> Network:
        self.kv_scales()
        names = [name for file in checkpoint_files(self.ctx.directory) for name in read_header(file)]
        if any(name.endswith("_scale") for name in names):
            raise ModelError("a tensor has no place in this model")
        return super().load()


MUTANTS = [
    Mutant(
        ReadsWithoutSayingSo, suite=OneLlama, caught_by="test_no_scales_are_read", base=Silent, provides=frozenset()
    ),
    *(
        Mutant(factory, suite=OneLlama, caught_by=test, base=DenseFamily)
        for factory, test in (
            (SaysOneForAll, "test_none_where_there_are_none"),
            (TakesValuesForKeys, "test_scales_of_every_layer"),
            (KnowsOneName, "test_scales_of_every_layer"),
            (ReadsOneScaleForKeysAlone, "test_one_scale_for_both"),
            (Forgives, "test_wrong_scales_are_named"),
            (NamesNoTensor, "test_wrong_scales_are_named"),
            (NamesNoTensor, "test_a_missing_scale_is_named"),
            (Forgives, "test_scales_of_heads_are_named"),
            (HasNoPlaceForThem, "test_scales_are_not_in_the_way"),
        )
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_of_scales_has_a_mutant() -> None:
    own = {name for name in vars(ScaleTests) if name.startswith("test")}
    assert own == {mutant.caught_by for mutant in MUTANTS}
