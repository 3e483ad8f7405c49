"""An imitation of FlashInfer 0.7.2.post1 for machines without a GPU: as strict, in float64, and slow.

Its signatures are those of the original, and so is what it refuses. It is stricter where the original would only be
slow: arrays that `plan` brings to the host have to be there already. It reads pinned memory late, as a copy in a stream
does, so that planning twice without a fence spoils what ran before.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch

from pegboard.toolkit.model.eight_bit import EIGHT_BIT
from tests.plugins.attn_flashinfer.fake_flashinfer_device import Device, DeviceFence, HostTensor, on_device, on_host
from tests.plugins.attn_flashinfer.fake_flashinfer_math import Scores, merge_state_in_place
from tests.plugins.attn_flashinfer.fake_flashinfer_wrapper import Mask, PlannedWrapper, Result, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

DECODE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Query heads per KV head that there are kernels without tensor cores for."""


def _type(name: str | torch.dtype | None, default: torch.dtype) -> torch.dtype:
    if name is None:
        return default
    found = getattr(torch, name) if isinstance(name, str) else name
    assert isinstance(found, torch.dtype)
    return found


def knows(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuse arguments of a method that have a default, are given another value, and are not among `names`."""

    def checking(method: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(method)
        defaults = {one.name: one.default for one in signature.parameters.values() if one.default is not one.empty}

        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs).arguments
            for name in given.keys() & defaults.keys() - set(names):
                value, default = given[name], defaults[name]
                if value is not default and (default is None or value != default):
                    raise NotImplementedError(f"the imitation does not know {name}={value!r}")
            if given.get("args"):
                raise NotImplementedError("the imitation has no custom kernels")
            return method(*args, **kwargs)

        return checked

    return checking


class BatchDecodeWithPagedKVCacheWrapper(PlannedWrapper):
    """One query per request."""

    @knows(
        "kv_layout",
        "use_cuda_graph",
        "use_tensor_cores",
        "paged_kv_indptr_buffer",
        "paged_kv_indices_buffer",
        "paged_kv_last_page_len_buffer",
        "backend",
    )
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._tensor_cores = use_tensor_cores
        self._keep_buffers(paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._reset(float_workspace_buffer, int_workspace_buffer)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        if deprecated_positional_args:
            raise TypeError("arguments behind page_size go by name: by place they are deprecated")
        self._plan_impl(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs
        )  # fmt: skip

    @knows("sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type")
    def _plan_impl(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, pos_encoding_mode: str = "NONE", window_left: int = -1,
        window_right: int = 0, logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16", kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
        non_blocking: bool = True, block_tables: Tensor | None = None, seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:  # fmt: skip
        q_type = _type(q_data_type, torch.float16)
        kv_type = _type(kv_data_type, q_type)
        if not self._tensor_cores and (num_qo_heads // num_kv_heads not in DECODE_GROUPS or kv_type in EIGHT_BIT):
            raise ValueError(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
        self._rows = len(last_page_len)
        self._plan(
            np.arange(len(last_page_len) + 1),
            (indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, head_dim, page_size),
            (q_type, kv_type, _type(o_data_type, q_type)),
            Scores(head_dim**-0.5 if sm_scale is None else sm_scale, logits_soft_cap or 0.0, window_left),
        )

    @knows("k_scale", "v_scale", "return_lse", "window_left", "sinks")
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Result:
        """`sinks` are ignored without a word, as the kernels of fa2 do."""
        found = self._run(q, paged_kv_cache, Mask(), (k_scale, v_scale))
        self._check_window(window_left)
        return found if return_lse else found[0]


class BatchPrefillWithPagedKVCacheWrapper(PlannedWrapper):
    """Any number of queries per request."""

    @knows(
        "kv_layout",
        "use_cuda_graph",
        "qo_indptr_buf",
        "paged_kv_indptr_buf",
        "paged_kv_indices_buf",
        "paged_kv_last_page_len_buf",
        "backend",
    )
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._keep_buffers(paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        if use_cuda_graph and (
            qo_indptr_buf is None or self._buffers is None or len(qo_indptr_buf) != len(self._buffers[0])
        ):
            raise ValueError("qo_indptr_buf should be a torch.Tensor of batch_size + 1 in CUDA graph mode")
        self._most_rows: int | None = None
        self._mask = Mask()

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._reset(float_workspace_buffer, int_workspace_buffer)

    @knows(
        "head_dim_vo",
        "packed_custom_mask",
        "causal",
        "sm_scale",
        "window_left",
        "logits_soft_cap",
        "q_data_type",
        "kv_data_type",
        "o_data_type",
    )
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True, prefix_len_ptr: Tensor | None = None, token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: Tensor | None = None, seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None, block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None, max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, uniform_q_len: int | None = None,
    ) -> None:  # fmt: skip
        v_dim = head_dim_qk if head_dim_vo is None else head_dim_vo
        queries = on_host(qo_indptr, "qo_indptr", len(paged_kv_indptr)).numpy().astype(np.int64)
        q_type = _type(q_data_type, torch.float16)
        self._rows = int(queries[-1])
        if self._graph:
            self._most_rows = self._rows if self._most_rows is None else self._most_rows
            if self._rows > self._most_rows:
                raise ValueError("the total number of rows in qo_indptr in cuda graph mode cannot grow")
        scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self._plan(
            queries,
            (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk, v_dim, page_size),
            (q_type, _type(kv_data_type, q_type), _type(o_data_type, q_type)),
            Scores(scale, logits_soft_cap or 0.0, window_left),
        )
        self._plan_mask(packed_custom_mask, causal, queries)

    def _plan_mask(self, packed: Tensor | None, causal: bool, queries: NDArray[np.int64]) -> None:
        """Take the mask, if there is one. Requests' masks begin as many *bytes* apart as they have bits: so the
        original places those that it has not packed itself.
        """
        kv_lens = self._pinned.schedule.kv_lens
        if packed is None:
            if bool((np.diff(queries) > kv_lens).any()) and causal:
                raise ValueError("a request has more queries than keys")
            self._mask = Mask(causal)
            return
        if self._backend == "fa3":
            raise ValueError("fa3 takes no mask")
        if self._graph:
            raise ValueError("custom_mask_buf must be initialized with a torch.Tensor in cuda graph mode")
        on_device(packed, "packed_custom_mask", torch.uint8, self._float.device)
        bits = np.diff(queries) * kv_lens
        places = np.cumsum(bits) - bits
        if int(places[-1] + (bits[-1] + 7) // 8) > len(packed):
            raise ValueError("packed_custom_mask ends before the last request's bits")
        self._mask = Mask(False, packed, places)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        if not self._planned:
            raise RuntimeError("plan() must complete before prewarming a paged-KV-stride variant.")
        if self._backend != "fa2" or variant != "independent":
            raise RuntimeError("Paged-KV-stride prewarm requires a standard FA2 plan")

    @knows("k_scale", "v_scale", "return_lse", "window_left", "sinks")
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """`sinks` are ignored without a word, as the kernels of fa2 do."""
        found = self._run(q, paged_kv_cache, self._mask, (k_scale, v_scale))
        self._check_window(window_left)
        return found if return_lse else found[0]


class FakeFlashInfer:
    """The imitation, with a device of its own: what a backend is given in place of the library.

    `lax` takes float32 and heads of any size, so that whole suites run over it.
    """

    def __init__(self, *, lax: bool = False) -> None:
        self.device = Device()
        state = {"device_state": self.device, "lax": lax}
        self.BatchDecodeWithPagedKVCacheWrapper: type[BatchDecodeWithPagedKVCacheWrapper] = type(
            "BatchDecodeWithPagedKVCacheWrapper", (BatchDecodeWithPagedKVCacheWrapper,), state
        )
        self.BatchPrefillWithPagedKVCacheWrapper: type[BatchPrefillWithPagedKVCacheWrapper] = type(
            "BatchPrefillWithPagedKVCacheWrapper", (BatchPrefillWithPagedKVCacheWrapper,), state
        )
        self.merge_state_in_place = merge_state_in_place

    def host(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).as_subclass(HostTensor)

    def fence(self) -> DeviceFence:
        return self.device.fence()
