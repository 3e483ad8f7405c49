"""The only file that touches flashinfer: whether it can be used, what is called of it, and on what."""

from __future__ import annotations

import importlib
import os
import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch
from typing_extensions import Unpack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VERSION = "0.7.2.post1"
"""What the wrappers' requirements were read from, and the extra pins: others have hung, or changed answers."""

PACKAGE = "flashinfer-python"
REMEDY = "pip install 'pegboard[flashinfer]'"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a library's kernels are made for. `head_dims` None is any."""

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    head_dims: tuple[int, ...] | None = (64, 128, 256)


class Computing(TypedDict):
    """What both wrappers' `plan` are told of the computation."""

    sm_scale: float
    window_left: int
    logits_soft_cap: float | None
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    o_data_type: torch.dtype


class Wrapper(Protocol):
    """What is used of both wrappers, once they are planned."""

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None: ...


class DecodeWrapper(Wrapper, Protocol):
    """What is used of BatchDecodeWithPagedKVCacheWrapper."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **kwargs: Unpack[Computing],
    ) -> None: ...


class PrefillWrapper(Wrapper, Protocol):
    """What is used of BatchPrefillWithPagedKVCacheWrapper."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        head_dim_vo: int | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        **kwargs: Unpack[Computing],
    ) -> None: ...

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None: ...


class MakesDecode(Protocol):
    def __call__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> DecodeWrapper: ...


class MakesPrefill(Protocol):
    def __call__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> PrefillWrapper: ...


class Merges(Protocol):
    def __call__(self, v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor) -> None: ...


class Fence(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Return once the device has got there."""


class Shell(Protocol):
    """FlashInfer as the backend sees it: the names are the library's own."""

    @property
    def BatchDecodeWithPagedKVCacheWrapper(self) -> MakesDecode: ...  # noqa: N802

    @property
    def BatchPrefillWithPagedKVCacheWrapper(self) -> MakesPrefill: ...  # noqa: N802

    @property
    def merge_state_in_place(self) -> Merges: ...

    def host(self, array: NDArray[np.int32]) -> torch.Tensor:
        """Return a tensor on the host that the device may be told to read without waiting for it."""

    def fence(self) -> Fence:
        """Return the point behind all that the device was told so far."""


class _Event:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        self._event.synchronize()


class CudaShell:
    """The library itself. Importing it takes seconds and needs a driver, so this is made when the backend is built."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        module = importlib.import_module("flashinfer")
        self.BatchDecodeWithPagedKVCacheWrapper: MakesDecode = module.BatchDecodeWithPagedKVCacheWrapper
        self.BatchPrefillWithPagedKVCacheWrapper: MakesPrefill = module.BatchPrefillWithPagedKVCacheWrapper
        self.merge_state_in_place: Merges = module.merge_state_in_place

    def host(self, array: NDArray[np.int32]) -> torch.Tensor:
        # A new pinned block each time: torch keeps it until the copies from it are done.
        return torch.from_numpy(array).pin_memory()

    def fence(self) -> Fence:
        return _Event(self._device)


def objection(device: torch.device) -> str | None:
    """Return why the library cannot be used on a device, or None. Imports nothing of it."""
    if find_spec("flashinfer") is None:
        return f"flashinfer is not installed: {REMEDY}"
    found = _installed(PACKAGE)
    if found != VERSION:
        return f"flashinfer {found or 'of no known version'} is installed, and {VERSION} is needed: {REMEDY}"
    if missing := _missing():
        return f"flashinfer cannot be imported without {', '.join(missing)}: {REMEDY}"
    if device.type != "cuda":
        return f"its kernels run on NVIDIA GPUs, not on {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its kernels need compute capability 8.0 (Ampere) or later"
    if find_spec("flashinfer_jit_cache") is None and not _compiles():
        return "flashinfer compiles its kernels when they are first used, and there is no nvcc: install CUDA's toolkit"
    return None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _missing() -> list[str]:
    """Return what the library requires and is not installed."""
    wanted = (one.partition(";") for one in requires(PACKAGE) or ())
    names = [re.split(r"[^\w.-]", one.strip())[0] for one, _, marker in wanted if "extra" not in marker]
    return [name for name in names if _installed(name) is None]


def _compiles() -> bool:
    beside = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    return shutil.which("nvcc") is not None or beside.exists()
