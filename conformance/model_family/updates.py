"""The suite of ModelFamily: weights that are replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import torch

from pegboard.conformance.model_family.base import ModelSuite, assert_close
from pegboard.conformance.rig.model_references import context, prompts, reference_logits
from pegboard.conformance.rig.other_weights import another, other_weights, tensors_of
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.weights import WeightStore


class UpdateTests(ModelSuite):
    """Compared with checkpoints that have the new weights from the beginning. A family may refuse an architecture."""

    def _lent(self, checkpoint: Path) -> tuple[PagedRun, WeightStore]:
        run = self._run(checkpoint)
        try:
            return run, run.network.weights()
        except Unsupported as error:
            if not error.detail:
                pytest.fail("a refusal does not say why")
            pytest.skip(str(error))

    @pytest.fixture
    def updatable(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return a checkpoint of the first architecture whose weights can be replaced."""
        for architecture in self.architectures:
            checkpoint = self._checkpoint(architecture, tmp_path_factory)
            if self.objection(context(checkpoint)) is None:
                with contextlib.suppress(Unsupported):
                    self._load(checkpoint)[1].weights()
                    return checkpoint
        pytest.skip("no architecture's weights can be replaced")

    def _needed(self, store: WeightStore, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: one for name, one in tensors.items() if not store.ignores(name)}

    def _update(self, store: WeightStore, tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
        """Put tensors, whose memory is then used for something else."""
        store.begin(list(names))
        for name in names:
            tensor = tensors[name].clone()
            store.put(name, tensor)
            tensor.zero_()
        store.finish()

    def _check(self, run: PagedRun, checkpoint: Path, row: int = 0) -> None:
        """See that a network computes what a checkpoint says, in chunks and in decodes."""
        prompt, expected = prompts(checkpoint)[1], reference_logits(checkpoint)[1]
        assert_close(run.step({row: prompt[:-1]})[row], expected[:-1])
        assert_close(run.step({row: prompt[-1:]}, decode=True)[row], expected[-1:])

    @capability("updates")
    def test_expected_tensors_are_those_of_the_checkpoint(self, architecture: str, checkpoint: Path) -> None:
        _, store = self._lent(checkpoint)
        needed = self._needed(store, tensors_of(checkpoint))
        assert {name: tuple(one.shape) for name, one in needed.items()} == {
            name: spec.shape for name, spec in store.expected().items()
        }
        assert all(spec.dtype.is_floating_point for spec in store.expected().values())
        assert not store.ignores("model.nobodys.weight")

    @capability("updates")
    def test_new_weights_count(self, architecture: str, checkpoint: Path) -> None:
        """In any order, and once more."""
        run, store = self._lent(checkpoint)
        for row, directory in enumerate((other_weights(checkpoint), checkpoint)):
            tensors = self._needed(store, tensors_of(directory))
            self._update(store, tensors, sorted(tensors, reverse=row == 0))
            self._check(run, directory, row)

    @capability("updates")
    def test_single_tensors_count(self, updatable: Path) -> None:
        """With those of their group, and the rest stays what it is; in another float type, too."""
        run, store = self._lent(updatable)
        groups = {name: spec.group for name, spec in store.expected().items()}
        first = next(name for name in sorted(groups) if name.endswith("q_proj.weight") or "qkv" in name)
        chosen = [name for name in groups if name == first or (groups[first] and groups[name] == groups[first])]
        tensors = tensors_of(updatable)
        self._update(store, {name: another(tensors[name]).double() for name in chosen}, chosen)
        self._check(run, other_weights(updatable, *chosen))

    @capability("updates")
    def test_lent_memory_is_the_place_of_a_tensor(self, updatable: Path) -> None:
        """It is filled, given back by `put`, and counts like a copy; where there is none, nothing is lent."""
        run, store = self._lent(updatable)
        other = other_weights(updatable)
        tensors = self._needed(store, tensors_of(other))
        store.begin(tensors)
        for name, tensor in tensors.items():
            memory = store.memory_of(name)
            if memory is not None:
                assert (memory.shape, memory.device.type, memory.is_contiguous()) == (tensor.shape, "cpu", True)
                assert memory.dtype == store.expected()[name].dtype
                tensor = memory.copy_(tensor)
            store.put(name, tensor)
        store.finish()
        self._check(run, other)

    @capability("updates")
    def test_numbers_are_read_as_they_are(self, updatable: Path) -> None:
        _, store = self._lent(updatable)
        tensors = self._needed(store, tensors_of(updatable))
        for name in (min(tensors), max(tensors)):
            assert torch.equal(store.read(name, 7), tensors[name].reshape(-1)[:7])
            assert torch.equal(store.read(name, 10**9), tensors[name].reshape(-1))
        with torch.inference_mode():
            store.read(min(tensors), 5).zero_()
        assert torch.equal(store.read(min(tensors), 5), tensors[min(tensors)].reshape(-1)[:5])
        with pytest.raises(KeyError):
            store.read("model.nobodys.weight", 1)

    @capability("updates")
    def test_what_is_not_expected_is_refused(self, updatable: Path) -> None:
        """And the update goes on."""
        run, store = self._lent(updatable)
        tensors = self._needed(store, tensors_of(updatable))
        name = min(tensors)
        store.begin(tensors)
        with pytest.raises(KeyError):
            store.put("model.nobodys.weight", torch.zeros(3))
        for wrong in (tensors[name][:-1], tensors[name].unsqueeze(0), tensors[name].to(torch.int32)):
            with pytest.raises(ValueError, match="expected"):
                store.put(name, wrong)
        for one, tensor in tensors.items():
            store.put(one, tensor)
        store.finish()
        self._check(run, updatable)

    @capability("updates")
    def test_an_update_that_was_broken_off(self, updatable: Path) -> None:
        """The next one counts all the same."""
        run, store = self._lent(updatable)
        other = other_weights(updatable)
        tensors = self._needed(store, tensors_of(other))
        store.begin(tensors)
        for name in sorted(tensors)[: len(tensors) // 2]:
            store.put(name, torch.zeros_like(tensors[name]))
        self._update(store, tensors, tensors)
        self._check(run, other)

    @capability("updates")
    def test_what_was_named_must_come(self, updatable: Path) -> None:
        _, store = self._lent(updatable)
        tensors = self._needed(store, tensors_of(updatable))
        store.begin(tensors)
        for name in sorted(tensors)[1:]:
            store.put(name, tensors[name])
        with pytest.raises(ValueError, match=min(tensors)):
            store.finish()

    @capability("updates")
    def test_released_memory(self, updatable: Path) -> None:
        """It is that of all weights, and comes back with an update of all of them."""
        run, store = self._lent(updatable)
        other = other_weights(updatable)
        tensors = self._needed(store, tensors_of(other))
        assert store.release() >= 0.9 * sum(one.nbytes for one in tensors.values())
        assert store.expected().keys() == tensors.keys()
        names = sorted(tensors)
        with pytest.raises(ValueError, match=names[0]):
            self._update(store, tensors, names[1:])
        with pytest.raises(ValueError, match=names[1]):
            self._update(store, tensors, [names[0], *names[2:]])
        self._update(store, tensors, names)
        self._check(run, other)

    @lacks("updates")
    def test_no_weights_are_lent(self, architecture: str, checkpoint: Path) -> None:
        with pytest.raises(Unsupported, match="updates"):
            self._run(checkpoint).network.weights()
