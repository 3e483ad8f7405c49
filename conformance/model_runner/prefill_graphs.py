"""The suite of ModelRunner: prefills and mixed batches that are recorded and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch

from pegboard.conformance.model_runner.graphs import Pair, RunnerGraphTests
from pegboard.conformance.rig.fixed_attention import FixedExtends
from pegboard.conformance.sampler import make_sampling
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.forward import EmbedOverlay, Taps
from pegboard.core.interfaces.sampling import LogprobRequest

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput

Step = Mapping[int, int]
"""New tokens by request."""


def _add(batch: ForwardBatch, what: str, hidden: int) -> None:
    """Put something into a batch that graphs have no part of. `hidden` is the model's hidden size."""
    if what == "overlay":
        batch.overlay = EmbedOverlay(torch.tensor([1]), torch.ones(1, hidden))
    elif what == "taps":
        batch.taps = Taps((0,))
    else:
        batch.extras["test.one"] = torch.ones(1)


class RunnerPrefillGraphTests(RunnerGraphTests):
    """As for decode steps. Nothing says how a runner chooses sizes: an author names options for them."""

    prefill_graphs: ClassVar[Mapping[str, Any]] = {}
    """Options with which batches of up to 24 tokens are graphs and larger ones are not; {} if prefills never are."""

    def pair_of_prefills(self) -> Pair:
        """Return the runner with graphs of prefills, started, and the same without; requests 0 and 1 have some KV."""
        if not self.prefill_graphs:
            pytest.skip(f"{self.subject.name} has no graphs of prefills")
        pair = self.pair(FixedExtends, **self.prefill_graphs)
        sizes = pair.graphs.runner.prefill_graph_sizes()
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == 24
        assert pair.eager.runner.prefill_graph_sizes() == ()
        self.prefill(pair, {0: 9, 1: 14})
        pair.called()
        return pair

    def prefill(
        self, pair: Pair, step: Step, sampled: Sequence[int] | None = None, none: bool = False
    ) -> tuple[ForwardOutput, ForwardOutput]:
        """Run new tokens of requests in both, and sample as `Rig.step` does, or nothing."""
        draw = np.random.default_rng(sum(step.values()))
        vocab = pair.graphs.run.spec.vocab_size
        new = {request: draw.integers(0, vocab, size=count).tolist() for request, count in step.items()}
        rows = None if none else ()
        first, second = (
            rig.step(new, rows, sampled=sampled, return_logits=not none) for rig in (pair.graphs, pair.eager)
        )
        return first, second

    @capability("graph")
    def test_a_replayed_prefill_is_what_the_batch_would_be(self) -> None:
        """Whatever a larger batch has left behind, with any prefixes, and decodes in between or in the same batch."""
        pair = self.pair_of_prefills()
        steps: tuple[Step, ...] = (
            {2: 5},
            {3: 24},
            {0: 1, 4: 7},
            {5: 2, 1: 3},
            {0: 1, 1: 1, 2: 1},
            {2: 6, 0: 1, 3: 1, 5: 9},
            {4: 1},
            {6: 17},
            {3: 2},
        )
        for step in steps:
            self.check_same(*self.prefill(pair, step))
            assert pair.called() == 1, "the network was called for a replay"
            self.check_same(*pair.both(list(step)))
            assert pair.called() == 1
        figures = pair.graphs.runner.figures()
        assert figures["replayed_prefills"] == len(steps) + 1
        assert figures["eager_prefills"] == 0
        assert figures["replayed_steps"] == len(steps)

    @capability("graph")
    def test_replayed_chunks(self) -> None:
        """Nothing is sampled, and what comes behind them finds their KV."""
        pair = self.pair_of_prefills()
        for count in (20, 3, 24):
            first, second = self.prefill(pair, {2: count}, none=True)
            assert first.next_token_ids.tolist() == second.next_token_ids.tolist() == []
        assert pair.called() == 3, "the network was called for a replay"
        self.check_same(*self.prefill(pair, {2: 4, 0: 1, 3: 8}, sampled=[3, 2]))

    @capability("graph")
    def test_answers_outlive_the_next_replayed_prefill(self) -> None:
        pair = self.pair_of_prefills()
        first, second = self.prefill(pair, {2: 5, 3: 4})
        self.prefill(pair, {4: 9})
        pair.both([2])
        self.check_same(first, second)

    @capability("graph")
    def test_more_tokens_than_any_graph_has(self) -> None:
        pair = self.pair_of_prefills()
        self.check_same(*self.prefill(pair, {2: 25}))
        assert pair.called() == 2
        assert pair.graphs.runner.figures()["eager_prefills"] == 1

    @capability("graph")
    def test_replayed_prefills_have_what_is_wanted_of_them(self) -> None:
        """Last hidden states and logprobs of prompts, of any of their tokens."""
        pair, outputs = self.pair_of_prefills(), []
        hidden = [0, 4] if "hidden_states" in self.capabilities else []
        logprobs = ([1, 3], [7, 8], [LogprobRequest(), LogprobRequest(top=2)])
        for rig in (pair.graphs, pair.eager):
            new = {2: [5, 6, 7, 8], 0: [9]}
            wanted = logprobs if "input_logprobs" in self.capabilities else None
            outputs.append(rig.run_wanted(new, hidden_rows=hidden, logprobs=wanted, sampled=[0]))
        self.prefill(pair, {3: 6})
        first, second = outputs
        self.check_tokens(first.next_token_ids, second.next_token_ids.tolist())
        if first.row_states is not None and second.row_states is not None:
            self.check_logits(first.row_states.float(), second.row_states.float())
        if first.prompt_logprobs is not None and second.prompt_logprobs is not None:
            torch.testing.assert_close(first.prompt_logprobs.token_logprobs, second.prompt_logprobs.token_logprobs)

    @capability("graph")
    def test_prefills_with_more_are_no_replays(self) -> None:
        """Values of plugins, and what a runner with the capability for it can have besides: a graph has no part of
        them.
        """
        pair = self.pair_of_prefills()
        replayed = pair.graphs.runner.figures()["replayed_prefills"]
        for what in ("extras", *sorted({"overlay", "taps"} & self.capabilities)):
            outputs = []
            for rig in (pair.graphs, pair.eager):
                batch = rig.run.batch({2: [4, 5, 6]})
                batch.logits_indices = torch.tensor([2])
                _add(batch, what, rig.run.spec.hidden_size)
                sampling = make_sampling([{}], rig.run.spec.vocab_size)
                outputs.append(rig.runner.execute(batch, sampling, return_logits=True))
            self.check_same(*outputs)
            assert pair.graphs.runner.figures()["replayed_prefills"] == replayed, what
