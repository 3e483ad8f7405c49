"""What the wrappers of FlashInfer's imitation have in common: buffers, checks, and what runs on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from pegboard.toolkit.kernels.launch import launch
from pegboard.toolkit.model.eight_bit import EIGHT_BIT
from tests.plugins.attn_flashinfer.fake_flashinfer_device import (
    Device,
    HostTensor,
    Pinned,
    Schedule,
    check_aligned,
    on_device,
    on_host,
)
from tests.plugins.attn_flashinfer.fake_flashinfer_math import Scores, attend, causal, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pegboard.toolkit.kernels.launch import Grid

HEAD_DIMS = (64, 128, 256)

Tensor = torch.Tensor
Result = Tensor | tuple[Tensor, Tensor]


class PlannedWrapper:
    """What both wrappers have in common."""

    device_state: ClassVar[Device]
    lax: ClassVar[bool] = False
    """Whether float32 and heads of any size are taken, which the original has no kernels for."""

    def __init__(self, workspace: Tensor, kv_layout: str, graph: bool, backend: str) -> None:
        check_aligned(workspace, "float_workspace_buffer")
        if workspace.dtype != torch.uint8 or bool(workspace.any()):
            raise ValueError("float_workspace_buffer has to be uint8, and zeros when it is first used")
        if kv_layout != "NHD":
            raise KeyError(f"the imitation has the layout NHD, not {kv_layout}")
        if backend not in ("auto", "fa2", "fa3"):
            raise ValueError(f"the imitation has no backend {backend}")
        self._float, self._graph, self._backend = workspace, graph, backend
        self._int: Tensor | None = None
        self._pinned = Pinned()
        self._planned, self._rows = False, 0
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None

    def _reset(self, float_workspace: Tensor, int_workspace: Tensor) -> None:
        for name, one in (("float_workspace_buffer", float_workspace), ("int_workspace_buffer", int_workspace)):
            check_aligned(one, name)
        if int_workspace.dtype != torch.uint8 or bool(int_workspace.any()):
            raise ValueError("int_workspace_buffer has to be uint8 zeros: kernels read parts that plan has not written")
        if self._planned and self._graph:
            raise ValueError("a graph may have been captured with the former workspace")
        self._float, self._int, self._pinned = float_workspace, int_workspace, Pinned()

    def _keep_buffers(self, indptr: Tensor | None, indices: Tensor | None, last: Tensor | None) -> None:
        if not self._graph:
            return
        for name, one in (("indptr", indptr), ("indices", indices), ("last_page_len", last)):
            if one is None:
                raise ValueError(f"the buffer for {name} has to be a tensor in cudagraph mode")
            on_device(one, f"the buffer for {name}", torch.int32, self._float.device)
        assert indptr is not None
        assert indices is not None
        assert last is not None
        if len(indptr) != len(last) + 1:
            raise ValueError("the size of the buffer for indptr should be batch_size + 1")
        self._buffers = indptr, indices, last

    def _stage(self, indptr: Tensor, indices: Tensor, last: Tensor) -> None:
        """Bring the lists to where the kernels read them."""
        if not self._graph:
            self._buffers = indptr.clone(), indices, last.clone()
            return
        assert self._buffers is not None
        if len(last) != len(self._buffers[2]):
            raise ValueError(
                f"the batch size should be fixed in cudagraph mode: {len(last)} instead of {len(self._buffers[2])}"
            )
        if len(indices) > len(self._buffers[1]):
            raise ValueError("the size of indices should be less than or equal to the allocated buffer")
        for buffer, new in zip(self._buffers, (indptr, indices, last), strict=True):
            buffer[: len(new)].copy_(new)

    def _plan(
        self,
        qo_indptr: NDArray[np.int64],
        lists: tuple[Tensor, Tensor, Tensor],
        shape: tuple[int, int, int, int, int],
        types: tuple[torch.dtype, torch.dtype, torch.dtype],
        scores: Scores,
    ) -> None:
        indptr = on_host(lists[0], "indptr")
        last = on_host(lists[2], "last_page_len", len(indptr) - 1)
        indices = on_device(lists[1], "indices", torch.int32, self._float.device)
        heads, kv_heads, dim, v_dim, page_size = shape
        counts = indptr.diff()
        if len(last) == 0 or int(indptr[0]) or bool((counts < 1).any()) or int(indptr[-1]) != len(indices):
            raise ValueError("indptr has to begin with 0, grow with each request and end with the number of indices")
        if bool(((last < 1) | (last > page_size)).any()):
            raise ValueError(f"last_page_len has to be 1 to {page_size}: {last.tolist()}")
        self._check_shape(heads, kv_heads, (dim, v_dim), types)
        if self._int is None:
            self._int = torch.zeros(16, dtype=torch.uint8, device=self._float.device)
        self._stage(indptr, indices, last)
        kv_lens = ((counts - 1) * page_size + last).numpy().astype(np.int64)
        self._pinned.write(Schedule(qo_indptr, kv_lens))
        self.device_state.copy(self._pinned, self._int)
        self._shape, self._types, self._scores, self._planned = shape, types, scores, True

    def _check_shape(
        self, heads: int, kv_heads: int, dims: tuple[int, int], types: tuple[torch.dtype, torch.dtype, torch.dtype]
    ) -> None:
        q, kv, out = types
        allowed = (torch.float16, torch.bfloat16, *((torch.float32,) if self.lax else ()))
        if q not in allowed or out is not q or (kv is not q and kv not in EIGHT_BIT):
            raise ValueError(f"no kernel for queries {q}, keys {kv} and an output {out}")
        if kv in EIGHT_BIT and self._backend == "fa3":
            raise ValueError("fa3 takes 8-bit keys for 8-bit queries only")
        if not self.lax and any(dim not in HEAD_DIMS for dim in dims):
            raise ValueError(f"no kernel for heads of {dims}")
        if heads % kv_heads:
            raise ValueError("num_qo_heads has to be a multiple of num_kv_heads")

    def _run(
        self, q: Tensor, cache: Tensor | tuple[Tensor, Tensor], mask: Mask, scales: tuple[float | None, float | None]
    ) -> tuple[Tensor, Tensor]:
        """Return the output and its log-sum-exp, to the base of 2."""
        if not self._planned or self._int is None or self._buffers is None:
            raise RuntimeError("plan has to be called before run")
        keys, values = self._pages(cache)
        self._check_query(q, keys)
        out = torch.empty((*q.shape[:2], values.shape[3]), dtype=self._types[2], device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        indptr, indices, _ = self._buffers
        factors = tuple(1.0 if scale is None else scale for scale in scales)
        kernel = _Kernel(self, mask, replace(self._scores, scale=self._scores.scale * factors[0]), factors[1])
        launch(kernel, (1,), q, keys, values, indptr, indices, self._int, out, lse)
        return out, lse

    def compute(self, compute: Callable[[Schedule], None], workspace: Tensor) -> None:
        """Run by the schedule that is in the device's memory now."""
        self._pinned.run(compute, self.device_state.schedules[workspace.data_ptr()])

    def _pages(self, cache: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if not isinstance(cache, tuple):
            raise KeyError("the imitation takes a pair of caches")
        _, kv_heads, dim, v_dim, page_size = self._shape
        for one, size in zip(cache, (dim, v_dim), strict=True):
            if one.dim() != 4 or tuple(one.shape[1:]) != (page_size, kv_heads, size):
                raise ValueError(f"a cache is {list(one.shape)}; planned: [pages, {page_size}, {kv_heads}, {size}]")
            if one.dtype is not self._types[1]:
                raise ValueError(f"the dtype of a cache {one.dtype} is not what was planned, {self._types[1]}")
            if one.stride(-1) != 1:
                raise ValueError("the last dimension of a cache must be contiguous")
        return cache

    def _check_query(self, q: Tensor, keys: Tensor) -> None:
        heads, _, dim, _, _ = self._shape
        if isinstance(q, HostTensor) or q.device != keys.device:
            raise ValueError("q has to be on the device")
        if tuple(q.shape[1:]) != (heads, dim):
            raise ValueError(f"q is {list(q.shape)}; planned: {heads} heads of {dim}")
        if q.dtype is not self._types[0]:
            raise ValueError(f"the dtype of q {q.dtype} is not what was planned, {self._types[0]}")
        if q.stride(-1) != 1:
            raise ValueError("the last dimension of q must be contiguous")
        if len(q) != self._rows:
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({self._rows})")

    def _check_window(self, window_left: int | None) -> None:
        if window_left is not None and window_left != self._scores.window_left:
            raise AssertionError("window_left is not what was planned")


@dataclass(frozen=True, slots=True)
class Mask:
    """What each query sees: all keys, those up to its own, or what the bits of a request say, which begin `places`
    bytes behind the first one.
    """

    causal: bool = False
    packed: Tensor | None = None
    places: NDArray[np.int64] | None = None

    def of(self, request: int, queries: int, keys: int, device: torch.device) -> Tensor:
        if self.packed is not None and self.places is not None:
            return unpack(self.packed, int(self.places[request]), queries, keys)
        if self.causal:
            return causal(queries, keys, device)
        return torch.ones((queries, keys), dtype=torch.bool, device=device)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What runs when it is launched, and again when a graph is replayed: by the numbers in its buffers, and with what
    was planned when it was launched.
    """

    wrapper: PlannedWrapper
    mask: Mask
    scores: Scores
    v_scale: float

    def __getitem__(self, grid: Grid, /) -> Callable[..., object]:
        return self._run

    def _run(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        indptr: Tensor,
        indices: Tensor,
        workspace: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        def compute(schedule: Schedule) -> None:
            for request, length in enumerate(schedule.kv_lens[: len(indptr) - 1].tolist()):
                start, stop = schedule.qo_indptr[request : request + 2].tolist()
                pages = indices[int(indptr[request]) : int(indptr[request + 1])].long()
                k, v = (_take(one, pages)[:length] for one in (keys, values))
                some = q[start:stop]
                answer, own = attend(some, k, v, self.mask.of(request, len(some), len(k), q.device), self.scores)
                out[start:stop] = answer * self.v_scale
                lse[start:stop] = own

        self.wrapper.compute(compute, workspace)


def _take(cache: Tensor, pages: Tensor) -> Tensor:
    """Return the tokens of pages in float64; torch cannot index 8-bit floats."""
    if cache.dtype in EIGHT_BIT:
        return cache.view(torch.uint8)[pages].view(cache.dtype).flatten(0, 1).double()
    return cache[pages].flatten(0, 1).double()
