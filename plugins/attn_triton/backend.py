"""Attention in Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.attention import AttentionBackend
from pegboard.plugins.attn_triton.blocks import MAX_GROUP, MAX_HEAD_DIM, Blocks, Device, Kind, power_of_two
from pegboard.plugins.attn_triton.options import TritonAttentionOptions
from pegboard.plugins.attn_triton.planning import (
    DecodeLaunch,
    DecodePlans,
    Decoding,
    Extending,
    ExtendLaunch,
    Places,
    PrefixLaunch,
    Tiling,
    decodes_of,
    split,
)
from pegboard.plugins.attn_triton.stored import Stored, widenings
from pegboard.toolkit.kernels import interpreter
from pegboard.toolkit.kernels.launch import launch
from pegboard.toolkit.model.eight_bit import EIGHT_BIT, latents_in_eight_bits

if TYPE_CHECKING:
    from pegboard.core.interfaces.attention import AttentionContext
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec

INTERPRETED = 8
"""Multiprocessors that a CPU is taken to have, so that long decodes are split under the interpreter, too."""
COMMON = {"enable_fp_fusion": True}
"""Multiply-adds may be fused. That is the default up to Triton 3.9, which warns unless one says so."""
TYPES = torch.float16, torch.bfloat16, torch.float32
OBJECTION_TO_BFLOAT16 = "Triton's interpreter computes bfloat16 products wrongly; set model.dtype to float32 or float16"


@dataclass(frozen=True, slots=True)
class Launches:
    """Of one kind of layer."""

    decode: DecodeLaunch | None
    extends: tuple[ExtendLaunch, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """A batch's `attn_metadata`."""

    decoding: Decoding | None
    extending: Extending | None
    tiling: Tiling | None
    launches: dict[Kind, Launches]


class TritonAttention(AttentionBackend[TritonAttentionOptions]):
    """Requests of one new token run the decode kernels, split over their KV; all others run the extend kernel.

    So a mixed batch takes two or three launches a layer. A layer's K and V are written first, and everything is then
    read through the row table, cached prefix and new tokens alike.

    `capability` is the compute capability that block sizes are chosen for, by default the device's.
    """

    def __init__(
        self, options: TritonAttentionOptions, ctx: AttentionContext, capability: tuple[int, int] | None = None
    ) -> None:
        from pegboard.plugins.attn_triton import kernels

        super().__init__(options, ctx)
        self._kernels = kernels
        self._kinds = {Kind.of(layer, ctx.dtype.itemsize): None for layer in ctx.layers}
        multiprocessors = INTERPRETED
        if ctx.device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(ctx.device).multi_processor_count
            capability = capability or torch.cuda.get_device_capability(ctx.device)
        self._device = Device(ctx.dtype.itemsize, ctx.pool_dtype.itemsize, capability or (9, 0))
        self._widenings = widenings(None if interpreter.interpreting() else self._device.capability)
        self._decodes = DecodePlans(ctx, options, self._device, multiprocessors)
        self._places = Places()
        self._arange = torch.arange(self._decodes.most_requests, device=ctx.device)

    @classmethod
    def supports(cls, options: TritonAttentionOptions, ctx: AttentionContext) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed: pip install 'pegboard[triton]'"
        if ctx.dtype not in TYPES:
            return f"its kernels take float16, bfloat16 and float32, not {str(ctx.dtype).removeprefix('torch.')}"
        if ctx.pool_dtype not in (*TYPES, *EIGHT_BIT):
            return f"its kernels do not read KV of {str(ctx.pool_dtype).removeprefix('torch.')}"
        if ctx.device.type != "cuda" or interpreter.interpreting():
            objection = interpreter.objection()
            if objection is not None:
                return f"no CUDA device, and no interpreter: {objection}"
            if torch.bfloat16 in (ctx.dtype, ctx.pool_dtype):
                return OBJECTION_TO_BFLOAT16
        elif torch.cuda.get_device_capability(ctx.device) < (8, 0):
            return "its kernels need compute capability 8.0 (Ampere) or later"
        return latents_in_eight_bits(ctx.layers, ctx.pool_dtype) or next(
            filter(None, map(_objection, ctx.layers)), None
        )

    def prepare(self, batch: ForwardBatch) -> None:
        first = self._first(batch)
        found = split(batch, first)
        tiling = None
        if found.extending is not None:
            tiling = Tiling(batch, found.extending, self._device, self.options, self._places)
        decoding = decodes_of(batch, found, first, self._places)
        batch.attn_metadata = metadata = Metadata(decoding, found.extending, tiling, {})
        for kind in self._kinds:
            metadata.launches[kind] = self._launches(kind, metadata)

    def _first(self, batch: ForwardBatch) -> torch.Tensor:
        """Return 0, 1, 2, ... for the requests of a batch. Fixed prefills need none, and may have more requests than
        any other batch: what graphs of decodes read stays where it is.
        """
        count = 0 if batch.fixed and batch.forward_mode.is_extend else batch.batch_size
        if count > len(self._arange):
            self._arange = torch.arange(count, device=self.ctx.device)
        return self._arange[:count]

    def _launches(self, kind: Kind, metadata: Metadata) -> Launches:
        decode = None if metadata.decoding is None else self._decodes.get(kind, metadata.decoding)
        return Launches(decode, () if metadata.tiling is None else metadata.tiling.launches(kind))

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
        kind = Kind.of(layer, self._device.itemsize)
        launches = self._of(kind, metadata)
        if q.stride(-1) != 1:
            q = q.contiguous()
        out = q.new_empty((q.shape[0], layer.num_heads, layer.v_head_dim))
        stored = Stored.of(layer, kind.num_kv_heads, batch, self._widenings)
        if launches.decode is not None and metadata.decoding is not None:
            if launches.decode.prefix is not None:
                self._prefix(q, stored, kind, layer, metadata.decoding, launches.decode, launches.decode.prefix)
            self._decode(q, out, stored, kind, layer, metadata.decoding, launches.decode, sinks)
            self._reduce(out, layer, metadata.decoding, launches.decode, sinks)
        if metadata.extending is not None:
            for extend in launches.extends:
                self._extend(q, out, stored, kind, layer, batch, metadata.extending, extend, sinks)
        return out

    def _of(self, kind: Kind, metadata: Metadata) -> Launches:
        found = metadata.launches.get(kind)
        if found is None:  # a layer that the context did not name
            found = metadata.launches[kind] = self._launches(kind, metadata)
        return found

    def _extend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        stored: Stored,
        kind: Kind,
        layer: LayerSpec,
        batch: ForwardBatch,
        extending: Extending,
        extend: ExtendLaunch,
        sinks: torch.Tensor | None,
    ) -> None:
        keys, values, table = stored.keys, stored.values, stored.table
        launch(
            self._kernels.extend_kernel,
            (len(extend.tiles), kind.num_kv_heads),
            q,
            out,
            keys,
            values,
            q if sinks is None else sinks,
            extend.tiles,
            table,
            batch.req_pool_indices,
            extending.starts,
            extending.prefix,
            extending.new,
            # Placeholders without tails: the kernel is then compiled without them.
            batch.tail_lens if extend.tails and batch.tail_lens is not None else extending.new,
            batch.tail_bits if extend.tails and batch.tail_bits is not None else extending.new,
            *_strides((q, 2), (out, 2), (keys, 2), (values, 2), (table, 1)),
            layer.window or 0,
            *stored.factors,
            TOKENS=extend.tokens,
            BLOCK_M=extend.blocks.rows,
            maxnreg=extend.blocks.registers,
            HAS_TAIL=extend.tails,
            **_windowed(layer, sinks),
            **_constants(kind, layer, extend.blocks, stored),
        )

    def _decode(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        stored: Stored,
        kind: Kind,
        layer: LayerSpec,
        decoding: Decoding,
        decode: DecodeLaunch,
        sinks: torch.Tensor | None,
    ) -> None:
        results, tops = decode.own_parts(out)
        launch(
            self._kernels.decode_kernel,
            (decoding.count, kind.num_kv_heads * -(-kind.group // decode.blocks.rows), decode.parts),
            q,
            out,
            results,
            tops,
            stored.keys,
            stored.values,
            q if sinks is None else sinks,
            stored.table,
            decoding.rows,
            decoding.tokens,
            decoding.seq_lens,
            *_strides((q, 2), (out, 2), (results, 3), (tops, 2)),
            *_strides((stored.keys, 2), (stored.values, 2), (stored.table, 1)),
            layer.window or 0,
            0 if decode.prefix is None else decoding.prefix,
            *stored.factors,
            LEAST=decode.least,
            BLOCK_H=decode.blocks.rows,
            **({"maxnreg": decode.blocks.registers} if decode.blocks.chunk or kind.latent else {}),
            SPLIT=decode.results is not None,
            **_windowed(layer, sinks),
            **_constants(kind, layer, decode.blocks, stored),
        )

    def _prefix(
        self,
        q: torch.Tensor,
        stored: Stored,
        kind: Kind,
        layer: LayerSpec,
        decoding: Decoding,
        decode: DecodeLaunch,
        prefix: PrefixLaunch,
    ) -> None:
        """Compute the parts of the prefix that all requests share, for all of them."""
        keys, values, table, results, tops = stored.keys, stored.values, stored.table, decode.results, decode.tops
        assert results is not None
        assert tops is not None
        launch(
            self._kernels.prefix_kernel,
            (prefix.tiles, kind.num_kv_heads, prefix.parts),
            q,
            results,
            tops,
            keys,
            values,
            table,
            decoding.rows,
            *_strides((q, 2), (results, 3), (tops, 2), (keys, 2), (values, 2), (table, 1)),
            decoding.count,
            decoding.prefix,
            prefix.size,
            *stored.factors,
            BLOCK_M=prefix.blocks.rows,
            maxnreg=prefix.blocks.registers,
            **_constants(kind, layer, prefix.blocks, stored),
        )

    def _reduce(
        self,
        out: torch.Tensor,
        layer: LayerSpec,
        decoding: Decoding,
        decode: DecodeLaunch,
        sinks: torch.Tensor | None,
    ) -> None:
        """Put the parts of each request together."""
        results, tops = decode.results, decode.tops
        if results is None or tops is None:
            return
        start, shared = (0, 0) if decode.prefix is None else (decoding.prefix, decode.prefix.parts)
        launch(
            self._kernels.reduce_kernel,
            (decoding.count, layer.num_heads),
            results,
            tops,
            out,
            tops if sinks is None else sinks,
            decoding.tokens,
            decoding.seq_lens,
            *_strides((results, 3), (tops, 2), (out, 2)),
            layer.window or 0,
            start,
            shared,
            decode.parts,
            DV=layer.v_head_dim,
            LEAST=decode.least,
            BLOCK_N=decode.blocks.keys,
            BLOCK_S=power_of_two(shared + decode.parts, 2),
            BLOCK_DV=power_of_two(layer.v_head_dim),
            **_windowed(layer, sinks),
            **COMMON,
        )


def _objection(layer: LayerSpec) -> str | None:
    """Return why the kernels do not take a layer."""
    keys = layer.qk_head_dim - layer.v_head_dim if layer.latent else layer.qk_head_dim
    if max(keys, layer.v_head_dim) > MAX_HEAD_DIM:
        return f"layer {layer.layer_id}: heads of more than {MAX_HEAD_DIM} do not fit into shared memory"
    if layer.num_heads // layer.num_kv_heads > MAX_GROUP and not layer.latent:
        return f"layer {layer.layer_id}: more than {MAX_GROUP} query heads share a KV head"
    return None


def _strides(*tensors: tuple[torch.Tensor, int]) -> tuple[int, ...]:
    """Return the strides of each tensor's first dimensions, as many as stand beside it."""
    return tuple(stride for tensor, dims in tensors for stride in tensor.stride()[:dims])


def _windowed(layer: LayerSpec, sinks: torch.Tensor | None) -> dict[str, int | bool]:
    return {"WINDOW": 2 if layer.chunked else int(layer.window is not None), "HAS_SINKS": sinks is not None}


def _constants(kind: Kind, layer: LayerSpec, blocks: Blocks, stored: Stored) -> dict[str, int | bool]:
    """Compile-time constants of all that reads keys.

    Values of 8 bits are padded to 32 dimensions: on an H100, Triton 3.6 computes products of 128 rows with 64 keys of
    16 widened values wrongly, and with more stages reads outside of its shared memory.
    """
    latent = kind.latent and blocks.chunk == 0
    dims = layer.qk_head_dim - layer.v_head_dim if latent else layer.qk_head_dim
    return {
        "GROUP": kind.group,
        "D": layer.qk_head_dim,
        "DV": layer.v_head_dim,
        "BLOCK_N": blocks.keys,
        "BLOCK_D": power_of_two(dims),
        "BLOCK_DV": power_of_two(layer.v_head_dim, 32 if stored.kv else 16),
        "HAS_CAP": layer.logit_cap is not None,
        "CHUNK": blocks.chunk,
        "LATENT": latent,
        "KV": stored.kv,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        **COMMON,
    }
