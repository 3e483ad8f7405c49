"""Broken stores of weights, each caught by the test that is meant for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch

from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.weights import TensorSpec
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.network import DenseNetwork
from pegboard.plugins.model_dense.store import DenseStore
from pegboard.plugins.runner_layered.runner import LayeredRunner

NORM = "model.norm.weight"


class OneLlama(ModelFamilyContract):
    """The suite on one architecture, for speed."""

    contract = "model_family"
    architectures: ClassVar[tuple[str, ...]] = ("llama",)


class Broken(DenseFamily):
    """`Store` takes the place of the network's."""

    Store: ClassVar[type[DenseStore]] = DenseStore

    def load(self):
        network = super().load()
        assert isinstance(network, DenseNetwork)
        assert isinstance(network.store, DenseStore)
        network.store.__class__ = self.Store
        return network


class ForgetsANorm(Broken):
    class Store(DenseStore):
        def put(self, name: str, tensor: torch.Tensor) -> None:
            if name != NORM:
                super().put(name, tensor)


class ForgetsTheEmbedding(Broken):
    class Store(DenseStore):
        def put(self, name: str, tensor: torch.Tensor) -> None:
            super().put(name, tensor if "embed" not in name else self.read(name, 10**9).reshape(tensor.shape))


class TakesTheMemoryOver(Broken):
    class Store(DenseStore):
        def put(self, name: str, tensor: torch.Tensor) -> None:
            super().put(name, tensor)
            if name == NORM:
                norm = self._network.norm
                assert norm is not None
                with torch.inference_mode():
                    norm.weight.set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())


class ChecksNoShape(Broken):
    class Store(DenseStore):
        def put(self, name: str, tensor: torch.Tensor) -> None:
            super().put(name, tensor.reshape(-1)[:1].expand(self._specs[name].shape).float())


class IgnoresWhatItDoesNotKnow(Broken):
    class Store(DenseStore):
        def ignores(self, name: str) -> bool:
            return name not in self._specs


class LeavesOneOut(Broken):
    class Store(DenseStore):
        def expected(self) -> Mapping[str, TensorSpec]:
            return {name: spec for name, spec in self._specs.items() if name != NORM}


class ReadsTooMuch(Broken):
    class Store(DenseStore):
        def read(self, name: str, most: int) -> torch.Tensor:
            return super().read(name, most + 1)


class ReadsInAnotherType(Broken):
    class Store(DenseStore):
        def read(self, name: str, most: int) -> torch.Tensor:
            return super().read(name, most).bfloat16()


class LendsItsMemory(Broken):
    class Store(DenseStore):
        def read(self, name: str, most: int) -> torch.Tensor:
            found = self._names.targets(self._network.targets())[name]
            assert isinstance(found, torch.Tensor)
            return found.detach().reshape(-1)[:most]


class GivesNothingBack(Broken):
    class Store(DenseStore):
        def release(self) -> int:
            return 0


class TakesHalfForAll(Broken):
    class Store(DenseStore):
        def finish(self) -> None:
            self._missing = set()
            super().finish()


class TakesAnyForAll(Broken):
    class Store(DenseStore):
        def finish(self) -> None:
            if not self._whole:
                self._missing = set()
            super().finish()


class LendsACopy(LayeredRunner):
    def weights(self):
        assert isinstance(self._network, DenseNetwork)
        other = copy.deepcopy(self._network)
        assert isinstance(other.store, DenseStore)
        other.store._network = other
        return other.store


class KeepsWhatItReleases(LayeredRunner):
    def weights(self):
        store = super().weights()
        store.release = lambda: 1  # type: ignore[method-assign]
        return store


EXPECTED = "test_expected_tensors_are_those_of_the_checkpoint"
CAUGHT = {
    ForgetsANorm: "test_new_weights_count",
    ForgetsTheEmbedding: "test_new_weights_count",
    TakesTheMemoryOver: "test_new_weights_count",
    ChecksNoShape: "test_what_is_not_expected_is_refused",
    IgnoresWhatItDoesNotKnow: EXPECTED,
    LeavesOneOut: EXPECTED,
    ReadsTooMuch: "test_numbers_are_read_as_they_are",
    ReadsInAnotherType: "test_numbers_are_read_as_they_are",
    LendsItsMemory: "test_numbers_are_read_as_they_are",
    GivesNothingBack: "test_released_memory",
    TakesHalfForAll: "test_released_memory",
    TakesAnyForAll: "test_what_was_named_must_come",
}
MUTANTS = [
    *(Mutant(cls, suite=OneLlama, caught_by=test, provides=frozenset({"updates"})) for cls, test in CAUGHT.items()),
    Mutant(LendsACopy, suite=ModelRunnerContract, caught_by="test_new_weights_reach_tokens"),
    Mutant(KeepsWhatItReleases, suite=ModelRunnerContract, caught_by="test_memory_comes_back"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
