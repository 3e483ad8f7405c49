"""The suite of ModelRunner: decode steps of models whose layers keep states, recorded and replayed with other slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from pegboard.conformance.model_runner.fakes import WatchedNetwork
from pegboard.conformance.model_runner.graphs import Pair, RunnerGraphTests
from pegboard.conformance.sampler import make_sampling
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.layers import StateSpec

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput


class SumsUp(WatchedNetwork):
    """A network that keeps a state, whatever its family does: the sum of what came out of its last norm, which takes
    the place of that.
    """

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = super().forward(batch)
        assert batch.states is not None
        memory = batch.states.memory["sum"]
        for part in batch.states.rounds:
            before = memory.index_select(0, part.sources)
            if part.fresh is not None:
                before.masked_fill_(part.fresh[:, None], 0)
            after = []
            for run, (first, length) in enumerate(zip(part.firsts.tolist(), part.lengths.tolist(), strict=True)):
                sums = before[run] + hidden[first : first + length].float().cumsum(0)
                hidden[first : first + length] = sums
                after.append(sums[-1])
            memory.index_copy_(0, part.targets, torch.stack(after))
        return hidden


class RunnerStateGraphTests(RunnerGraphTests):
    """Slots that nothing was written to hold NaN, but for slot 0."""

    def _summing(self) -> Pair:
        """Return a pair whose network keeps a state."""
        if "own_weights" in self.capabilities:
            pytest.skip("it runs no network")
        model = self.make_model()
        spec = replace(model.spec, states=(StateSpec("sum", (model.spec.hidden_size,), "float32"),))
        return self.pair(model=replace(model, spec=spec, network=SumsUp(model.network)))

    @capability("graph")
    def test_states_are_part_of_graphs(self) -> None:
        """Each request goes on from its own state, which is in other slots at each step; padding writes to none of
        them.
        """
        pair = self._summing()
        pair.fill(range(8))
        orders = ([0, 1, 2], [5], [5], [7, 6, 5, 4, 3, 2, 1, 0], [2, 0, 1], [6, 3, 0, 7, 1], [4, 2], [1, 4, 3])
        for turn, requests in enumerate(orders):
            before = _states(pair)
            self.check_same(*pair.both(requests, token=11 * turn))
            written = pair.graphs.run.slots.current[list(requests)]
            changed = (_states(pair) != before).any(1).nonzero().flatten().tolist()
            assert set(changed) - {0} == set(written.tolist()), "other slots are written than the step's targets"
            pair.fill([turn % 4], shortest=(30, 4)[turn % 2])
        assert pair.capture.replayed == len(orders)

    @capability("graph")
    def test_graphs_read_and_write_any_slots(self) -> None:
        """Three requests go on from one state, as from a snapshot. Two are written as snapshots, and go on from
        these.
        """
        pair = self._summing()
        pair.fill(range(3))
        slots = pair.graphs.run.slots
        shared, kept, other = int(slots.current[2]), slots.cut_slot(1), slots.cut_slot(0)
        self.check_same(*both_from(pair, [0, 1, 2], [shared, shared, shared], [other, kept, 1]))
        self.check_same(*both_from(pair, [1, 0], [kept, other], [4, 2]))
        self.check_same(*both_from(pair, [1], [kept], [5]))
        assert pair.capture.replayed == 3

    @capability("graph")
    def test_steps_in_which_states_begin_are_no_replays(self) -> None:
        """A graph goes on from states. The slot that is named as the source of a new request may hold anything."""
        pair = self._summing()
        pair.fill(range(3))
        for rig in (pair.graphs, pair.eager):
            rig.run.tokens[1] = []
        self.check_same(*pair.both([0, 1, 2]))
        assert pair.capture.replayed == 0
        self.check_same(*pair.both([2, 1, 0]))
        assert pair.capture.replayed == 1


def both_from(
    pair: Pair, requests: Sequence[int], sources: Sequence[int], targets: Sequence[int]
) -> tuple[ForwardOutput, ForwardOutput]:
    """Run a decode step with graphs and without, with states read from and written to these slots."""
    outputs = []
    for rig in (pair.graphs, pair.eager):
        batch = rig.run.batch({request: [9 + request] for request in requests}, decode=True)
        assert batch.states is not None
        batch.states.rounds[0].sources.copy_(torch.tensor(sources))
        batch.states.rounds[0].targets.copy_(torch.tensor(targets))
        sampling = make_sampling([{}] * len(requests), rig.run.spec.vocab_size)
        outputs.append(rig.runner.execute(batch, sampling, return_logits=True))
    first, second = outputs
    return first, second


def _states(pair: Pair) -> torch.Tensor:
    """Return a copy of the states in all slots of the runner with graphs; 0 in place of NaN."""
    return pair.graphs.run.slots.memory["sum"].nan_to_num(0.0)
