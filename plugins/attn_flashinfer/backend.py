"""Attention in FlashInfer's kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from pegboard.core.interfaces.attention import AttentionBackend
from pegboard.core.interfaces.errors import Unsupported
from pegboard.plugins.attn_flashinfer.options import FlashInferOptions
from pegboard.plugins.attn_flashinfer.planning import Kind, Lens, Use, choose, indptr
from pegboard.plugins.attn_flashinfer.shell import CudaShell, Limits, objection
from pegboard.plugins.attn_flashinfer.step import Seen, Step, View, views_of
from pegboard.plugins.attn_flashinfer.wrappers import Decoder, Ground, Listed, Prefiller, Scaling, WrapperSet
from pegboard.toolkit.model.eight_bit import is_eight_bit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.attention import AttentionContext
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.plugins.attn_flashinfer.shell import Shell

LN2 = math.log(2.0)
LARGE_GROUP = 8


@dataclass(frozen=True, slots=True)
class Planned:
    """The wrapper that has a batch's plan, and the one of the common prefix, where that is computed by itself."""

    wrapper: Decoder | Prefiller
    shared: Prefiller | None = None


@dataclass(frozen=True, slots=True)
class Metadata:
    """A batch's `attn_metadata`."""

    lens: Lens
    planned: dict[Kind, Planned]


class FlashInferAttention(AttentionBackend[FlashInferOptions]):
    """Each kind of layer has wrappers of its own, and all that a batch needs are planned anew before it runs.

    `shell` is the library, by default the one that is installed.
    """

    limits: ClassVar[Limits] = Limits()
    """What the library's kernels are made for."""
    prefix_pays_from = 8192
    """A cascade takes two more launches a layer, and a plan more on the host."""

    def __init__(self, options: FlashInferOptions, ctx: AttentionContext, shell: Shell | None = None) -> None:
        super().__init__(options, ctx)
        self._shell = CudaShell(ctx.device) if shell is None else shell
        kinds = dict.fromkeys(Kind.of(layer) for layer in ctx.layers)
        mib = options.workspace_mib
        if mib is None:
            mib = 512 if any(kind.group >= LARGE_GROUP for kind in kinds) else 128
        # Zeros at first, as the wrappers ask.
        workspace = torch.zeros(mib << 20, dtype=torch.uint8, device=ctx.device)
        self._ground = Ground(self._shell, options, ctx, workspace)
        self._fixed_indices: dict[tuple[int, int | None], torch.Tensor] = {}
        self._sets = {kind: self._make_set(kind) for kind in kinds}
        if ctx.device.type == "cuda":
            self._compile()

    @classmethod
    def supports(cls, options: FlashInferOptions, ctx: AttentionContext) -> str | None:
        return cls.unfit(options, ctx) or objection(ctx.device)

    @classmethod
    def unfit(cls, options: FlashInferOptions, ctx: AttentionContext) -> str | None:
        """Return what the kernels cannot compute of the layers, if there is anything; asks nothing of the machine."""
        if ctx.dtype not in cls.limits.dtypes:
            return f"its kernels take {_names(cls.limits.dtypes)}, not {_name(ctx.dtype)}"
        eight_bit = is_eight_bit(ctx.pool_dtype)
        if ctx.pool_dtype is not ctx.dtype and not eight_bit:
            return f"its kernels do not read KV of {_name(ctx.pool_dtype)} beside queries of {_name(ctx.dtype)}"
        if eight_bit and options.backend == "fa3":
            return "backend fa3 reads 8-bit KV for 8-bit queries only; set it to fa2"
        dims = cls.limits.head_dims
        for layer in ctx.layers:
            if layer.chunked:
                return f"layer {layer.layer_id}: its kernels do not attend in chunks"
            if layer.latent:
                return f"layer {layer.layer_id}: it reads keys and values, and no latents (MLA)"
            for dim in (layer.qk_head_dim, layer.v_head_dim):
                if dims is not None and dim not in dims:
                    known = ", ".join(map(str, dims))
                    return f"layer {layer.layer_id}: its kernels take heads of {known}, not of {dim}"
        return None

    def prepare(self, batch: ForwardBatch) -> None:
        lens = Lens.of(batch)
        if batch.fixed and lens.treed:
            raise Unsupported("flashinfer", "tree_mask", "graphs are replayed without masks")
        batch.attn_metadata = Metadata(lens, {})
        if lens.tokens:
            self._plan(self._sets, batch)

    def _plan(self, kinds: Iterable[Kind], batch: ForwardBatch) -> None:
        """Plan kinds of layers for a batch, all of them: a wrapper that is left out runs by the last batch's plan."""
        metadata: Metadata = batch.attn_metadata
        lens = metadata.lens
        itemsize = self.ctx.dtype.itemsize
        uses = {kind: choose(kind, lens, cascade=self.options.cascade, itemsize=itemsize) for kind in kinds}
        views = {kind: views_of(kind, use, lens) for kind, use in uses.items()}
        wanted = dict.fromkeys(view for some in views.values() for view in some)
        buffers: dict[View, torch.Tensor] = {}
        if batch.fixed:
            buffers = {view: self._indices_of(view.kv_group, view.window) for view in wanted}
        seen = Step(batch, lens, self.ctx, self._shell).see(wanted, buffers)
        qo_indptr = self._shell.host(indptr(lens.new))
        for kind, use in uses.items():
            own = seen[views[kind][-1]]
            if batch.fixed:
                metadata.planned[kind] = self._plan_fixed(kind, batch.batch_size, qo_indptr, own)
            elif use is Use.CASCADE:
                metadata.planned[kind] = self._plan_cascade(kind, qo_indptr, seen[views[kind][0]], own, lens.tokens)
            elif use is Use.DECODE:
                decoder = self._sets[kind].decoder()
                decoder.plan(kind, self.ctx, own.listed)
                metadata.planned[kind] = Planned(decoder)
            else:
                prefiller = self._sets[kind].prefiller(use)
                prefiller.plan(kind, self.ctx, qo_indptr, own.listed, mask=own.mask)
                metadata.planned[kind] = Planned(prefiller)

    def _plan_fixed(self, kind: Kind, size: int, qo_indptr: torch.Tensor, own: Seen) -> Planned:
        wrapper = self._sets[kind].fixed(size)
        if isinstance(wrapper, Decoder):
            wrapper.plan(kind, self.ctx, own.listed)
        else:
            wrapper.plan(kind, self.ctx, qo_indptr, own.listed)
        return Planned(wrapper)

    def _plan_cascade(self, kind: Kind, qo_indptr: torch.Tensor, prefix: Seen, own: Seen, tokens: int) -> Planned:
        wrappers = self._sets[kind]
        shared, rest = wrappers.prefiller(Use.CASCADE, 0), wrappers.prefiller(Use.CASCADE, 1)
        whole = self._shell.host(indptr(_array(tokens)))
        shared.plan(kind, self.ctx, whole, prefix.listed, causal=False)
        rest.plan(kind, self.ctx, qo_indptr, own.listed)
        return Planned(rest, shared)

    def _make_set(self, kind: Kind) -> WrapperSet:
        return WrapperSet(kind, self._ground, lambda: self._indices_of(kind.kv_group, kind.window))

    def _indices_of(self, kv_group: int, window: int | None) -> torch.Tensor:
        """Return the buffer that replayed batches of all sizes read page indices from."""
        found = self._fixed_indices.get((kv_group, window))
        if found is None:
            longest = self.ctx.max_context_len if window is None else min(window, self.ctx.max_context_len)
            pages = -(-longest // self.ctx.page_size) + 1  # a window need not begin with a page
            length = pages * max(self.ctx.max_batch, *self.ctx.graph_sizes, 1)
            found = torch.zeros(length, dtype=torch.int32, device=self.ctx.device)
            self._fixed_indices[kv_group, window] = found
        return found

    def _compile(self) -> None:
        """Have kernels compiled now that would otherwise be while the first requests wait."""
        one = self._shell.host(indptr(_array(1)))
        indices = torch.zeros(1, dtype=torch.int32, device=self.ctx.device)
        for kind, wrappers in self._sets.items():
            listed = Listed(one, self._shell.host(_array(1).astype(np.int32)), indices)
            wrappers.prefiller(Use.PREFILL).plan(kind, self.ctx, one, listed)
            if kind.even:
                wrappers.decoder().plan(kind, self.ctx, listed)

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
        pool = batch.kv_pool
        if k is not None and v is not None:
            pool.write(layer.layer_id, batch.kv_groups[layer.kv_group].out_cache_loc, k, v)
        if q.shape[0] == 0:
            return q.new_empty((0, layer.num_heads, layer.v_head_dim))
        planned = self._planned(Kind.of(layer), batch)
        if q.stride(-1) != 1:
            q = q.contiguous()
        cache, scaling = self._cache(pool, layer), Scaling()
        if is_eight_bit(self.ctx.pool_dtype):
            scaling = Scaling(*pool.scales(layer.layer_id))
        wanted = sinks is not None or planned.shared is not None
        out, lse = planned.wrapper.run(q, cache, scaling, lse=wanted)
        if planned.shared is not None:
            self._shell.merge_state_in_place(out, lse, *planned.shared.run(q, cache, scaling, lse=True))
        return out if sinks is None else with_sinks(out, lse, sinks)

    def _planned(self, kind: Kind, batch: ForwardBatch) -> Planned:
        metadata: Metadata = batch.attn_metadata
        if kind not in metadata.planned:  # a layer that the context did not name
            self._sets.setdefault(kind, self._make_set(kind))
            self._plan([kind], batch)
        return metadata.planned[kind]

    def _cache(self, pool: KVPool, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as pages [pages, page size, kv heads, dim]; not a copy."""
        keys, values = pool.keys(layer.layer_id), pool.values(layer.layer_id)
        size = self.ctx.page_size
        return keys.view(-1, size, *keys.shape[1:]), values.view(-1, size, *values.shape[1:])


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return an output [tokens, heads, dim] as if a logit without a value had been there: `sinks` [heads], against the
    log-sum-exp [tokens, heads] of the others, whose base is 2. FlashInfer's own `sinks` do nothing in fa2.
    """
    return out * torch.sigmoid(lse * LN2 - sinks.float())[..., None].to(out.dtype)


def _array(value: int) -> NDArray[np.int64]:
    return np.array([value], dtype=np.int64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " and ".join(map(_name, dtypes))
