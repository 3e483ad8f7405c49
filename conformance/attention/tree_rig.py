"""Batches for attention backends in which some requests end with draft trees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pegboard.conformance.attention.batches import AttentionRig, Lens, attention_reference
from pegboard.conformance.rig.tails import Tree, as_int64, depths, seen_keys, tree_bits
from pegboard.core.interfaces.attention import AttentionBackend
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode
from pegboard.core.interfaces.layers import LayerSpec

LOUD = 1e4
"""What stands in slots that only other branches see: keys and values so large that no weight could hide them."""

_NO_MEANING = 0x5A5A5A5A5A5A5A5A
"""The bits of tokens whose request has no tail."""


class TreeRig(AttentionRig):
    """The last tokens of request r are the nodes of `trees[r]`. Its new tokens are as many of the last nodes, at most
    all of them; the other nodes are cached.

    The node `loud[r]` of each tree, unless it is None, holds LOUD in all layers. Tokens that see it are not judged.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        lens: Lens,
        trees: Sequence[Tree],
        *,
        loud: Sequence[int | None] = (),
        **more: Any,
    ) -> None:
        super().__init__(layers, lens, **more)
        self.tails = np.array([len(tree) for tree in trees], dtype=np.int64)
        assert bool(((self.tails == 0) | ((self.new <= self.tails) & (self.tails <= self.lens))).all())
        self.trees = trees
        self.bits = [tree_bits(tree) for tree in trees]
        judged = [torch.ones(int(new), dtype=torch.bool) for new in self.new]
        for request, node in enumerate(loud):
            if node is not None:
                self._make_loud(request, node)
                seen = [bool(bits >> node & 1) for bits in self.bits[request][-int(self.new[request]) :]]
                judged[request] = ~torch.tensor(seen)
        self.judged = torch.cat([*judged, torch.empty(0, dtype=torch.bool)])

    def _make_loud(self, request: int, node: int) -> None:
        at = int(self.lens[request] - self.tails[request]) + node
        for index, layer in enumerate(self.layers):
            self.k[index][request][at] = self.v[index][request][at] = LOUD
            if at < self.prefix[request]:
                slot = self.slots[layer.kv_group][request][at]
                self.pool.keys(layer.layer_id)[slot] = self.pool.values(layer.layer_id)[slot] = LOUD

    def batch(self, backend: AttentionBackend, mode: ForwardMode | None = None) -> ForwardBatch:
        batch = super().batch(backend, mode)
        bits, positions = [], batch.positions.clone()
        starts = np.cumsum(self.new) - self.new
        for request, tree in enumerate(self.trees):
            new, start = int(self.new[request]), int(starts[request])
            bits += self.bits[request][-new:] if tree else [_NO_MEANING] * new
            if tree:
                first = int(self.lens[request]) - len(tree)
                positions[start : start + new] = first + torch.tensor(depths(tree)[-new:], device=self.device)
        batch.positions = positions
        batch.tail_lens, batch.tail_lens_cpu = torch.from_numpy(self.tails).to(self.device), self.tails
        batch.tail_bits = torch.from_numpy(as_int64(bits)).to(self.device)
        return batch

    def expected(self, index: int = 0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        parts, layer, start = [], self.layers[index], 0
        for request, tree in enumerate(self.trees):
            new = int(self.new[request])
            q = self.q[index][start : start + new]
            k, v = self.read_back(index, self.k[index][request], self.v[index][request])
            start += new
            if not tree:
                parts.append(attention_reference(q, k, v, layer, sinks))
                continue
            for row, bits in enumerate(self.bits[request][-new:]):
                seen = seen_keys(len(k), len(tree), bits, layer.first_seen)
                parts.append(attend_to(q[row], k[seen], v[seen], layer, sinks)[None])
        return torch.cat(parts)


def attend_to(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return float64 [heads, v dim] of one token's q [heads, qk dim] over all of k [n, kv heads, qk dim] and v."""
    repeats = q.shape[0] // k.shape[1]
    k, v = (one.double().cpu().repeat_interleave(repeats, 1) for one in (k, v))
    scores = torch.einsum("hd,nhd->hn", q.double().cpu(), k) * layer.scale
    if layer.logit_cap is not None:
        scores = torch.tanh(scores / layer.logit_cap) * layer.logit_cap
    sink = torch.full((len(q),), -math.inf) if sinks is None else sinks.cpu()
    weights = torch.cat([scores, sink.double()[:, None]], 1).softmax(1)[:, :-1]
    return torch.einsum("hn,nhd->hd", weights, v)
