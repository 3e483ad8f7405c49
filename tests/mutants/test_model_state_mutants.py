"""Families that get states wrong, each caught by the test that is meant for it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch

from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.model_family.states import StateTests
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.forward import BatchStates, ForwardBatch
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.model_family import Network
from pegboard.plugins.model_transformers.family import TransformersFamily
from pegboard.plugins.model_transformers.network import TransformersNetwork


class OneHybrid(ModelFamilyContract):
    """The suite on one architecture, for speed."""

    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("bamba",)


class _Network(Network):
    """A network that sees other states of a batch than the batch has."""

    def __init__(self, inner: TransformersNetwork) -> None:
        self.inner = inner

    def changed(self, states: BatchStates) -> BatchStates:
        return states

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        states = batch.states
        if states is None:
            return self.inner.forward(batch)
        batch.states = self.changed(states)
        try:
            return self.inner.forward(batch)
        finally:
            batch.states = states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(hidden)


class _Spoiled(TransformersFamily):
    network: ClassVar[type[_Network]] = _Network

    def load(self) -> Network:
        inner = super().load()
        assert isinstance(inner, TransformersNetwork)
        return self.network(inner)


class ReadsTheSlotOfAFreshRequest(_Spoiled):
    class network(_Network):  # noqa: N801 - it stands for the attribute
        def changed(self, states: BatchStates) -> BatchStates:
            rounds = [dataclasses.replace(part, fresh=None) for part in states.rounds]
            return dataclasses.replace(states, rounds=tuple(rounds))


class ForgetsAtEveryStep(_Spoiled):
    class network(_Network):  # noqa: N801
        def changed(self, states: BatchStates) -> BatchStates:
            rounds = [
                dataclasses.replace(part, fresh=torch.ones_like(part.sources, dtype=torch.bool))
                for part in states.rounds
            ]
            return dataclasses.replace(states, rounds=tuple(rounds))


class WritesInPlaceToo(_Spoiled):
    """As a module does that gets the slot itself."""

    class network(_Network):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            hidden = super().forward(batch)
            if batch.states is not None:
                for memory in batch.states.memory.values():
                    for part in batch.states.rounds:
                        memory[part.sources] = memory[part.targets]
            return hidden


class SwapsTwoTargets(_Spoiled):
    class network(_Network):  # noqa: N801
        def changed(self, states: BatchStates) -> BatchStates:
            rounds = [dataclasses.replace(part, targets=part.targets.flip(0)) for part in states.rounds]
            return dataclasses.replace(states, rounds=tuple(rounds))


class TakesTheLastRoundFirst(_Spoiled):
    class network(_Network):  # noqa: N801
        def changed(self, states: BatchStates) -> BatchStates:
            return dataclasses.replace(states, rounds=states.rounds[::-1])


class WritesOneSlotMore(_Spoiled):
    class network(_Network):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            if batch.states is not None:
                for memory in batch.states.memory.values():
                    for part in batch.states.rounds:
                        memory[part.targets + 3] = 0
            return super().forward(batch)


class TakesABatchWithoutStates(_Spoiled):
    class network(_Network):  # noqa: N801
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            return torch.zeros(batch.num_tokens, 64) if batch.states is None else super().forward(batch)


class NamesOneStateTwice(TransformersFamily):
    @property
    def spec(self) -> ModelSpec:
        spec = super().spec
        return dataclasses.replace(spec, states=(*spec.states[1:], spec.states[1]))


MUTANTS = [
    Mutant(ReadsTheSlotOfAFreshRequest, suite=OneHybrid, caught_by="test_a_fresh_request_reads_no_slot"),
    Mutant(ForgetsAtEveryStep, suite=OneHybrid, caught_by="test_states_follow_their_requests"),
    Mutant(SwapsTwoTargets, suite=OneHybrid, caught_by="test_states_follow_their_requests"),
    Mutant(TakesTheLastRoundFirst, suite=OneHybrid, caught_by="test_rounds_are_computed_in_order"),
    Mutant(WritesInPlaceToo, suite=OneHybrid, caught_by="test_a_step_can_run_again", says="written where it was read"),
    Mutant(WritesInPlaceToo, suite=OneHybrid, caught_by="test_a_state_at_a_cut_goes_on"),
    Mutant(WritesOneSlotMore, suite=OneHybrid, caught_by="test_writes_only_the_targets", says="slot 6"),
    Mutant(TakesABatchWithoutStates, suite=OneHybrid, caught_by="test_a_batch_without_states_is_an_error"),
    Mutant(NamesOneStateTwice, suite=OneHybrid, caught_by="test_states_are_described"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_each_test_of_states_has_a_mutant() -> None:
    tests = {name for name in vars(StateTests) if name.startswith("test_")}
    assert tests == {mutant.caught_by for mutant in MUTANTS}
