"""The suite of ModelRunner: decode steps that are recorded and replayed, which have to be what they are without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pegboard.conformance.attention.batches import QuietPool
from pegboard.conformance.model_runner.base import RunnerModel, RunnerSuite, best_sampler
from pegboard.conformance.model_runner.fakes import CPU, Rig, WatchedNetwork
from pegboard.conformance.rig.fixed_attention import FixedAttention
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.rig.tape import TapeCapture
from pegboard.conformance.sampler import make_sampling
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.forward import Additions, ForwardBatch, ForwardOutput
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.options import NoOptions

if TYPE_CHECKING:
    from pegboard.core.interfaces.layers import LayerSpec

SIZES = (1, 2, 4, 8)
REQUESTS = 9
"""One more than the largest graph has room for."""

_GRAPH = frozenset({"graph"})


class SeesExtras(FixedAttention):
    """What is in ``test.shift``, one number per request, is added to the values that a token reads."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, sinks=sinks)
        shift = batch.extras.get("test.shift")
        return out if shift is None else out + shift[:, None, None]


class Adds:
    """Adds a number to all that a row has. `numbers` has one per row."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers

    def add(self, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        out += self._numbers[:, None]


class AddsColumn(Adds):
    """The numbers are those in ``test.x``, one per request, so that graphs can have them, too."""

    def fixed(self, size: int, extras: Mapping[str, torch.Tensor]) -> Adds:
        assert extras["test.x"].shape == (size,)
        return Adds(extras["test.x"])


class OneSite(WatchedNetwork):
    """A network with one site more, whatever its family has: what comes out of its last norm."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = super().forward(batch)
        if batch.additions is not None:
            batch.additions.add(1, hidden.clone(), hidden)
        return hidden


@dataclass(frozen=True)
class Pair:
    """The runner twice: with graphs, and without. `network` is what both call, but for replays."""

    graphs: Rig
    eager: Rig
    network: WatchedNetwork
    capture: TapeCapture

    def fill(self, requests: Sequence[int], shortest: int = 3) -> None:
        """Give requests a prompt each, of lengths that differ, in place of what they had."""
        draw = np.random.default_rng(shortest)
        for request in requests:
            length = shortest + int(draw.integers(0, 20))
            prompt = draw.integers(0, self.graphs.run.spec.vocab_size, size=length).tolist()
            for rig in (self.graphs, self.eager):
                rig.run.tokens[request] = []
                rig.step({request: prompt}, None)

    def both(self, requests: Sequence[int], token: int = 7) -> tuple[ForwardOutput, ForwardOutput]:
        """Run a decode step of requests in both."""
        new = {request: [token + request] for request in requests}
        first, second = (rig.step(new, decode=True, return_logits=True) for rig in (self.graphs, self.eager))
        return first, second

    def both_with(
        self, requests: Sequence[int], extras: Mapping[str, torch.Tensor], additions: Additions | None = None
    ) -> tuple[ForwardOutput, ForwardOutput]:
        """Run a decode step in both, with what plugins put into batches."""
        outputs = []
        for rig in (self.graphs, self.eager):
            batch = rig.run.batch({request: [9 + request] for request in requests}, decode=True)
            batch.extras.update(extras)
            batch.additions = additions
            sampling = make_sampling([{}] * len(requests), rig.run.spec.vocab_size)
            outputs.append(rig.runner.execute(batch, sampling, return_logits=True))
        first, second = outputs
        return first, second

    def called(self) -> int:
        """Return how often the network was called since the last time."""
        count = len(self.network.tokens)
        self.network.tokens.clear()
        return count


class RunnerGraphTests(RunnerSuite):
    """Graphs are those of `TapeCapture`: what is not static is as it was when the graph was recorded."""

    def pair(
        self, attention: type[FixedAttention] = FixedAttention, model: RunnerModel | None = None, **options: Any
    ) -> Pair:
        """Return the runner with graphs of `SIZES`, started, and the same without; with `options` on top."""
        model = model or self.make_model()
        network, capture = WatchedNetwork(model.network), TapeCapture()
        graphs, eager = (self._graph_rig(model, network, attention, recorder, options) for recorder in (capture, None))
        return Pair(graphs, eager, network, capture)

    def _graph_rig(
        self,
        model: RunnerModel,
        network: WatchedNetwork,
        attention: type[FixedAttention],
        capture: TapeCapture | None,
        options: Mapping[str, Any],
    ) -> Rig:
        spec, dtype, size = model.spec, model.model.dtype, self.page_size
        sizes = () if capture is None else SIZES
        ctx = AttentionContext(spec.layers, size, dtype, CPU, REQUESTS, spec.max_context_len, graph_sizes=sizes)
        backend = attention(NoOptions(), ctx)
        run = PagedRun(network, spec, attention=backend, dtype=dtype, page_size=size, requests=REQUESTS, length=64)
        run.pool = QuietPool(None, KVPoolContext(run.pool.num_slots // size - 1, size, spec.layers, dtype, CPU))
        context = replace(
            self.make_context(run, model, network, best_sampler(spec.vocab_size), ()),
            provides={"attention": attention.PROVIDES, "model_family": _GRAPH},
            capture=capture,
            graph_sizes=sizes,
        )
        runner = self.build(context, **options)
        runner.start(run.pool, *map(torch.from_numpy, run.tables), states=run.slots.memory or None)
        network.tokens.clear()
        return Rig(runner, run)

    def check_same(self, first: ForwardOutput, second: ForwardOutput) -> None:
        """Compare logits and tokens of both. A graph has rows more, so that sums may be taken in another order."""
        __tracebackhide__ = True
        assert first.logits is not None
        assert second.logits is not None
        assert first.logits.shape == second.logits.shape, "logits of padding rows were returned"
        self.check_logits(first.logits, second.logits)
        self.check_tokens(first.next_token_ids, second.next_token_ids.tolist())

    @capability("graph")
    def test_sizes_of_graphs(self) -> None:
        """Ascending, and not beyond what a batch may have."""
        options = self.make_options()
        for most in (1, 3, 64, 256):
            sizes = self.provider_class().graph_sizes(options, most)
            assert list(sizes) == sorted(set(sizes))
            assert sizes
            assert sizes[0] >= 1
            assert sizes[-1] <= most

    @lacks("graph")
    def test_no_sizes_without_graphs(self) -> None:
        assert self.provider_class().graph_sizes(self.make_options(), 64) == ()

    @capability("graph")
    def test_a_replay_is_what_the_step_would_be(self) -> None:
        """In any order of sizes, with whatever a larger batch has left behind, and no Python of the network."""
        pair = self.pair()
        assert pair.capture.captured == len(SIZES)
        pair.fill(range(8))
        pair.called()
        orders = ([0, 1, 2], [5], [3, 1, 7, 0, 2, 6, 5, 4], [2, 4], [6, 0, 3, 1, 5], [1], [7, 3, 2, 0])
        for count, requests in enumerate(orders):
            first, second = pair.both(requests, token=11 * count)
            self.check_same(first, second)
            assert pair.called() == 1, "the network was called for a replay"
        assert pair.capture.replayed == len(orders)
        figures = pair.graphs.runner.figures()
        assert figures["replayed_steps"] == len(orders)
        assert figures["eager_decode_steps"] == 0

    @capability("graph")
    def test_requests_come_and_go_between_replays(self) -> None:
        """Rows get other requests, whose prompts run in between, and lengths shrink with that."""
        pair = self.pair()
        pair.fill(range(6))
        steps = ([0, 1, 2, 3], [0, 1, 2], [3], [5, 4, 3, 2, 1, 0], [0, 5, 1, 4, 2], [4, 3], [2])
        for turn, requests in enumerate(steps):
            self.check_same(*pair.both(requests))
            pair.fill([3 - turn % 4], shortest=(30, 4)[turn % 2])
        assert pair.capture.replayed == len(steps)

    @capability("graph")
    def test_groups_of_layers_are_part_of_graphs(self) -> None:
        """Layers with a window have pages of their own, which a row table of their own says."""
        pair = self.pair(model=self.make_windowed())
        assert pair.capture.captured == len(SIZES)
        pair.fill(range(6), shortest=12)
        steps = ([0, 1, 2, 3], [5], [0, 5, 1, 4, 2], [4, 3], [2])
        for turn, requests in enumerate(steps):
            self.check_same(*pair.both(requests))
            pair.fill([3 - turn % 4], shortest=(30, 4)[turn % 2])
        assert pair.capture.replayed == len(steps)

    @capability("graph")
    def test_answers_outlive_the_next_replay(self) -> None:
        """What a step returned is not changed by those behind it."""
        pair = self.pair()
        pair.fill(range(4))
        first, second = pair.both([0, 1, 2])
        pair.both([3])
        pair.both([2, 1, 0], token=50)
        self.check_same(first, second)

    @capability("graph")
    def test_more_requests_than_any_graph_has(self) -> None:
        pair = self.pair()
        pair.fill(range(REQUESTS))
        pair.called()
        self.check_same(*pair.both(range(REQUESTS)))
        assert pair.called() == 2
        assert pair.graphs.runner.figures() == {"replayed_steps": 0, "eager_decode_steps": 1}

    @capability("graph")
    def test_steps_that_want_more_are_no_replays(self) -> None:
        """Hidden states, logprobs, and samples of some rows only: all as without graphs."""
        pair = self.pair()
        pair.fill(range(3))
        found = []
        for rig in (pair.graphs, pair.eager):
            batch = rig.run.batch({0: [5], 1: [6], 2: [7]}, decode=True)
            batch.logits_indices = torch.tensor([2, 0])
            if "hidden_states" in self.capabilities:
                batch.hidden_rows = torch.tensor([1, 2])
            sampling = make_sampling([{}, {}], rig.run.spec.vocab_size)
            found.append(rig.runner.execute(batch, sampling, return_logits=True))
        first, second = found
        self.check_same(first, second)
        if "hidden_states" in self.capabilities:
            assert first.row_states is not None
            assert second.row_states is not None
            self.check_logits(first.row_states.float(), second.row_states.float())
        self.check_same(*pair.both([0, 1, 2]))

    @capability("graph")
    def test_extras_of_requests_are_part_of_graphs(self) -> None:
        """Padded where they have one part per request; a step with any others runs without."""
        pair = self.pair(SeesExtras)
        pair.fill(range(4))
        for value in (None, 0.5, -2.0, None):
            for requests in ([0, 1, 2], [3, 1, 0, 2]):
                extras = {} if value is None else {"test.shift": torch.arange(len(requests)) * value}
                self.check_same(*pair.both_with(requests, extras))
        assert pair.capture.replayed == 8
        for rig in (pair.graphs, pair.eager):
            batch = rig.run.batch({0: [9], 1: [10]}, decode=True)
            batch.extras["test.other"] = "no tensor"
            rig.runner.execute(batch, make_sampling([{}] * 2, 300))
        assert pair.capture.replayed == 8, "a step was replayed with what its graph does not have"

    @capability("graph")
    @capability("additions")
    def test_additions_are_part_of_graphs(self) -> None:
        """What the column of the step says is added, and nothing where the batch adds nothing, whatever its column
        says. Additions that no graph can have are made without one.
        """
        if "own_weights" in self.capabilities:
            pytest.skip("it runs no network")
        model = self.make_model()
        pair = self.pair(model=replace(model, network=OneSite(model.network)))
        pair.fill(range(4))
        turns = ((2.0, True), (2.0, False), (-3.0, True), (0.5, True), (-3.0, False), (2.0, True))
        for scale, adds in turns:
            for requests in ([0, 1, 2], [1], [3, 1, 0, 2]):
                numbers = torch.arange(1, len(requests) + 1) * scale
                additions = AddsColumn(numbers) if adds else None
                self.check_same(*pair.both_with(requests, {"test.x": numbers}, additions))
        assert pair.capture.replayed == 3 * len(turns)
        numbers = torch.tensor([1.0, -2.0])
        self.check_same(*pair.both_with([2, 0], {"test.x": numbers}, Adds(numbers)))
        assert pair.capture.replayed == 3 * len(turns), "a step was replayed with additions that are not fixable"
