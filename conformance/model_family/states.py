"""The suite of ModelFamily: what layers keep beside keys and values, read and written at the slots of a batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pegboard.conformance.model_family.base import ModelSuite, assert_close
from pegboard.conformance.rig.model_references import prompts, reference_logits
from pegboard.conformance.rig.paged import PagedRun
from pegboard.core.interfaces.forward import ForwardBatch


class StateTests(ModelSuite):
    """Of models whose spec names states. Slots that nothing was written to hold NaN."""

    def _keeping(self, checkpoint: Path) -> PagedRun:
        run = self._run(checkpoint)
        if not run.spec.states:
            pytest.skip("this model keeps no states")
        return run

    def test_states_are_described(self, architecture: str, checkpoint: Path) -> None:
        """By the name of the module, the kind of state, and its number. Memory made as the spec says takes them all."""
        run = self._keeping(checkpoint)
        names = [state.name for state in run.spec.states]
        assert len(set(names)) == len(names)
        for name in names:
            assert re.fullmatch(r"(.+\.)?layers\.\d+\..+\.[a-z]+\.\d+", name), name
        assert {state.dtype for state in run.spec.states} == {"float32"}, "the checkpoint is in float32"
        run.step({1: prompts(checkpoint)[1]})
        written = run.slots.current[1]
        for name, memory in run.slots.memory.items():
            assert memory[written].isfinite().all(), f"{name} is not written"

    def test_states_follow_their_requests(self, architecture: str, checkpoint: Path) -> None:
        """Runs of one length are in one batch, in another order each time."""
        run, (long, middle, _), expected = self._keeping(checkpoint), prompts(checkpoint), reference_logits(checkpoint)
        run.step({0: long[:9], 1: middle[:9]})
        found = run.step({1: middle[9:12], 0: long[9:12]})
        assert_close(found[0], expected[0][9:12])
        assert_close(found[1], expected[1][9:12])
        found = run.step({1: middle[12:13], 0: long[12:13]}, decode=True)
        assert_close(found[0], expected[0][12:13])
        assert_close(found[1], expected[1][12:13])

    def test_rounds_are_computed_in_order(self, architecture: str, checkpoint: Path) -> None:
        """One request is cut, so that its tokens are in two rounds; one is not; one has a single token."""
        run, (long, middle, short) = self._keeping(checkpoint), prompts(checkpoint)
        expected = reference_logits(checkpoint)
        run.step({0: long[:20]})
        found = run.step({1: middle, 0: long[20:], 2: short[:1]}, cuts={0: 48})
        assert_close(found[0], expected[0][20:])
        assert_close(found[1], expected[1])
        assert_close(found[2], expected[2][:1])

    def test_a_state_at_a_cut_goes_on(self, architecture: str, checkpoint: Path) -> None:
        """Two other requests begin from it, in one batch, and it stays as it is."""
        run, (long, _, short), expected = self._keeping(checkpoint), prompts(checkpoint), reference_logits(checkpoint)
        run.step({0: long}, cuts={0: 32})
        slot = run.slots.cut_slot(0)
        kept = {name: memory[slot].clone() for name, memory in run.slots.memory.items()}
        for request in (1, 2):
            run.table[request + 1, :32] = run.table[1, :32]
            run.tokens[request] += long[:32]
            run.slots.current[request] = slot
        batch = run.batch({1: long[32:], 2: short})
        # Both read one slot, and write to their own.
        targets = torch.tensor([run.slots.cut_slot(1), run.slots.cut_slot(2)])
        assert batch.states is not None
        batch.states.rounds[0].targets.copy_(targets)
        found = _computed(run, batch)
        assert_close(found[: len(long) - 32], expected[0][32:])
        for name, memory in run.slots.memory.items():
            assert torch.equal(memory[slot], kept[name]), f"{name} is written where another request reads it"

    def test_a_step_can_run_again(self, architecture: str, checkpoint: Path) -> None:
        """As after a fault: what it read is unchanged, so it answers the same."""
        run, (long, middle, _) = self._keeping(checkpoint), prompts(checkpoint)
        run.step({0: long[:20], 1: middle[:-1]})
        before = {name: memory.clone() for name, memory in run.slots.memory.items()}
        batch = run.batch({0: long[20:31], 1: middle[-1:]})
        assert batch.states is not None
        first = _computed(run, batch)
        for name, memory in run.slots.memory.items():
            sources = batch.states.rounds[0].sources
            assert torch.equal(memory[sources], before[name][sources]), f"{name} is written where it was read"
        assert torch.equal(_computed(run, batch), first)

    def test_writes_only_the_targets(self, architecture: str, checkpoint: Path) -> None:
        run, (long, middle, _) = self._keeping(checkpoint), prompts(checkpoint)
        run.step({0: long[:20], 1: middle[:-1]})
        before = {name: memory.clone() for name, memory in run.slots.memory.items()}
        batch = run.batch({0: long[20:31], 1: middle[-1:]}, cuts={0: 24})
        _computed(run, batch)
        assert batch.states is not None
        targets = torch.cat([part.targets for part in batch.states.rounds]).tolist()
        for name, memory in run.slots.memory.items():
            for slot in range(memory.shape[0]):
                same = torch.equal(memory[slot].nan_to_num(7.0), before[name][slot].nan_to_num(7.0))
                assert same == (slot not in targets), f"{name}: slot {slot}, where the targets are {targets}"

    def test_a_fresh_request_reads_no_slot(self, architecture: str, checkpoint: Path) -> None:
        """Its source may hold another's state, or NaN. Also where its first step has one token, as a decode has."""
        run, (long, middle, _), expected = self._keeping(checkpoint), prompts(checkpoint), reference_logits(checkpoint)
        run.step({0: long})
        run.tokens[0].clear()
        assert_close(run.step({0: middle[:1]})[0], expected[1][:1])
        run.tokens[0].clear()
        assert_close(run.step({0: middle})[0], expected[1])
        assert_close(run.step({1: middle[:1]})[1], expected[1][:1])

    def test_a_batch_without_states_is_an_error(self, architecture: str, checkpoint: Path) -> None:
        run = self._keeping(checkpoint)
        batch = run.batch({0: prompts(checkpoint)[2]})
        batch.states = None
        with pytest.raises(RuntimeError, match="states"):
            _computed(run, batch)


def _computed(run: PagedRun, batch: ForwardBatch) -> torch.Tensor:
    """Return the logits of all tokens of a batch."""
    run.attention.prepare(batch)
    with torch.inference_mode():
        return run.network.logits(run.network.forward(batch))
