"""Attention in Triton kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.attention import AttentionBackend
from pegboard.plugins.attn_triton import interpreter
from pegboard.plugins.attn_triton.launch import (
    MAX_GROUP,
    MAX_HEAD_DIM,
    Blocks,
    Kind,
    decode_blocks,
    extend_blocks,
    extend_tiles,
    power_of_two,
    split_decode,
)
from pegboard.plugins.attn_triton.options import TritonAttentionOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.attention import AttentionContext
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec

LOG2E = math.log2(math.e)
COMMON = {"enable_fp_fusion": True}
"""Multiply-adds may be fused. That is the default up to Triton 3.9, which warns unless one says so."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """The requests of one new token: rows of the row table, lengths and packed tokens, int64 [n]; lengths on the
    host."""

    rows: torch.Tensor
    seq_lens: torch.Tensor
    tokens: torch.Tensor
    seq_lens_cpu: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Parts of `split_size` tokens. `parts` float32 [n, splits, heads, v dim] and `tops` [n, splits, heads] hold their
    results between two kernels, for one layer after another; None where there is one part.
    """

    blocks: Blocks
    splits: int
    split_size: int
    parts: torch.Tensor | None
    tops: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExtendLaunch:
    """`tiles` int32 [n, 2], see `extend_tiles`, of `tokens` new tokens each; of requests that all have a tail, or
    none.
    """

    blocks: Blocks
    tokens: int
    tiles: torch.Tensor
    tails: bool


@dataclass(frozen=True, slots=True)
class Extending:
    """What the extend kernel runs for: requests of several new tokens, `several`, and those that have a tail, `treed`,
    both on the host.

    `starts`, `prefix` and `new` int64 [batch] are of all requests; the last two on the host, too.
    """

    several: NDArray[np.int64]
    treed: NDArray[np.int64]
    prefix_cpu: NDArray[np.int64]
    new_cpu: NDArray[np.int64]
    starts: torch.Tensor
    prefix: torch.Tensor
    new: torch.Tensor


Launches = tuple["DecodeLaunch | None", tuple[ExtendLaunch, ...]]


@dataclass(frozen=True, slots=True)
class Metadata:
    """A batch's `attn_metadata`."""

    decoding: Decoding | None
    extending: Extending | None
    launches: dict[Kind, Launches]


class TritonAttention(AttentionBackend[TritonAttentionOptions]):
    """Requests of one new token run the decode kernels, split over their KV; all others run the extend kernel.

    So a mixed batch takes two or three launches a layer. A layer's K and V are written first, and everything is then
    read through the row table, cached prefix and new tokens alike.
    """

    def __init__(self, options: TritonAttentionOptions, ctx: AttentionContext) -> None:
        from pegboard.plugins.attn_triton import kernels

        super().__init__(options, ctx)
        self._kernels = kernels
        self._kinds = {Kind.of(layer): None for layer in ctx.layers}
        self._arange = torch.arange(ctx.max_batch, device=ctx.device)
        self._multiprocessors = 1
        if ctx.device.type == "cuda":
            self._multiprocessors = torch.cuda.get_device_properties(ctx.device).multi_processor_count

    @classmethod
    def supports(cls, options: TritonAttentionOptions, ctx: AttentionContext) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed: pip install 'pegboard[triton]'"
        if ctx.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"its kernels take float16, bfloat16 and float32, not {str(ctx.dtype).removeprefix('torch.')}"
        if ctx.device.type != "cuda" or interpreter.interpreting():
            objection = interpreter.objection()
            if objection is not None:
                return f"no CUDA device, and no interpreter: {objection}"
            if ctx.dtype == torch.bfloat16:
                return "Triton's interpreter computes bfloat16 products wrongly; set model.dtype to float32 or float16"
        elif torch.cuda.get_device_capability(ctx.device) < (8, 0):
            return "its kernels need compute capability 8.0 (Ampere) or later"
        for layer in ctx.layers:
            if max(layer.qk_head_dim, layer.v_head_dim) > MAX_HEAD_DIM:
                return f"layer {layer.layer_id}: heads of more than {MAX_HEAD_DIM} do not fit into shared memory"
            if layer.num_heads // layer.num_kv_heads > MAX_GROUP:
                return f"layer {layer.layer_id}: more than {MAX_GROUP} query heads share a KV head"
        return None

    def prepare(self, batch: ForwardBatch) -> None:
        new = batch.extend_lens_cpu if batch.forward_mode.is_extend else None
        treed = None
        if batch.tail_lens_cpu is not None and batch.tail_lens_cpu.any():
            treed = batch.tail_lens_cpu > 0
        decoding, extending = self._decoding(batch, new, treed), self._extending(batch, new, treed)
        batch.attn_metadata = metadata = Metadata(decoding, extending, {})
        for kind in self._kinds:
            self._plan(kind, metadata)

    def _decoding(
        self, batch: ForwardBatch, new: NDArray[np.int64] | None, treed: NDArray[np.bool_] | None
    ) -> Decoding | None:
        if batch.batch_size == 0:
            return None
        alone = None if new is None else new == 1
        if treed is not None:
            alone = ~treed if alone is None else alone & ~treed
        if alone is None or bool(alone.all()):
            return Decoding(batch.req_pool_indices, batch.seq_lens, self._first(batch.batch_size), batch.seq_lens_cpu)
        single = np.flatnonzero(alone)
        if len(single) == 0:
            return None
        index = torch.from_numpy(single).to(self.ctx.device, non_blocking=True)
        tokens = index if batch.extend_start_loc is None else batch.extend_start_loc[index]
        return Decoding(batch.req_pool_indices[index], batch.seq_lens[index], tokens, batch.seq_lens_cpu[single])

    def _extending(
        self, batch: ForwardBatch, new: NDArray[np.int64] | None, treed: NDArray[np.bool_] | None
    ) -> Extending | None:
        if new is None:
            if treed is None:
                return None
            starts = self._first(batch.batch_size)
            prefix, ones = batch.seq_lens - 1, torch.ones_like(batch.seq_lens)
            new = np.ones(batch.batch_size, dtype=np.int64)
            none = np.empty(0, dtype=np.int64)
            return Extending(none, np.flatnonzero(treed), batch.seq_lens_cpu - 1, new, starts, prefix, ones)
        several = np.flatnonzero(new > 1 if treed is None else (new > 1) & ~treed)
        trees = several[:0] if treed is None else np.flatnonzero(treed)
        if len(several) + len(trees) == 0:
            return None
        assert batch.extend_prefix_lens_cpu is not None
        assert batch.extend_start_loc is not None
        assert batch.extend_prefix_lens is not None
        assert batch.extend_lens is not None
        on_device = batch.extend_start_loc, batch.extend_prefix_lens, batch.extend_lens
        return Extending(several, trees, batch.extend_prefix_lens_cpu, new, *on_device)

    def _first(self, count: int) -> torch.Tensor:
        if count > len(self._arange):
            self._arange = torch.arange(count, device=self.ctx.device)
        return self._arange[:count]

    def _plan(self, kind: Kind, metadata: Metadata) -> Launches:
        """Return the launches of one kind of layer, made once per batch."""
        found = metadata.launches.get(kind)
        if found is None:
            decode = None if metadata.decoding is None else self._plan_decode(kind, metadata.decoding)
            extends: tuple[ExtendLaunch, ...] = ()
            if (extending := metadata.extending) is not None:
                wanted = (extending.several, False), (extending.treed, True)
                extends = tuple(
                    self._plan_extend(kind, extending, which, tails) for which, tails in wanted if len(which)
                )
            found = metadata.launches[kind] = decode, extends
        return found

    def _plan_decode(self, kind: Kind, decoding: Decoding) -> DecodeLaunch:
        blocks = decode_blocks(kind, self.ctx.dtype.itemsize, self.options)
        seen = decoding.seq_lens_cpu if kind.window is None else np.minimum(decoding.seq_lens_cpu, kind.window)
        programs = kind.num_kv_heads * -(-kind.group // blocks.rows)
        size, splits = split_decode(seen, programs, blocks.keys, self._multiprocessors, self.options.kv_split)
        if splits == 1:
            return DecodeLaunch(blocks, 1, size, None, None)
        shape = (len(seen), splits, kind.num_kv_heads * kind.group)
        tops = torch.empty(shape, dtype=torch.float32, device=self.ctx.device)
        return DecodeLaunch(blocks, splits, size, tops.new_empty((*shape, kind.v_head_dim)), tops)

    def _plan_extend(self, kind: Kind, extending: Extending, which: NDArray[np.int64], tails: bool) -> ExtendLaunch:
        new, prefix = extending.new_cpu[which], extending.prefix_cpu[which]
        blocks = extend_blocks(kind, self.ctx.dtype.itemsize, int(new.max()) * kind.group, self.options, tails=tails)
        tokens = blocks.rows // kind.group
        tiles = torch.from_numpy(extend_tiles(which, new, prefix, tokens, kind.window))
        return ExtendLaunch(blocks, tokens, tiles.to(self.ctx.device, non_blocking=True), tails)

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
        if k is not None and v is not None:
            batch.kv_pool.write(layer.layer_id, batch.kv_groups[layer.kv_group].out_cache_loc, k, v)
        metadata: Metadata = batch.attn_metadata
        decode, extends = self._plan(Kind.of(layer), metadata)
        if q.stride(-1) != 1:
            q = q.contiguous()
        out = q.new_empty((q.shape[0], layer.num_heads, layer.v_head_dim))
        if decode is not None and metadata.decoding is not None:
            self._decode(q, out, layer, batch, metadata.decoding, decode, sinks)
            self._reduce(out, layer, metadata.decoding, decode, sinks)
        if metadata.extending is not None:
            for extend in extends:
                self._extend(q, out, layer, batch, metadata.extending, extend, sinks)
        return out

    def _extend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        extending: Extending,
        launch: ExtendLaunch,
        sinks: torch.Tensor | None,
    ) -> None:
        keys, values = batch.kv_pool.keys(layer.layer_id), batch.kv_pool.values(layer.layer_id)
        table = batch.kv_groups[layer.kv_group].row_table
        self._kernels.extend_kernel[(len(launch.tiles), layer.num_kv_heads)](
            q,
            out,
            keys,
            values,
            q if sinks is None else sinks,
            launch.tiles,
            table,
            batch.req_pool_indices,
            extending.starts,
            extending.prefix,
            extending.new,
            # Placeholders without tails: the kernel is then compiled without them.
            batch.tail_lens if launch.tails else extending.new,
            batch.tail_bits if launch.tails else extending.new,
            *_strides((q, 2), (out, 2), (keys, 2), (values, 2), (table, 1)),
            layer.window or 0,
            *_factors(layer),
            GROUP=layer.num_heads // layer.num_kv_heads,
            TOKENS=launch.tokens,
            BLOCK_M=launch.blocks.rows,
            HAS_TAIL=launch.tails,
            **_constants(layer, launch.blocks, sinks),
        )

    def _decode(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        decoding: Decoding,
        launch: DecodeLaunch,
        sinks: torch.Tensor | None,
    ) -> None:
        keys, values = batch.kv_pool.keys(layer.layer_id), batch.kv_pool.values(layer.layer_id)
        table = batch.kv_groups[layer.kv_group].row_table
        group = layer.num_heads // layer.num_kv_heads
        programs = layer.num_kv_heads * -(-group // launch.blocks.rows)
        # Placeholders where there is nothing to split: the kernel is then compiled without them.
        parts = launch.parts if launch.parts is not None else out[:, None]
        tops = launch.tops if launch.tops is not None else out
        self._kernels.decode_kernel[(len(decoding.rows), programs, launch.splits)](
            q,
            parts,
            tops,
            keys,
            values,
            q if sinks is None else sinks,
            table,
            decoding.rows,
            decoding.tokens,
            decoding.seq_lens,
            *_strides((q, 2), (parts, 3), (tops, 2), (keys, 2), (values, 2), (table, 1)),
            layer.window or 0,
            launch.split_size,
            *_factors(layer),
            GROUP=group,
            BLOCK_H=launch.blocks.rows,
            SPLIT=launch.parts is not None,
            **_constants(layer, launch.blocks, sinks),
        )

    def _reduce(
        self,
        out: torch.Tensor,
        layer: LayerSpec,
        decoding: Decoding,
        launch: DecodeLaunch,
        sinks: torch.Tensor | None,
    ) -> None:
        """Put the parts of each request together."""
        parts, tops = launch.parts, launch.tops
        if parts is None or tops is None:
            return
        self._kernels.reduce_kernel[(len(decoding.rows), layer.num_heads)](
            parts,
            tops,
            out,
            tops if sinks is None else sinks,
            decoding.tokens,
            decoding.seq_lens,
            *_strides((parts, 3), (tops, 2), (out, 2)),
            layer.window or 0,
            launch.split_size,
            DV=layer.v_head_dim,
            BLOCK_S=power_of_two(launch.splits, 2),
            BLOCK_DV=power_of_two(layer.v_head_dim),
            HAS_WINDOW=layer.window is not None,
            HAS_SINKS=sinks is not None,
            **COMMON,
        )


def _strides(*tensors: tuple[torch.Tensor, int]) -> tuple[int, ...]:
    """Return the strides of each tensor's first dimensions, as many as stand beside it."""
    return tuple(stride for tensor, dims in tensors for stride in tensor.stride()[:dims])


def _factors(layer: LayerSpec) -> tuple[float, float]:
    """Return the kernels' `scale` and `cap`, see `_scores` there."""
    if layer.logit_cap is None:
        return layer.scale * LOG2E, 0.0
    return 2.0 * LOG2E * layer.scale / layer.logit_cap, LOG2E * layer.logit_cap


def _constants(layer: LayerSpec, blocks: Blocks, sinks: torch.Tensor | None) -> dict[str, int | bool]:
    """Compile-time constants that extend and decode share."""
    return {
        "D": layer.qk_head_dim,
        "DV": layer.v_head_dim,
        "BLOCK_N": blocks.keys,
        "BLOCK_D": power_of_two(layer.qk_head_dim),
        "BLOCK_DV": power_of_two(layer.v_head_dim),
        "HAS_WINDOW": layer.window is not None,
        "HAS_CAP": layer.logit_cap is not None,
        "HAS_SINKS": sinks is not None,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        **COMMON,
    }
