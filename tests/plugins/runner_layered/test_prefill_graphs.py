"""Graphs of prefills: which are recorded, what for want of memory is not, and what is said of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from pegboard.conformance.model_runner.fakes import Rig
from pegboard.conformance.rig.fixed_attention import FixedAttention, FixedExtends
from pegboard.conformance.rig.tape import TapeCapture
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.layers import LayerSpec, StateSpec
from pegboard.plugins.runner_layered.options import LayeredOptions
from pegboard.plugins.runner_layered.prefill_graphs import PrefillGraphs
from pegboard.plugins.runner_layered.runner import LayeredRunner
from tests.plugins.runner_layered.test_graphs import GRAPH, make, start, told

ABLE = {"attention": GRAPH | {"graph_extend"}, "model_family": GRAPH}
SIZES = LayeredOptions(graph_sizes=[2], prefill_graph_sizes=[32, 8, 32])


class LooksAtPrefills(FixedExtends):
    """Decides by the longest prefill, as no graph can."""

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
        if batch.extend_lens is not None:
            assert int(batch.extend_lens.max()) <= 64
        return super().forward(q, k, v, layer, batch, sinks=sinks)


def rig(capture: TapeCapture, options: LayeredOptions = SIZES, attention: type[FixedAttention] = FixedExtends) -> Rig:
    made = make(options, capture, ABLE, attention)
    start(made)
    return made


def prefills(made: Rig, *lens: int) -> dict[str, int]:
    made.step({request: list(range(1, count + 1)) for request, count in enumerate(lens)})
    figures = made.runner.figures()
    return {name: figures[name] for name in ("replayed_prefills", "eager_prefills")}


def test_two_graphs_for_each_size_behind_those_of_decodes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        made = rig(capture := TapeCapture())
    assert made.runner.prefill_graph_sizes() == (8, 32)
    assert (capture.captured, capture.warmed) == (1 + 4, 2 + 4)
    first, second = told(caplog, logging.INFO)
    assert "decode steps of 2 requests" in first
    assert "prefills of 8, 32 tokens" in second
    assert prefills(made, 5, 9) == {"replayed_prefills": 1, "eager_prefills": 0}
    assert prefills(made, 33) == {"replayed_prefills": 1, "eager_prefills": 1}


def test_what_records_none() -> None:
    """Options, attention without the capability, and whatever keeps decodes from being graphs."""
    for options, provides, capture in (
        (LayeredOptions(graph_sizes=[2], prefill_graph_sizes=[]), ABLE, TapeCapture()),
        (LayeredOptions(graphs="off"), ABLE, TapeCapture()),
        (LayeredOptions(graph_sizes=[2]), {**ABLE, "attention": GRAPH}, TapeCapture()),
        (LayeredOptions(), ABLE, None),
    ):
        made = make(options, capture, provides, FixedExtends)
        start(made)
        assert made.runner.prefill_graph_sizes() == ()
        assert "replayed_prefills" not in made.runner.figures()
        if capture is not None:
            assert capture.captured == (0 if options.graphs == "off" else 1)


@pytest.mark.parametrize(
    ("wanted", "most", "sizes"),
    [
        (None, 512, (16, *range(32, 128, 32), *range(128, 513, 64))),
        ([8, 32, 64], 32, (8, 32)),
        ([8, 32, 64], 20, (8, 32)),
        ([8, 32], 64, (8, 32)),
        ([8, 32], None, (8, 32)),
    ],
)
def test_no_graph_is_larger_than_a_step_needs(
    wanted: list[int] | None, most: int | None, sizes: tuple[int, ...]
) -> None:
    options = LayeredOptions(prefill_graph_sizes=wanted)
    made = make(options, TapeCapture(), ABLE, FixedExtends, max_new_tokens=most)
    assert made.runner.prefill_graph_sizes() == sizes


def test_sizes_that_attention_cannot_have(caplog: pytest.LogCaptureFixture) -> None:
    """Those that the operator names are not left out without a word, and are an error where graphs are insisted on."""
    provides = {**ABLE, "attention": GRAPH}
    start(made := make(SIZES, TapeCapture(), provides))
    (warned,) = told(caplog, logging.WARNING)
    assert warned.startswith("runner.prefill_graph_sizes: prefills cannot be graphs with the chosen att")
    for sizes, refused in (([32], True), ([], False), (None, False)):
        options = LayeredOptions(graphs="on", prefill_graph_sizes=sizes)
        reason = LayeredRunner.supports(options, made.runner.ctx)
        assert (reason is not None) == refused
    options = LayeredOptions(graphs="on", prefill_graph_sizes=[32])
    assert LayeredRunner.supports(options, rig(TapeCapture()).runner.ctx) is None


def test_prefills_of_models_whose_layers_keep_states() -> None:
    """Their requests begin in prefills, and go on from states in rounds of any lengths."""
    ctx = rig(TapeCapture()).runner.ctx
    ctx = replace(ctx, spec=replace(ctx.spec, states=(StateSpec("sum", (8,), "float32"),)))
    assert LayeredRunner(SIZES, ctx).prefill_graph_sizes() == ()
    options = LayeredOptions(graphs="on", prefill_graph_sizes=[32])
    assert "states cannot be graphs; set it to []" in str(LayeredRunner.supports(options, ctx))
    assert LayeredRunner.supports(LayeredOptions(graphs="on"), ctx) is None


@torch.inference_mode()
@pytest.mark.parametrize("field", ["overlay", "tail_lens", "taps", "watch"])
def test_what_no_graph_has_a_part_of(field: str) -> None:
    """Each by itself: a replay would leave it out."""
    made = rig(TapeCapture())
    assert isinstance(made.runner, LayeredRunner)
    batch = made.run.batch({0: [1, 2, 3]})
    more: dict[str, Any] = {field: object()}
    graphs: PrefillGraphs | None = vars(made.runner)["_prefills"]
    assert graphs is not None
    assert graphs.hidden(batch) is not None
    assert graphs.hidden(replace(batch, **more)) is None


def test_more_prompts_than_a_graph_has_room_for() -> None:
    made = make(LayeredOptions(graph_sizes=[2], prefill_graph_sizes=[64]), TapeCapture(), ABLE, FixedExtends, 17)
    start(made)
    assert prefills(made, *[2] * 16) == {"replayed_prefills": 1, "eager_prefills": 0}
    assert prefills(made, *[2] * 17) == {"replayed_prefills": 1, "eager_prefills": 1}


def test_the_largest_prefills_are_given_up_first(caplog: pytest.LogCaptureFixture) -> None:
    whole = TapeCapture()
    kept = rig(whole)
    limit = whole.memory() // 3
    del kept
    made = rig(capture := TapeCapture(limit=limit))
    assert 0 < capture.memory() <= limit
    (warned,) = told(caplog, logging.WARNING)
    assert "no memory for prefills of 32 tokens, which run without" in warned
    assert prefills(made, 8) == {"replayed_prefills": 1, "eager_prefills": 0}
    assert prefills(made, 9) == {"replayed_prefills": 1, "eager_prefills": 1}


def test_what_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """A line in the log: decodes are replayed all the same."""
    made = rig(TapeCapture(), attention=LooksAtPrefills)
    (warned,) = told(caplog, logging.WARNING)
    assert "prefills run without, since one cannot be recorded" in warned
    made.step({0: [1, 2], 1: [3]})
    made.step({0: [4], 1: [5]}, decode=True)
    assert made.runner.figures() == {"replayed_steps": 1, "eager_decode_steps": 0}
