"""Batches that are captured once and replayed, over one pool and row tables that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.conformance.attention.batches import (
    CPU,
    AttentionRig,
    Lens,
    QuietPool,
    attention_reference,
    make_sinks,
    scales_of,
)
from pegboard.core.interfaces.attention import AttentionBackend, AttentionContext
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.toolkit.graphs import StaticBatch, StaticExtend
from pegboard.toolkit.model.eight_bit import is_eight_bit

if TYPE_CHECKING:
    from pegboard.core.interfaces.graphs import GraphCapture, Replay

Shape = tuple[int, int, int]
"""Of an extend batch: tokens, and room for requests of several new tokens, and of one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a layer answered, and what is right: both [size, heads, v dim], padding behind the real requests. Of an
    extend batch both are [real tokens, heads, v dim].
    """

    layer: LayerSpec
    out: torch.Tensor
    expected: torch.Tensor
    real: int


@dataclass(slots=True)
class _Graph:
    """One size or shape: its batch, the layers' q, k and v, and the graph with what it fills."""

    static: StaticBatch | StaticExtend
    inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    replay: Replay | None = None
    outs: Sequence[torch.Tensor] = ()


class FixedRig:
    """Captures a decode batch of a size, or an extend batch of a shape, when it is first asked for, and replays it from
    then on. `sizes` are requests.

    Each step has new requests: new lengths, rows, pages and numbers. All slots but theirs hold NaN, slot 0 included,
    until padding is written there.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        sizes: tuple[int, ...],
        longest: int,
        *,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.layers, self.sizes = tuple(layers), sizes
        self.page_size, self.dtype, self.device, self.kv_dtype = page_size, dtype, device, kv_dtype
        groups = 1 + max(layer.kv_group for layer in layers)
        pages = groups * max(sizes) * -(-longest // page_size) + 2
        kept = dtype if kv_dtype is None else kv_dtype
        self.pool = QuietPool(None, KVPoolContext(pages, page_size, self.layers, kept, device))
        if is_eight_bit(kept):
            for layer in layers:
                self.pool.set_scales(layer.layer_id, *scales_of(layer.layer_id))
        shape = max(sizes) + 3, longest + page_size
        self.tables = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(groups)]
        self.sinks = [make_sinks(layer, device) for layer in layers]
        self._graphs: dict[int | Shape, _Graph] = {}
        self._steps = 0

    def context(self, max_batch: int | None = None) -> AttentionContext:
        """Return what to build the backend from."""
        return AttentionContext(
            self.layers,
            self.page_size,
            self.dtype,
            self.device,
            max_batch or max(self.sizes),
            self.tables[0].shape[1],
            kv_dtype=self.kv_dtype,
            graph_sizes=self.sizes,
        )

    @torch.inference_mode()
    def step(self, backend: AttentionBackend, capture: GraphCapture, size: int, lens: Sequence[int]) -> list[Answer]:
        """Replay a batch of `size` whose first requests have so many tokens of KV, the new ones included."""
        rig = self._next([(length - 1, 1) for length in lens])
        graph = self._graphs.get(size)
        if graph is None:
            static = StaticBatch(size, self.tables, self.pool, backend)
            graph = self._graphs[size] = _Graph(static, [self._inputs(layer, size) for layer in self.layers])
        self._move_in(rig)
        batch = graph.static.fill(rig.batch(backend))
        padding = [self._fill(graph, rig, index) for index in range(len(self.layers))]
        self._run(backend, capture, graph)
        self._check_pool(rig, padded=len(lens) < size)
        answers = []
        for index, layer in enumerate(self.layers):
            q, k, v = padding[index]
            idle = attention_reference(q, *rig.read_back(index, k, v), layer, self.sinks[index])
            right = torch.cat([rig.expected(index, self.sinks[index]), *[idle] * (size - batch.real_size)])
            answers.append(Answer(layer, graph.outs[index], right, batch.real_size))
        return answers

    @torch.inference_mode()
    def extend(self, backend: AttentionBackend, capture: GraphCapture, shape: Shape, lens: Lens) -> list[Answer]:
        """Replay an extend batch of a shape, whose requests have so many tokens of KV, and new ones behind them."""
        rig = self._next(lens)
        graph = self._graphs.get(shape)
        if graph is None:
            static = StaticExtend(*shape, self.tables, self.pool, backend)
            graph = self._graphs[shape] = _Graph(static, [self._inputs(layer, shape[0]) for layer in self.layers])
        self._move_in(rig)
        graph.static.fill(rig.batch(backend, ForwardMode.EXTEND))
        for index in range(len(self.layers)):
            self._fill(graph, rig, index)
        self._run(backend, capture, graph)
        tokens = int(rig.new.sum())
        self._check_pool(rig, padded=tokens < shape[0])
        return [
            Answer(layer, graph.outs[index][:tokens], rig.expected(index, self.sinks[index]), tokens)
            for index, layer in enumerate(self.layers)
        ]

    def _next(self, lens: Lens) -> AttentionRig:
        """Return new requests."""
        self._steps += 1
        return AttentionRig(
            self.layers,
            lens,
            page_size=self.page_size,
            dtype=self.dtype,
            device=self.device,
            seed=self._steps,
            kv_dtype=self.kv_dtype,
        )

    def _inputs(self, layer: LayerSpec, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kinds = (
            (layer.num_heads, layer.qk_head_dim),
            (layer.num_kv_heads, layer.qk_head_dim),
            (layer.num_kv_heads, layer.v_head_dim),
        )
        q, k, v = (torch.zeros((size, *kind), dtype=self.dtype, device=self.device) for kind in kinds)
        return q, k, v

    def _move_in(self, rig: AttentionRig) -> None:
        """Have a rig's requests in the pool and the row tables, and no others. Row 0 is that of padding."""
        for layer_id in self.pool.layer_ids:
            self.pool.fill(layer_id, torch.nan)
            for mine, its in self._buffers(rig, layer_id):
                mine.view(torch.uint8)[: len(its)].copy_(its.view(torch.uint8))
        rig.rows = rig.rows + 1
        for mine, its in zip(self.tables, rig.tables, strict=True):
            mine.fill_(self.pool.num_slots - 1)
            mine[0, 0] = 0
            mine[1 : 1 + len(its), : its.shape[1]] = its
        self._before = [
            [mine.clone().view(torch.uint8) for mine, _ in self._buffers(rig, layer_id)]
            for layer_id in self.pool.layer_ids
        ]

    def _buffers(self, rig: AttentionRig, layer_id: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        mine, its = self.pool, rig.pool
        return [(mine.keys(layer_id), its.keys(layer_id)), (mine.values(layer_id), its.values(layer_id))]

    def _fill(self, graph: _Graph, rig: AttentionRig, index: int) -> list[torch.Tensor]:
        """Give a layer its q, k and v. Return those of padding, [1, heads, dim] each: one for all of it."""
        random = torch.Generator().manual_seed(1000 + self._steps)
        real, padding = len(rig.q[index]), []
        for static, numbers in zip(graph.inputs[index], (rig.q[index], *rig.new_kv(index)), strict=True):
            static[:real] = numbers
            padding.append(torch.randn(static[:1].shape, generator=random).to(self.dtype).to(self.device))
            static[real:] = padding[-1]
        return padding

    def _run(self, backend: AttentionBackend, capture: GraphCapture, graph: _Graph) -> None:
        batch = graph.static.batch

        def forward() -> list[torch.Tensor]:
            return [
                backend.forward(*inputs, layer, batch, sinks=sinks)
                for inputs, layer, sinks in zip(graph.inputs, self.layers, self.sinks, strict=True)
            ]

        backend.prepare(batch)
        if graph.replay is None:
            capture.warm(forward)
            graph.replay, graph.outs = capture.capture(forward)
        graph.replay()

    def _check_pool(self, rig: AttentionRig, padded: bool) -> None:
        """Fail where a slot has changed that is not one of the new tokens', or of padding."""
        for layer, before in zip(self.layers, self._before, strict=True):
            slots = rig.new_slots(layer.kv_group).tolist() + [0] * padded
            changed = np.zeros(self.pool.num_slots, dtype=bool)
            for old, (mine, _) in zip(before, self._buffers(rig, layer.layer_id), strict=True):
                now = mine.view(torch.uint8)
                changed |= (old != now).flatten(1).any(1).cpu().numpy()
            changed[slots] = False
            assert not changed.any(), f"layer {layer.layer_id}: slots {np.flatnonzero(changed).tolist()} changed"
