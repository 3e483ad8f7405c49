"""Broken model families, each caught by the test that is meant for it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch

from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.model_family import ModelContext, Network
from pegboard.plugins.model_transformers.family import TransformersFamily
from pegboard.plugins.model_transformers.network import TransformersNetwork


class OneLlama(ModelFamilyContract):
    """The suite on one architecture, for speed."""

    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("llama",)


class Windowed(OneLlama):
    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("mistral",)


class Capped(OneLlama):
    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("gemma2",)


class _Wrapped(Network):
    """A network that a mutant spoils in one place."""

    def __init__(self, inner: TransformersNetwork) -> None:
        self.inner = inner

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.inner.forward(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(hidden)


class _Spoiled(TransformersFamily):
    network: ClassVar[type[_Wrapped]] = _Wrapped

    def load(self) -> Network:
        inner = super().load()
        assert isinstance(inner, TransformersNetwork)
        return self.network(inner)


class WrongRopeTheta(TransformersFamily):
    def load(self) -> Network:
        rope = {**self.ctx.hf_config["rope_parameters"], "rope_theta": 11000.0}
        self.ctx = dataclasses.replace(self.ctx, hf_config={**self.ctx.hf_config, "rope_parameters": rope})
        return super().load()


class WrongScale(TransformersFamily):
    def __init__(self, options: Any, ctx: ModelContext) -> None:
        super().__init__(options, ctx)
        layers = tuple(dataclasses.replace(layer, scale=layer.scale * 1.01) for layer in self._trace.layers)
        self._trace = dataclasses.replace(self._trace, layers=layers)


class IgnoresWindow(TransformersFamily):
    def __init__(self, options: Any, ctx: ModelContext) -> None:
        super().__init__(options, ctx)
        layers = tuple(dataclasses.replace(layer, window=None) for layer in self._trace.layers)
        self._trace = dataclasses.replace(self._trace, layers=layers)


class WindowIsOneShort(TransformersFamily):
    def __init__(self, options: Any, ctx: ModelContext) -> None:
        super().__init__(options, ctx)
        layers = tuple(dataclasses.replace(layer, window=(layer.window or 2) - 1) for layer in self._trace.layers)
        self._trace = dataclasses.replace(self._trace, layers=layers)


class WindowMissingInSpec(TransformersFamily):
    @property
    def spec(self) -> ModelSpec:
        spec = super().spec
        return dataclasses.replace(spec, layers=tuple(dataclasses.replace(one, window=None) for one in spec.layers))


class NoFinalNorm(TransformersFamily):
    def load(self) -> Network:
        network = super().load()
        assert isinstance(network, TransformersNetwork)
        network.model.model.norm = torch.nn.Identity()
        return network


class PositionsRestartWithEachChunk(_Spoiled):
    class network(_Wrapped):  # noqa: N801 - it stands for the attribute
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            if batch.extend_prefix_lens is not None and batch.extend_lens is not None:
                batch.positions = batch.positions - batch.extend_prefix_lens.repeat_interleave(batch.extend_lens)
            return super().forward(batch)


class DecodePositionsAreOneTooHigh(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            if batch.forward_mode.is_decode:
                batch.positions = batch.positions + 1
            return super().forward(batch)


class PositionsRunThroughTheBatch(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            batch.positions = torch.arange(batch.num_tokens)
            return super().forward(batch)


class LeaksBetweenRequests(_Spoiled):
    """As a convolution over tokens does: the first token of a request sees the last one of the request before."""

    class network(_Wrapped):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            hidden = super().forward(batch)
            if batch.extend_start_loc is not None:
                starts = batch.extend_start_loc[1:]
                hidden = hidden.index_add(0, starts, hidden[starts - 1], alpha=0.01)
            return hidden


class RemembersTheLastBatch(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        calls = 0

        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            self.calls += 1
            return super().forward(batch) * (1 + 0.001 * self.calls)


class NoFinalSoftCap(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.inner.model.lm_head(hidden).float()
            return logits


class HalfPrecisionLogits(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().logits(hidden).to(hidden.dtype)


class LogitsInOneBuffer(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        buffer: torch.Tensor | None = None

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            found = super().logits(hidden)
            if self.buffer is None or self.buffer.shape != found.shape:
                self.buffer = found
            return self.buffer.copy_(found)


class WritesBesides(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            hidden = super().forward(batch)
            batch.kv_pool.keys(1)[0] = 0.0
            return hidden


class SkipsALayer(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            self.inner.model.model.layers = self.inner.model.model.layers[:2]
            self.inner.model.config.num_hidden_layers = 2
            return super().forward(batch)


class ComputesLessForShortRequests(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            hidden = super().forward(batch)
            return hidden if int(batch.seq_lens_cpu.max()) < 48 else hidden * 1.0


class FreezesANumber(_Spoiled):
    """As much of a length as a graph would keep: the same operation, with the number that was there when it was
    captured.
    """

    class network(_Wrapped):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            return super().forward(batch) * (1.0 + 1e-9 * int(batch.seq_lens_cpu[0]))


class LooksAtTheWeights(TransformersFamily):
    @classmethod
    def supports(cls, options: Any, ctx: ModelContext) -> str | None:
        return super().supports(options, ctx) if (ctx.directory / "model.safetensors").exists() else "no weights"


class AcceptsEverything(TransformersFamily):
    @classmethod
    def supports(cls, options: Any, ctx: ModelContext) -> str | None:
        return None


class ForgetsTheCap(TransformersFamily):
    @property
    def spec(self) -> ModelSpec:
        return dataclasses.replace(super().spec, max_context_len=4096)


class MissingTensorsStayRandom(TransformersFamily):
    def load(self) -> Network:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.ctx.directory, attn_implementation="pegboard_paged")
        return TransformersNetwork(model.eval(), self._trace)


MUTANTS = [
    Mutant(WrongRopeTheta, suite=OneLlama, caught_by="test_equals_transformers"),
    Mutant(WrongScale, suite=OneLlama, caught_by="test_equals_transformers"),
    Mutant(NoFinalNorm, suite=OneLlama, caught_by="test_equals_transformers"),
    Mutant(IgnoresWindow, suite=Windowed, caught_by="test_equals_transformers"),
    Mutant(WindowIsOneShort, suite=Windowed, caught_by="test_equals_transformers"),
    Mutant(WindowMissingInSpec, suite=Windowed, caught_by="test_windows_match_config"),
    Mutant(NoFinalSoftCap, suite=Capped, caught_by="test_equals_transformers"),
    Mutant(PositionsRestartWithEachChunk, suite=OneLlama, caught_by="test_in_chunks", base=_Spoiled),
    Mutant(DecodePositionsAreOneTooHigh, suite=OneLlama, caught_by="test_token_by_token", base=_Spoiled),
    Mutant(PositionsRunThroughTheBatch, suite=OneLlama, caught_by="test_mixed_batch", base=_Spoiled),
    Mutant(LeaksBetweenRequests, suite=OneLlama, caught_by="test_ragged_batch", base=_Spoiled),
    Mutant(RemembersTheLastBatch, suite=OneLlama, caught_by="test_keeps_nothing_between_batches", base=_Spoiled),
    Mutant(HalfPrecisionLogits, suite=OneLlama, caught_by="test_half_precision", base=_Spoiled),
    Mutant(LogitsInOneBuffer, suite=OneLlama, caught_by="test_logits_are_float32_and_the_callers", base=_Spoiled),
    Mutant(WritesBesides, suite=OneLlama, caught_by="test_writes_only_its_slots", base=_Spoiled),
    Mutant(SkipsALayer, suite=OneLlama, caught_by="test_attends_once_per_layer", base=_Spoiled),
    Mutant(
        ComputesLessForShortRequests,
        suite=OneLlama,
        caught_by="test_operations_do_not_depend_on_numbers",
        base=_Spoiled,
        provides=frozenset({"graph"}),
        says="of its size",
    ),
    Mutant(
        FreezesANumber,
        suite=OneLlama,
        caught_by="test_operations_do_not_depend_on_numbers",
        base=_Spoiled,
        provides=frozenset({"graph"}),
        says="of its size",
    ),
    Mutant(LooksAtTheWeights, suite=OneLlama, caught_by="test_reads_no_weights_before_load"),
    Mutant(AcceptsEverything, suite=OneLlama, caught_by="test_refuses_what_is_no_model"),
    Mutant(ForgetsTheCap, suite=OneLlama, caught_by="test_context_length_caps"),
    Mutant(MissingTensorsStayRandom, suite=OneLlama, caught_by="test_missing_tensor_is_named"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
