"""FlashInfer's wrappers: which there are for a kind of layer, and how they are planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from pegboard.plugins.attn_flashinfer.planning import Kind, Pages, Use, uses_tensor_cores
from pegboard.plugins.attn_flashinfer.shell import DecodeWrapper, PrefillWrapper, Wrapper
from pegboard.toolkit.model.eight_bit import is_eight_bit

if TYPE_CHECKING:
    from pegboard.core.interfaces.attention import AttentionContext
    from pegboard.plugins.attn_flashinfer.options import FlashInferOptions
    from pegboard.plugins.attn_flashinfer.shell import Computing, Fence, Shell

INT_WORKSPACE = 8 << 20
"""Bytes of a schedule: what FlashInfer itself takes. It reads parts that it has not written, so they begin as zeros."""

Cache = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Listed:
    """Pages of a batch: on the host as FlashInfer wants them, and `indices` int32 [total] on the device."""

    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    indices: torch.Tensor

    @classmethod
    def of(cls, pages: Pages, indices: torch.Tensor, shell: Shell) -> Listed:
        return cls(shell.host(pages.kv_indptr), shell.host(pages.last_page_len), indices)


@dataclass(frozen=True, slots=True)
class Scaling:
    """What stored keys and values are to be multiplied by; None where they are not scaled."""

    k: float | None = None
    v: float | None = None


WrapperT = TypeVar("WrapperT", bound=Wrapper)


class Fenced(Generic[WrapperT]):
    """A wrapper that is planned again only when the device has read its last plan.

    `plan` writes a schedule into pinned memory and enqueues its copy. Planning again before that copy ran would
    overwrite it, and an earlier batch would run by a later one's schedule. The fence has nearly always passed: the step
    before the last is over when a step is prepared.
    """

    def __init__(self, shell: Shell, wrapper: WrapperT) -> None:
        self._shell = shell
        self._wrapper = wrapper
        self._fence: Fence | None = None

    @contextmanager
    def planning(self) -> Iterator[WrapperT]:
        """Wait until the wrapper may be planned, and note when that is done."""
        if self._fence is not None:
            self._fence.wait()
        yield self._wrapper
        self._fence = self._shell.fence()

    def run(self, q: torch.Tensor, cache: Cache, scaling: Scaling, *, lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and, where it is wanted, its log-sum-exp (else the output again)."""
        found = self._wrapper.run(q, cache, k_scale=scaling.k, v_scale=scaling.v, return_lse=lse)
        return found if isinstance(found, tuple) else (found, found)


class Decoder(Fenced[DecodeWrapper]):
    """One new token per request."""

    def plan(self, kind: Kind, ctx: AttentionContext, listed: Listed) -> None:
        with self.planning() as wrapper:
            wrapper.plan(
                listed.kv_indptr,
                listed.indices,
                listed.last_page_len,
                kind.num_heads,
                kind.num_kv_heads,
                kind.qk_head_dim,
                ctx.page_size,
                **_computing(kind, ctx),
            )


class Prefiller(Fenced[PrefillWrapper]):
    """Any number of new tokens per request."""

    def __init__(self, shell: Shell, wrapper: PrefillWrapper, *, prewarm: bool = False) -> None:
        super().__init__(shell, wrapper)
        self._prewarm = prewarm

    def plan(
        self,
        kind: Kind,
        ctx: AttentionContext,
        qo_indptr: torch.Tensor,
        listed: Listed,
        *,
        causal: bool = True,
        mask: torch.Tensor | None = None,
    ) -> None:
        with self.planning() as wrapper:
            wrapper.plan(
                qo_indptr,
                listed.kv_indptr,
                listed.indices,
                listed.last_page_len,
                kind.num_heads,
                kind.num_kv_heads,
                kind.qk_head_dim,
                ctx.page_size,
                head_dim_vo=kind.v_head_dim,
                packed_custom_mask=mask,
                causal=causal and mask is None,
                **_computing(kind, ctx, masked=mask is not None),
            )
            if self._prewarm:  # a variant that would otherwise be compiled while a graph is captured
                wrapper.prewarm_paged_kv_stride_variant()
                self._prewarm = False


def _computing(kind: Kind, ctx: AttentionContext, *, masked: bool = False) -> Computing:
    return {
        "sm_scale": kind.scale,
        # Windows count places, not slots: a mask has them. One that hides nothing, instead of none, needs no kernels
        # besides those that are there.
        "window_left": ctx.max_context_len if masked and kind.window is not None else kind.window_left,
        "logits_soft_cap": kind.logit_cap,
        "q_data_type": ctx.dtype,
        "kv_data_type": ctx.pool_dtype,
        "o_data_type": ctx.dtype,
    }


@dataclass(frozen=True, slots=True)
class Ground:
    """What all wrappers are made from. `workspace` uint8 holds parts of results: all layers and batches run one after
    another, and so do with one.
    """

    shell: Shell
    options: FlashInferOptions
    ctx: AttentionContext
    workspace: torch.Tensor


class WrapperSet:
    """The wrappers of one kind of layer, made when they are first needed.

    Those of replayed graphs have buffers of their own at fixed addresses, and read what `indices` returns. One graph is
    replayed at a time, so all sizes do with one schedule on the device.
    """

    def __init__(self, kind: Kind, ground: Ground, indices: Callable[[], torch.Tensor]) -> None:
        self.kind = kind
        self._ground = ground
        self._indices = indices
        self._eager: dict[tuple[Use, int], Decoder | Prefiller] = {}
        self._fixed: dict[int, Decoder | Prefiller] = {}
        self._fixed_schedule: torch.Tensor | None = None

    def decoder(self) -> Decoder:
        found = self._eager.get((Use.DECODE, 0))
        if not isinstance(found, Decoder):
            found = self._eager[Use.DECODE, 0] = self._make_decoder(self._new_schedule())
        return found

    def prefiller(self, use: Use, level: int = 0) -> Prefiller:
        """Return the wrapper of a use, and of a level of the cascade: whether there is a mask is known by whether the
        wrapper has had one, so each has its own.
        """
        found = self._eager.get((use, level))
        if not isinstance(found, Prefiller):
            found = self._eager[use, level] = self._make_prefiller(self._new_schedule(), masked=use is Use.MASKED)
        return found

    def fixed(self, size: int) -> Decoder | Prefiller:
        """Return the wrapper of replayed batches of a size."""
        found = self._fixed.get(size)
        if found is None:
            if self._fixed_schedule is None:
                self._fixed_schedule = self._new_schedule()
            make = self._make_decoder if self.kind.even else self._make_prefiller
            found = self._fixed[size] = make(self._fixed_schedule, size)
        return found

    def _new_schedule(self) -> torch.Tensor:
        return torch.zeros(INT_WORKSPACE, dtype=torch.uint8, device=self._ground.ctx.device)

    def _buffer(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.int32, device=self._ground.ctx.device)

    def _make_decoder(self, schedule: torch.Tensor, size: int | None = None) -> Decoder:
        ground = self._ground
        wrapper = ground.shell.BatchDecodeWithPagedKVCacheWrapper(
            ground.workspace,
            "NHD",
            use_cuda_graph=size is not None,
            use_tensor_cores=uses_tensor_cores(self.kind, eight_bit=is_eight_bit(ground.ctx.pool_dtype)),
            paged_kv_indptr_buffer=None if size is None else self._buffer(size + 1),
            paged_kv_indices_buffer=None if size is None else self._indices(),
            paged_kv_last_page_len_buffer=None if size is None else self._buffer(size),
            backend="fa2",  # fa3 reads the KV of a decode 2 to 7 times more slowly on an H100, and auto takes fa3 there
        )
        wrapper.reset_workspace_buffer(ground.workspace, schedule)
        return Decoder(ground.shell, wrapper)

    def _make_prefiller(self, schedule: torch.Tensor, size: int | None = None, *, masked: bool = False) -> Prefiller:
        ground = self._ground
        backend = "fa2" if masked else ground.options.backend
        wrapper = ground.shell.BatchPrefillWithPagedKVCacheWrapper(
            ground.workspace,
            "NHD",
            use_cuda_graph=size is not None,
            qo_indptr_buf=None if size is None else self._buffer(size + 1),
            paged_kv_indptr_buf=None if size is None else self._buffer(size + 1),
            paged_kv_indices_buf=None if size is None else self._indices(),
            paged_kv_last_page_len_buf=None if size is None else self._buffer(size),
            backend=backend,
        )
        wrapper.reset_workspace_buffer(ground.workspace, schedule)
        return Prefiller(ground.shell, wrapper, prewarm=not self.kind.even and backend == "fa2")
