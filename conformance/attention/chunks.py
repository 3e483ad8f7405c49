"""Tests of layers that attend in chunks: a token sees those before it in its own chunk of positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pegboard.conformance.attention.base import DECODES, RAGGED, AttentionSuite
from pegboard.conformance.attention.batches import AttentionRig, make_layer, make_sinks
from pegboard.conformance.attention.tree_rig import TreeRig
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.layers import LayerSpec

_CHAIN = tuple(range(-1, 23))
"""The parents of a tree that has one branch, of 24 nodes."""
_FORKED = (-1, 0, 1, 2, 2, 3, 5, 4, 7, 8)


class AttentionChunkTests(AttentionSuite):
    """With the capability `chunked_attention`."""

    @capability("chunked_attention")
    @pytest.mark.parametrize("chunk", [1, 2, 7, 16, 100])
    def test_chunks(self, chunk: int, device: torch.device) -> None:
        """Requests that begin, end and go on within a chunk, at its edges, and over several of them."""
        for lens in (RAGGED, DECODES, ((0, 40),), ((35, 30),), ((14, 2), (16, 16), (15, 1), (16, 1), (31, 2))):
            self.check_lens(make_layer(window=chunk, chunked=True), lens, device)

    @capability("chunked_attention")
    def test_long_chunks(self, device: torch.device) -> None:
        """Beyond any block that a backend may compute in one go."""
        for lens in (((200, 390), (10, 1)), ((500, 1), (290, 1), (3, 1))):
            self.check_lens(make_layer(2, 1, window=270, chunked=True), lens, device, page_size=16)

    @capability("chunked_attention")
    def test_chunks_of_a_mixed_batch(self, device: torch.device) -> None:
        self.check_lens(make_layer(window=6, chunked=True), RAGGED, device, mode=ForwardMode.MIXED)

    @capability("chunked_attention")
    @pytest.mark.parametrize("chunk", [1, 7, 16])
    def test_pages_before_a_chunk_are_not_read(self, chunk: int, device: torch.device) -> None:
        for lens in (RAGGED, DECODES, ((35, 30),)):
            layers = [make_layer(), make_layer(layer_id=1, window=chunk, kv_group=1, chunked=True)]
            rig = AttentionRig(layers, lens, device=device)
            rig.spoil_behind_windows(1)
            backend = self.make(rig)
            batch = rig.batch(backend)
            with torch.inference_mode():
                backend.prepare(batch)
                self.check(rig, backend.forward(rig.q[1], *rig.new_kv(1), layers[1], batch), 1)

    @capability("chunked_attention")
    @pytest.mark.parametrize("lens", [RAGGED, DECODES], ids=["ragged", "decode"])
    def test_chunks_beside_windows(self, lens: tuple[tuple[int, int], ...], device: torch.device) -> None:
        """Layers of one batch whose chunks and windows have the same size."""
        windowed = self.layer_of((4, 2, 16, 16), 6)
        layers = [make_layer(window=6, chunked=True), windowed, make_layer(window=9, chunked=True), make_layer()]
        rig = AttentionRig([_numbered(layer, at) for at, layer in enumerate(layers)], lens, device=device)
        backend = self.make(rig)
        batch = rig.batch(backend)
        with torch.inference_mode():
            backend.prepare(batch)
            for index, layer in enumerate(rig.layers):
                self.check(rig, backend.forward(rig.q[index], *rig.new_kv(index), layer, batch), index)

    @capability("chunked_attention")
    @capability("logit_cap")
    @capability("sinks")
    def test_chunks_with_cap_and_sinks(self, device: torch.device) -> None:
        layer = make_layer(6, 2, 24, 16, window=6, chunked=True, logit_cap=2.0, sinks=True, scale=0.8)
        for lens in (RAGGED, DECODES):
            self.check_lens(layer, lens, device)

    @capability("chunked_attention")
    @capability("tree_mask")
    @pytest.mark.parametrize("chunk", [1, 3, 9, 64])
    def test_trees_in_chunks(self, chunk: int, device: torch.device) -> None:
        """Chunks are of places, as windows are: what stands in between belongs to other branches."""
        layer = make_layer(2, 1, window=chunk, chunked=True)
        rig = TreeRig([layer], [(4, 24), (7, 10), (60, 10), (5, 1)], [_CHAIN, _FORKED, _FORKED, ()], device=device)
        sinks = make_sinks(layer, device)
        self.check(rig, rig.run(self.make(rig), mode=ForwardMode.MIXED, sinks=sinks), sinks=sinks)

    @lacks("chunked_attention")
    def test_chunks_are_refused(self, device: torch.device) -> None:
        self.check_refused("chunked_attention", make_layer(window=3, chunked=True), device)


def _numbered(layer: LayerSpec, layer_id: int) -> LayerSpec:
    return replace(layer, layer_id=layer_id)
