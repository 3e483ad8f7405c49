"""Broken model families with overlays and positions of three axes, each caught by the test that is meant for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any, ClassVar

import pytest
import torch

from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.forward import EmbedOverlay, ForwardBatch
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.model_family import Network
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.network import DenseNetwork
from pegboard.plugins.model_transformers.family import TransformersFamily
from pegboard.toolkit.model.rope import RotaryEmbedding


class OneTower(ModelFamilyContract):
    """The suite on one architecture, for speed: deep states, and axes that take turns."""

    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("qwen3_vl",)


class OneLlama(ModelFamilyContract):
    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("llama",)


class _Wrapped(Network):
    """A network that a mutant spoils in one place: `change` is given each batch before it is computed."""

    def __init__(self, inner: DenseNetwork) -> None:
        self.inner = inner

    def change(self, batch: ForwardBatch) -> None:
        return

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.change(batch)
        return self.inner.forward(batch)

    def forward_in_parts(self, batch: ForwardBatch) -> Generator[None, None, torch.Tensor]:
        self.change(batch)
        return self.inner.forward_in_parts(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(hidden)


class _Spoiled(DenseFamily):
    network: ClassVar[type[_Wrapped]] = _Wrapped

    def load(self) -> Network:
        inner = super().load()
        assert isinstance(inner, DenseNetwork)
        return self.network(inner)


def changed(batch: ForwardBatch, **fields: Any) -> None:
    if batch.overlay is not None:
        batch.overlay = dataclasses.replace(batch.overlay, **fields)


class IgnoresOverlays(_Spoiled):
    class network(_Wrapped):  # noqa: N801 - it stands for the attribute
        def change(self, batch: ForwardBatch) -> None:
            batch.overlay = None


class BeginsAtTheFirstRow(_Spoiled):
    """As code does that has met batches of one picture only."""

    class network(_Wrapped):  # noqa: N801
        def change(self, batch: ForwardBatch) -> None:
            if batch.overlay is not None:
                changed(batch, rows=torch.arange(len(batch.overlay.rows)))


class AddsToTheEmbeddings(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def change(self, batch: ForwardBatch) -> None:
            if batch.overlay is not None:
                own = self.inner.embed(batch.input_ids[batch.overlay.rows])
                changed(batch, states=batch.overlay.states + own)


class ForgetsDeepStates(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def change(self, batch: ForwardBatch) -> None:
            changed(batch, deep=())


class DeepStatesComeALayerLate(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def change(self, batch: ForwardBatch) -> None:
            if batch.overlay is not None and batch.overlay.deep:
                changed(batch, deep=(torch.zeros_like(batch.overlay.states), *batch.overlay.deep))


class DeepStatesOfTheWrongLevel(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def change(self, batch: ForwardBatch) -> None:
            if batch.overlay is not None:
                changed(batch, deep=batch.overlay.deep[::-1])


class DeepStatesStay(_Spoiled):
    """In buffers that the next batch finds as they were."""

    class network(_Wrapped):  # noqa: N801
        kept: EmbedOverlay | None = None

        def change(self, batch: ForwardBatch) -> None:
            if batch.overlay is not None:
                self.kept = batch.overlay
            elif self.kept is not None:
                rows = self.kept.rows
                states = self.inner.embed(batch.input_ids[rows])
                batch.overlay = dataclasses.replace(self.kept, states=states)


class CutsAtTheFirstOverlay(_Spoiled):
    """The states of a prompt's chunk are taken from its beginning."""

    class network(_Wrapped):  # noqa: N801
        first: torch.Tensor | None = None

        def change(self, batch: ForwardBatch) -> None:
            if batch.overlay is None:
                return
            if self.first is None:
                self.first = batch.overlay.states
            count = min(len(self.first), len(batch.overlay.states))
            changed(batch, states=torch.cat([self.first[:count], batch.overlay.states[count:]]))


class PartsHaveNoOverlay(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def forward_in_parts(self, batch: ForwardBatch) -> Generator[None, None, torch.Tensor]:
            batch.overlay = None
            return super().forward_in_parts(batch)


class BatchesShareDeepStates(_Spoiled):
    """What runs in a pause takes the place of what the paused batch has yet to add."""

    class network(_Wrapped):  # noqa: N801
        paused: ForwardBatch | None = None

        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            hidden = super().forward(batch)
            if self.paused is not None and batch.overlay is not None:
                self.paused.overlay = batch.overlay
            return hidden

        def forward_in_parts(self, batch: ForwardBatch) -> Generator[None, None, torch.Tensor]:
            self.paused = batch
            return super().forward_in_parts(batch)


class ForgetsAxesInTheSpec(_Spoiled):
    @property
    def spec(self) -> ModelSpec:
        return dataclasses.replace(super().spec, position_axes=1)


class SeesTimeAlone(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def change(self, batch: ForwardBatch) -> None:
            if batch.positions.dim() > 1:
                batch.positions = batch.positions[0]


class MistakesHeightForWidth(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def change(self, batch: ForwardBatch) -> None:
            if batch.positions.dim() > 1:
                batch.positions = batch.positions[[0, 2, 1]]


class AxesInChunks(_Spoiled):
    """Qwen2-VL's order in Qwen3-VL."""

    def load(self) -> Network:
        network = super().load()
        assert isinstance(network, _Wrapped)
        spec = network.inner.rope.spec
        network.inner.rope = RotaryEmbedding(dataclasses.replace(spec, axes=tuple(sorted(spec.axes))))
        return network


class AxesAreSlightlyOff(_Spoiled):
    """All are one further, which only roundings show, since attention sees differences of positions."""

    class network(_Wrapped):  # noqa: N801
        def change(self, batch: ForwardBatch) -> None:
            if batch.positions.dim() > 1:
                batch.positions = batch.positions + 1


class DecodesAtTheirIndex(_Spoiled):
    class network(_Wrapped):  # noqa: N801
        def change(self, batch: ForwardBatch) -> None:
            if batch.forward_mode.is_decode:
                batch.positions = batch.seq_lens - 1


class Silent(Network):
    """Runs a network as if batches had no overlays."""

    def __init__(self, inner: Network) -> None:
        self.inner = inner

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.inner.forward(dataclasses.replace(batch, overlay=None))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(hidden)


class IgnoresInSilence(TransformersFamily):
    """Has not got the capability, and does not say so."""

    def load(self) -> Network:
        return Silent(super().load())


MUTANTS = [
    Mutant(IgnoresOverlays, suite=OneTower, caught_by="test_states_take_the_place_of_embeddings", base=_Spoiled),
    Mutant(BeginsAtTheFirstRow, suite=OneLlama, caught_by="test_states_take_the_place_of_embeddings", base=_Spoiled),
    Mutant(AddsToTheEmbeddings, suite=OneTower, caught_by="test_states_take_the_place_of_embeddings", base=_Spoiled),
    Mutant(ForgetsDeepStates, suite=OneLlama, caught_by="test_deep_states_join_the_first_layers", base=_Spoiled),
    Mutant(DeepStatesComeALayerLate, suite=OneTower, caught_by="test_deep_states_join_the_first_layers", base=_Spoiled),
    Mutant(
        DeepStatesOfTheWrongLevel, suite=OneTower, caught_by="test_deep_states_join_the_first_layers", base=_Spoiled
    ),
    Mutant(DeepStatesStay, suite=OneTower, caught_by="test_an_overlay_leaves_nothing_behind", base=_Spoiled),
    Mutant(CutsAtTheFirstOverlay, suite=OneTower, caught_by="test_an_overlay_may_be_cut", base=_Spoiled),
    Mutant(PartsHaveNoOverlay, suite=OneTower, caught_by="test_an_overlay_in_parts", base=_Spoiled),
    Mutant(BatchesShareDeepStates, suite=OneTower, caught_by="test_an_overlay_in_parts", base=_Spoiled),
    Mutant(ForgetsAxesInTheSpec, suite=OneTower, caught_by="test_position_axes_match_config", base=_Spoiled),
    Mutant(SeesTimeAlone, suite=OneTower, caught_by="test_each_frequency_has_its_axis", base=_Spoiled),
    Mutant(MistakesHeightForWidth, suite=OneTower, caught_by="test_each_frequency_has_its_axis", base=_Spoiled),
    Mutant(AxesInChunks, suite=OneTower, caught_by="test_each_frequency_has_its_axis", base=_Spoiled),
    Mutant(AxesAreSlightlyOff, suite=OneTower, caught_by="test_equal_axes_are_plain_positions", base=_Spoiled),
    Mutant(DecodesAtTheirIndex, suite=OneTower, caught_by="test_decodes_go_on_from_their_own_positions", base=_Spoiled),
    Mutant(IgnoresInSilence, suite=OneLlama, caught_by="test_an_overlay_is_refused"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
