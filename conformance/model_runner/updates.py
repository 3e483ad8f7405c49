"""The suite of ModelRunner: weights that are replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pegboard.conformance.model_runner.base import RunnerSuite, reference
from pegboard.conformance.model_runner.fakes import Rig
from pegboard.conformance.rig.other_weights import other_weights, tensors_of
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.weights import WeightStore


class RunnerUpdateTests(RunnerSuite):
    """What a runner computes is what the weights say that were put last."""

    @pytest.fixture
    def updated(self) -> Iterator[tuple[Rig, WeightStore]]:
        """Lend a runner and its weights. The network may be other tests', too, so it gets its own back."""
        rig = self.rig()
        store = rig.runner.weights()
        yield rig, store
        self._put(store, tensors_of(self.make_model().model.directory))

    def _put(self, store: WeightStore, tensors: dict[str, torch.Tensor]) -> None:
        needed = {name: tensor for name, tensor in tensors.items() if not store.ignores(name)}
        store.begin(needed)
        for name, tensor in needed.items():
            store.put(name, tensor)
        store.finish()

    @capability("updates")
    def test_new_weights_reach_tokens(self, updated: tuple[Rig, WeightStore], prompts: list[list[int]]) -> None:
        """Of chunks and decodes, also where what is computed before lies in the pool."""
        rig, store = updated
        other = other_weights(self.make_model().model.directory)
        before = rig.step({0: prompts[0]}, return_logits=True)
        self.check_logits(before.logits, self.expected(prompts[0])[-1:])
        self._put(store, tensors_of(other))
        expected = reference(other, tuple(prompts[1]))[0]
        self.check_greedy(rig.step({1: prompts[1][:-1]}, return_logits=True), expected[-2:-1])
        self.check_greedy(rig.step({1: prompts[1][-1:]}, return_logits=True, decode=True), expected[-1:])

    @capability("updates")
    def test_memory_comes_back(self, updated: tuple[Rig, WeightStore], prompts: list[list[int]]) -> None:
        rig, store = updated
        directory = self.make_model().model.directory
        assert store.release() > 0
        tensors = {name: one for name, one in tensors_of(directory).items() if not store.ignores(name)}
        with pytest.raises(ValueError, match="did not come"):
            self._put(store, dict(list(tensors.items())[1:]))
        self._put(store, tensors)
        self.check_greedy(rig.step({0: prompts[0]}, return_logits=True), self.expected(prompts[0])[-1:])

    @lacks("updates")
    def test_no_weights_are_lent(self) -> None:
        with pytest.raises(Unsupported, match="updates"):
            self.rig().runner.weights()
