"""Broken model families with taps, each caught by the test that is meant for it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import ClassVar

import pytest
import torch

from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.model_family.taps import TapTests
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardBatch, Taps
from pegboard.core.interfaces.model_family import Network
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.network import DecoderLayer, DenseNetwork

States = Mapping[int, torch.Tensor]


class OneLlama(ModelFamilyContract):
    """The suite on one architecture, for speed."""

    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("llama",)


class All(Taps):
    """Takes the states of every place."""

    def __init__(self, layers: int) -> None:
        super().__init__(tuple(range(layers + 2)))
        self.states: dict[int, torch.Tensor] = {}

    def note(self, place: int, states: torch.Tensor) -> None:
        self.states[place] = states


class Wrapped(Network):
    """Not broken: `show` passes on what the network has shown, and may spoil it."""

    def __init__(self, inner: DenseNetwork) -> None:
        self.inner = inner
        self.layers = len(inner.layers)

    def show(self, batch: ForwardBatch, states: States) -> States:
        return states

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        taps, own = batch.taps, All(self.layers)
        if taps is None:
            return self.inner.forward(batch)
        batch.taps = own
        hidden = self.inner.forward(batch)
        for place, states in self.show(batch, own.states).items():
            taps.note(place, states)
        batch.taps = taps
        return hidden

    def forward_in_parts(self, batch: ForwardBatch) -> Generator[None, None, torch.Tensor]:
        return self.inner.forward_in_parts(batch)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner.embed(ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(hidden)


class Spoiled(DenseFamily):
    network: ClassVar[type[Wrapped]] = Wrapped

    def load(self) -> Network:
        inner = super().load()
        assert isinstance(inner, DenseNetwork)
        return self.network(inner)


class AfterTheNorm(Spoiled):
    """What a layer's attention reads."""

    class network(Wrapped):  # noqa: N801 - it stands for the attribute
        def show(self, batch: ForwardBatch, states: States) -> States:
            layers = [layer for layer in self.inner.layers if isinstance(layer, DecoderLayer)]
            return {**states, **{place: layer.input_norm(states[place]) for place, layer in enumerate(layers)}}


class OneLayerLate(Spoiled):
    class network(Wrapped):  # noqa: N801
        def show(self, batch: ForwardBatch, states: States) -> States:
            return {place: states[min(place + 1, self.layers + 1)] for place in states}


class TheLastTwoAreOne(Spoiled):
    """The output of the last layer is what comes after the final norm, as in transformers' list."""

    class network(Wrapped):  # noqa: N801
        def show(self, batch: ForwardBatch, states: States) -> States:
            return {**states, self.layers: states[self.layers + 1]}


class BeforeDeepStates(Spoiled):
    class network(Wrapped):  # noqa: N801
        def show(self, batch: ForwardBatch, states: States) -> States:
            assert batch.overlay is not None
            deep, rows = dict(enumerate(batch.overlay.deep, 1)), batch.overlay.rows
            return {
                place: one.index_add(0, rows, -deep[place]) if place in deep else one for place, one in states.items()
            }


class ShowsTheTablesEmbeddings(Spoiled):
    class network(Wrapped):  # noqa: N801
        def show(self, batch: ForwardBatch, states: States) -> States:
            return {**states, 0: self.inner.embed(batch.input_ids)}


class ReusesItsBuffers(Spoiled):
    class network(Wrapped):  # noqa: N801
        def __init__(self, inner: DenseNetwork) -> None:
            super().__init__(inner)
            self.kept = torch.zeros(self.layers + 2, 256, inner.spec.hidden_size)

        def show(self, batch: ForwardBatch, states: States) -> States:
            for place, one in states.items():
                self.kept[place, : batch.num_tokens] = one
            return {place: self.kept[place, : batch.num_tokens] for place in states}


class NotOfDecodes(Spoiled):
    class network(Wrapped):  # noqa: N801
        def show(self, batch: ForwardBatch, states: States) -> States:
            return {} if batch.forward_mode.is_decode else states


class PartsAreNotShown(Spoiled):
    class network(Wrapped):  # noqa: N801
        def forward_in_parts(self, batch: ForwardBatch) -> Generator[None, None, torch.Tensor]:
            taps, batch.taps = batch.taps, None
            parts = super().forward_in_parts(batch)
            next(parts)
            batch.taps = taps
            yield
            return (yield from parts)


class PartsShareTaps(Spoiled):
    """States of the batch that runs in a pause go to the paused one."""

    class network(Wrapped):  # noqa: N801
        paused: Taps | None = None

        def show(self, batch: ForwardBatch, states: States) -> States:
            if self.paused is not None:
                self.paused.note(0, states[0])
            return states

        def forward_in_parts(self, batch: ForwardBatch) -> Generator[None, None, torch.Tensor]:
            self.paused = batch.taps
            return super().forward_in_parts(batch)


class Rounds(Spoiled):
    """What is shown goes on through the model a little changed."""

    class network(Wrapped):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            hidden = super().forward(batch)
            return hidden if batch.taps is None else hidden * (1 + 1e-6)


class ScalesEmbeddings(Spoiled):
    class network(Wrapped):  # noqa: N801
        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            return super().embed(ids) * self.inner.spec.hidden_size**0.5


class EmbedsEachIdOnce(Spoiled):
    class network(Wrapped):  # noqa: N801
        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            return super().embed(ids.unique())


class Refusing(Spoiled):
    """Not broken: a family without the capability, which says so."""

    class network(Wrapped):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            if batch.taps is not None:
                raise Unsupported("refusing", "model_family.taps")
            return super().forward(batch)

        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            raise Unsupported("refusing", "model_family.taps")


class IgnoresInSilence(Refusing):
    class network(Refusing.network):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            batch.taps = None
            return super().forward(batch)


class EmbedsAllTheSame(Refusing):
    class network(Refusing.network):  # noqa: N801
        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner.embed(ids)


def mutant(factory: type, caught_by: str, base: type = Spoiled, provides: frozenset[str] | None = None) -> Mutant:
    return Mutant(factory, suite=OneLlama, caught_by=caught_by, base=base, provides=provides)


MUTANTS = [
    mutant(OneLayerLate, "test_states_of_every_place"),
    mutant(AfterTheNorm, "test_states_of_every_place"),
    mutant(TheLastTwoAreOne, "test_states_of_every_place"),
    mutant(BeforeDeepStates, "test_states_under_an_overlay"),
    mutant(ShowsTheTablesEmbeddings, "test_states_under_an_overlay"),
    mutant(ReusesItsBuffers, "test_states_stay_as_they_are"),
    mutant(NotOfDecodes, "test_states_stay_as_they_are"),
    mutant(PartsAreNotShown, "test_states_of_parts"),
    mutant(PartsShareTaps, "test_states_of_parts"),
    mutant(Rounds, "test_taps_change_nothing"),
    mutant(ScalesEmbeddings, "test_embeddings"),
    mutant(EmbedsEachIdOnce, "test_embeddings"),
    mutant(IgnoresInSilence, "test_taps_are_refused", Refusing, frozenset()),
    mutant(EmbedsAllTheSame, "test_taps_are_refused", Refusing, frozenset()),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_of_taps_has_a_mutant() -> None:
    own = {name for name in vars(TapTests) if name.startswith("test")}
    assert own == {mutant.caught_by for mutant in MUTANTS}
