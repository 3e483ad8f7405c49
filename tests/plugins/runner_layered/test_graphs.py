"""When the layered runner has graphs, what it says where it has none, and where memory is short."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

from pegboard.conformance.attention.batches import QuietPool
from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.model_runner.base import best_sampler
from pegboard.conformance.model_runner.fakes import CPU, Rig
from pegboard.conformance.rig.fixed_attention import FixedAttention
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.rig.tape import TapeCapture
from pegboard.conformance.sampler import make_sampling
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.graphs import Replay
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.runner_layered.options import LayeredOptions
from pegboard.plugins.runner_layered.runner import LayeredRunner

T = TypeVar("T")

GRAPH = frozenset({"graph"})
ABLE = {"attention": GRAPH, "model_family": GRAPH}


class Kit(ModelRunnerContract):
    """The suite's rig, without its tests."""

    provider = "layered"
    __test__ = False


class Looks(FixedAttention):
    """Decides by the longest request, as no graph can."""

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
        assert int(batch.seq_lens.max()) <= 64
        return super().forward(q, k, v, layer, batch, sinks=sinks)


def make(
    options: LayeredOptions,
    capture: TapeCapture | None,
    provides: Mapping[str, frozenset[str]] = ABLE,
    attention: type[FixedAttention] = FixedAttention,
    requests: int = 8,
    max_new_tokens: int | None = None,
) -> Rig:
    kit = Kit()
    model = kit.make_model()
    spec = model.spec
    sizes = LayeredRunner.graph_sizes(options, 8)
    backend = attention(
        NoOptions(), AttentionContext(spec.layers, 4, torch.float32, CPU, requests, 64, graph_sizes=sizes)
    )
    run = PagedRun(model.network, spec, attention=backend, requests=requests, length=64)
    run.pool = QuietPool(None, KVPoolContext(requests * 16, 4, spec.layers, torch.float32, CPU))
    ctx = kit.make_context(run, model, model.network, best_sampler(spec.vocab_size), ())
    ctx = replace(ctx, capture=capture, provides=provides, graph_sizes=sizes, max_new_tokens=max_new_tokens)
    return Rig(LayeredRunner(options, ctx), run)


def start(rig: Rig) -> None:
    rig.runner.start(rig.run.pool, *map(torch.from_numpy, rig.run.tables))


def decodes(rig: Rig, count: int) -> dict[str, int]:
    rig.step({request: [5 + request, 6] for request in range(count)}, None)
    rig.step({request: [7] for request in range(count)}, decode=True)
    return rig.runner.figures()


def told(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """Return what the runner itself has said: what else is logged meanwhile depends on what ran before."""
    runner = LayeredRunner.__module__.rpartition(".")[0]
    return [one.getMessage() for one in caplog.records if one.name.startswith(runner) and one.levelno >= level]


def test_each_size_is_warmed_twice_and_recorded() -> None:
    capture = TapeCapture()
    start(make(LayeredOptions(), capture))
    assert (capture.captured, capture.warmed) == (4, 8)


def test_all_sizes_write_their_logits_into_one_buffer() -> None:
    """Of the largest: 23 sizes up to 256 with logits of their own took 1.1 GiB for a vocabulary of 128k."""
    found: list[torch.Tensor] = []

    class Noted(TapeCapture):
        def capture(self, run: Callable[[], T]) -> tuple[Replay, T]:
            replay, logits = super().capture(run)
            assert isinstance(logits, torch.Tensor)
            found.append(logits)
            return replay, logits

    rig = make(LayeredOptions(), Noted())
    start(rig)
    assert [len(logits) for logits in found] == [8, 4, 2, 1]
    assert len({logits.untyped_storage().data_ptr() for logits in found}) == 1
    assert decodes(rig, 3)["replayed_steps"] == 1


def test_sizes_are_those_of_the_options() -> None:
    assert LayeredRunner.graph_sizes(LayeredOptions(), 5) == (1, 2, 4, 5)
    assert LayeredRunner.graph_sizes(LayeredOptions(graph_sizes=[32, 3, 3, 16]), 20) == (3, 16, 20)
    assert LayeredRunner.graph_sizes(LayeredOptions(graphs="off"), 20) == ()
    with pytest.raises(ValueError, match="graph_sizes"):
        LayeredOptions(graph_sizes=[0])


def test_off_records_nothing_and_has_no_such_capability() -> None:
    capture, options = TapeCapture(), LayeredOptions(graphs="off")
    rig = make(options, capture)
    start(rig)
    assert capture.captured == 0
    assert decodes(rig, 2) == {}
    assert options.provides(frozenset({"graph", "taps"})) == {"taps"}


@pytest.mark.parametrize("lacking", ["attention", "model_family"])
def test_what_switched_graphs_off_is_named_once(lacking: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = make(LayeredOptions(), TapeCapture(), {**ABLE, lacking: frozenset()})
    start(rig)
    decodes(rig, 2)
    (warned,) = told(caplog, logging.WARNING)
    assert f"the chosen {lacking} cannot be part of one" in warned


def test_a_network_may_object(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As one with experts does, whose family has the capability."""
    capture = TapeCapture()
    rig = make(LayeredOptions(), capture)
    network = type(rig.runner.ctx.network)
    monkeypatch.setattr(network, "capture_objection", lambda self: "its experts are counted on the host")
    with caplog.at_level(logging.WARNING):
        start(rig)
    assert capture.captured == 0
    assert "its experts are counted on the host" in caplog.text


def test_a_cpu_without_graphs_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        start(make(LayeredOptions(), None))
    assert not told(caplog, logging.INFO)


def test_on_is_refused_before_weights_are_read() -> None:
    """With key, value and remedy."""
    ctx = make(LayeredOptions(), None).runner.ctx
    options = LayeredOptions(graphs="on")
    reason = LayeredRunner.supports(options, ctx)
    assert reason == "runner.graphs is 'on', but nothing records graphs on cpu; set it to auto or off"
    assert LayeredRunner.supports(options, replace(ctx, capture=TapeCapture())) is None
    assert "model_family" in str(LayeredRunner.supports(options, replace(ctx, capture=TapeCapture(), provides={})))
    assert LayeredRunner.supports(LayeredOptions(), replace(ctx, capture=None)) is None


def test_what_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """An error where graphs are insisted on, and else a line in the log; steps run as ever."""
    with pytest.raises(ConfigError, match=r"runner.graphs is 'on'.*looks at data.*set it to auto or off"):
        start(make(LayeredOptions(graphs="on"), TapeCapture(), attention=Looks))
    rig = make(LayeredOptions(), TapeCapture(), attention=Looks)
    start(rig)
    (warned,) = told(caplog, logging.WARNING)
    assert "looks at data" in warned
    decodes(rig, 2)


def test_the_largest_sizes_are_given_up_first(caplog: pytest.LogCaptureFixture) -> None:
    whole = TapeCapture()
    start(kept := make(LayeredOptions(), whole))
    limit = whole.memory() // 2
    del kept
    rig = make(LayeredOptions(graphs="on"), capture := TapeCapture(limit=limit))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        start(rig)
    assert 0 < capture.memory() <= limit
    warned, recorded = told(caplog, logging.INFO)
    assert "no memory for decode steps of 8 requests" in warned
    assert "lower memory.max_total_tokens" in warned
    assert "decode steps of 1, 2, 4 requests" in recorded
    assert decodes(rig, 3) == {"replayed_steps": 1, "eager_decode_steps": 0}
    assert decodes(rig, 5) == {"replayed_steps": 1, "eager_decode_steps": 1}


def test_no_memory_for_any(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="no memory for any"):
        start(make(LayeredOptions(graphs="on"), TapeCapture(limit=10)))
    rig = make(LayeredOptions(), TapeCapture(limit=10))
    start(rig)
    assert decodes(rig, 2)["replayed_steps"] == 0


def test_late_recordings_that_fail_are_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Of steps with extras of plugins."""
    capture = TapeCapture()
    rig = make(LayeredOptions(graph_sizes=[2]), capture)
    start(rig)
    capture.limit = capture.memory()
    warmed = capture.warmed
    caplog.clear()
    for _ in range(3):
        batch = rig.run.batch({0: [5], 1: [6]}, decode=True)
        batch.extras["test.one"] = torch.ones(2)
        rig.runner.execute(batch, make_sampling([{}, {}], rig.run.spec.vocab_size))
    assert capture.warmed == warmed + 2
    (warned,) = told(caplog, logging.WARNING)
    assert "decode steps of 2 requests with test.one run without: no memory is left" in warned
