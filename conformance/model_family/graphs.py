"""The suite of ModelFamily: decode batches of one size ask for the same operations, so that they can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from pegboard.conformance.model_family.base import ModelSuite
from pegboard.conformance.rig.model_references import prompts
from pegboard.conformance.rig.paged import PagedRun, PlainAttention
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.layers import LayerSpec, ModelSpec
from pegboard.core.interfaces.model_family import Network
from pegboard.toolkit.graph_trial import Recording, Step, seen
from pegboard.toolkit.kernels.launch import observed


class GraphTests(ModelSuite):
    """What is recorded: operators of torch, launches of kernels and calls of the attention backend, with the shapes of
    their tensors and their numbers. What the backend itself does is its own matter.
    """

    @capability("graph")
    def test_operations_do_not_depend_on_numbers(self, architecture: str, checkpoint: Path) -> None:
        """Of other tokens, at other places, at other lengths."""
        family, network = self._load(checkpoint)
        reason = network.capture_objection()
        if reason is not None:
            assert reason.strip(), "an objection says why"
            pytest.skip(f"the network of {architecture} is not captured: {reason}")
        long, middle, short = prompts(checkpoint)
        first = operations_of(network, family.spec, [long, middle, short])
        second = operations_of(network, family.spec, [short[1:], long[9:50], middle[4:6]])
        assert first, "a decode step asks for nothing"
        for place, (one, other) in enumerate(zip_longest(first, second)):
            assert one == other, f"operation {place} is {one} for one decode batch and {other} for another of its size"


class RecordedAttention(PlainAttention):
    """Plain attention, of which a recording notes the calls alone."""

    def __init__(self, ctx: AttentionContext, recording: Recording) -> None:
        super().__init__(None, ctx)
        self.recording = recording

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
        self.recording.steps.append(("attention", seen((q, k, v)), layer.layer_id))
        with self.recording.pause():
            return super().forward(q, k, v, layer, batch, sinks=sinks)


def operations_of(network: Network, spec: ModelSpec, requests: Sequence[Sequence[int]]) -> list[Step]:
    """Return what a decode step of the last token of each request asks for, logits included."""
    recording = Recording()
    ctx = AttentionContext(spec.layers, 4, torch.float32, torch.device("cpu"), len(requests), spec.max_context_len)
    run = PagedRun(network, spec, attention=RecordedAttention(ctx, recording))
    with recording.pause():
        run.step({request: tokens[:-1] for request, tokens in enumerate(requests)})
    batch = run.batch({request: tokens[-1:] for request, tokens in enumerate(requests)}, decode=True)
    run.attention.prepare(batch)
    recording.steps.clear()
    with torch.inference_mode(), recording, observed(recording.note):
        network.logits(network.forward(batch))
    return recording.steps
