"""Pools, attention backends and families that get latents wrong, each caught by the test that is meant for it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch

from pegboard.conformance.attention import AttentionContract
from pegboard.conformance.attention.latents import AttentionLatentTests
from pegboard.conformance.kv_pool import KVPoolContract
from pegboard.conformance.kv_pool.latents import KVPoolLatentTests
from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.core.interfaces.model_family import ModelContext, Network
from pegboard.plugins.attn_torch.backend import TorchAttention
from pegboard.plugins.memory_paged.pool import MHAPool
from pegboard.plugins.model_transformers.family import TransformersFamily
from pegboard.plugins.model_transformers.latent import is_latent
from pegboard.plugins.model_transformers.network import TransformersNetwork

Tensor = torch.Tensor


class WritesValuesToo(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        super().write(layer_id, slots, k, v)
        self.values(layer_id)[slots] = v


class KeepsValuesApart(MHAPool):
    def values(self, layer_id: int) -> Tensor:
        return super().values(layer_id).clone()


class CountsValues(MHAPool):
    @classmethod
    def bytes_per_token(cls, layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
        plain = tuple(dataclasses.replace(layer, latent=False) for layer in layers)
        return super().bytes_per_token(plain, dtype)


class MovesValuesAgain(MHAPool):
    def move(self, sources: Tensor, targets: Tensor) -> None:
        super().move(sources, targets)
        for layer_id in self._latent:
            self.values(layer_id)[targets] = self.values(layer_id)[sources]


class BeginsWithAnything(MHAPool):
    def __init__(self, options: Any, ctx: KVPoolContext) -> None:
        super().__init__(options, ctx)
        for layer_id in self._latent:
            self.keys(layer_id).fill_(torch.nan)


class TakesTheLastNumbers(TorchAttention):
    def _gather(self, layer: LayerSpec, batch: Any, slots: Any) -> tuple[Tensor, Tensor]:
        k, v = super()._gather(layer, batch, slots)
        return (k, k[..., -layer.v_head_dim :]) if layer.latent else (k, v)


class ScalesByTheLatent(TorchAttention):
    """As if queries and keys had never had another size."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: LayerSpec, batch: Any, *, sinks: Any = None) -> Tensor:
        if layer.latent:
            layer = dataclasses.replace(layer, scale=layer.qk_head_dim**-0.5)
        return super().forward(q, k, v, layer, batch, sinks=sinks)


class WritesToPageZeroToo(TorchAttention):
    def forward(self, q: Tensor, k: Any, v: Any, layer: LayerSpec, batch: Any, *, sinks: Any = None) -> Tensor:
        batch.kv_pool.keys(layer.layer_id)[:1] = 0
        return super().forward(q, k, v, layer, batch, sinks=sinks)


class TakesAllLayersForLatents(TorchAttention):
    def _gather(self, layer: LayerSpec, batch: Any, slots: Any) -> tuple[Tensor, Tensor]:
        return super()._gather(dataclasses.replace(layer, num_kv_heads=1, latent=True), batch, slots)


class HasNoWindow(TorchAttention):
    def forward(self, q: Tensor, k: Any, v: Any, layer: LayerSpec, batch: Any, *, sinks: Any = None) -> Tensor:
        return super().forward(q, k, v, dataclasses.replace(layer, window=None), batch, sinks=sinks)


class OneLatent(ModelFamilyContract):
    """The suite on one architecture."""

    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("deepseek_v3",)


class RopeComesFirst(TransformersFamily):
    def load(self) -> Network:
        network = super().load()
        assert isinstance(network, TransformersNetwork)
        for module in filter(is_latent, network.model.modules()):
            module.__dict__["expand_kv"] = lambda nope, rope: (torch.cat([rope, nope], -1), nope)
        return network


class _OtherLayers(TransformersFamily):
    changes: ClassVar[dict[str, Any]] = {}

    def __init__(self, options: Any, ctx: ModelContext) -> None:
        super().__init__(options, ctx)
        layers = tuple(dataclasses.replace(layer, **self.changes) for layer in self._trace.layers)
        self._trace = dataclasses.replace(self._trace, layers=layers)
        self._spec = dataclasses.replace(self._spec, layers=layers)


class ScalesByTheLatentsSize(_OtherLayers):
    changes: ClassVar[dict[str, Any]] = {"scale": 40**-0.5}


class TellsOfNoLatents(_OtherLayers):
    changes: ClassVar[dict[str, Any]] = {"latent": False}


def pool(factory: type[Any], caught_by: str) -> Mutant:
    return Mutant(factory, suite=KVPoolContract, caught_by=caught_by)


def attention(factory: type[Any], caught_by: str) -> Mutant:
    return Mutant(factory, suite=AttentionContract, caught_by=caught_by, base=TorchAttention)


def family(factory: type[Any], caught_by: str) -> Mutant:
    return Mutant(factory, suite=OneLatent, caught_by=caught_by)


MUTANTS = [
    pool(WritesValuesToo, "test_latents_are_kept_once"),
    pool(KeepsValuesApart, "test_latents_are_kept_once"),
    pool(CountsValues, "test_latents_are_kept_once"),
    pool(MovesValuesAgain, "test_latents_are_moved_once"),
    pool(BeginsWithAnything, "test_latents_begin_finite"),
    attention(TakesTheLastNumbers, "test_latents"),
    attention(ScalesByTheLatent, "test_latents"),
    attention(TakesTheLastNumbers, "test_latents_in_half_precision"),
    attention(TakesTheLastNumbers, "test_latents_of_a_mixed_batch"),
    attention(WritesToPageZeroToo, "test_latents_are_written_once"),
    attention(TakesAllLayersForLatents, "test_latents_beside_other_layers"),
    attention(HasNoWindow, "test_latents_with_windows_and_sinks"),
    family(RopeComesFirst, "test_equals_transformers"),
    family(ScalesByTheLatentsSize, "test_equals_transformers"),
    family(TellsOfNoLatents, "test_spec_matches_config"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_has_a_mutant() -> None:
    """But that of real models' sizes."""
    tests = {name for suite in (KVPoolLatentTests, AttentionLatentTests) for name in vars(suite) if "test" in name}
    assert tests - {mutant.caught_by for mutant in MUTANTS} == {"test_latents_of_real_models"}
