"""What FlashInfer wants to know of a batch, in plain numpy: neither torch nor flashinfer is needed here.

All of it stays on the host, since `plan` brings what it gets to the host and would wait for the device.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec

    Ints = NDArray[np.int64]

CUDA_CORE_GROUPS = frozenset({1, 2, 3, 4, 6, 8, 16})
"""Query heads per KV head that the decode kernels without tensor cores are made for."""

MERGE_THREADS = 1024
"""Of one block of the kernel that merges two results: it takes a token with all of its heads."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that share a plan."""

    kv_group: int
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    scale: float
    window: int | None
    logit_cap: float | None

    @classmethod
    def of(cls, layer: LayerSpec) -> Kind:
        return cls(
            layer.kv_group,
            layer.num_heads,
            layer.num_kv_heads,
            layer.qk_head_dim,
            layer.v_head_dim,
            layer.scale,
            layer.window,
            layer.logit_cap,
        )

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def even(self) -> bool:
        """Whether keys and values have heads of one size, which the decode wrapper takes for granted."""
        return self.qk_head_dim == self.v_head_dim

    @property
    def window_left(self) -> int:
        """Keys that are seen before the token's own; -1: all."""
        return -1 if self.window is None else self.window - 1


@dataclass(frozen=True, slots=True)
class Lens:
    """Keys, new tokens and tokens in the tail of each request, int64 [batch]. `treed` says whether there are tails."""

    seq: Ints
    new: Ints
    tail: Ints
    treed: bool
    common_prefix: int = 0

    @classmethod
    def of(cls, batch: ForwardBatch) -> Lens:
        seq = batch.seq_lens_cpu
        new = batch.extend_lens_cpu if batch.forward_mode.is_extend else None
        new = np.ones(len(seq), dtype=np.int64) if new is None else new
        tail = batch.tail_lens_cpu
        treed = tail is not None and bool(tail.any())
        tail = np.zeros(len(seq), dtype=np.int64) if tail is None or not treed else tail
        return cls(seq, new, tail, treed, 0 if batch.fixed else batch.common_prefix)

    @property
    def tokens(self) -> int:
        return int(self.new.sum())


class Use(enum.Enum):
    """Which wrappers a batch runs through, in layers of one kind."""

    DECODE = "decode"
    """One new token per request."""
    PREFILL = "prefill"
    """Several, each after all that stands before it."""
    MASKED = "masked"
    """Some requests end with a draft tree: what is seen is given bit by bit."""
    CASCADE = "cascade"
    """The common prefix once, the rest of each request by itself, and both merged."""


def choose(kind: Kind, lens: Lens, *, cascade: bool, itemsize: int) -> Use:
    """Return what a batch runs through. `itemsize` is that of the output's type in bytes."""
    if lens.treed:
        return Use.MASKED
    shares = cascade and lens.common_prefix > 0 and len(lens.seq) > 1 and kind.window is None
    # What is new of a request stands behind the prefix, or else it would see too much of it.
    if shares and merge_fits(kind, itemsize) and int((lens.seq - lens.new).min()) >= lens.common_prefix:
        return Use.CASCADE
    return Use.DECODE if kind.even and bool((lens.new == 1).all()) else Use.PREFILL


def merge_fits(kind: Kind, itemsize: int) -> bool:
    """Return whether a block of the merging kernel has enough threads for all heads of a token."""
    vector = max(16 // itemsize, kind.v_head_dim // 32)
    return kind.num_heads * (kind.v_head_dim // vector) <= MERGE_THREADS


def uses_tensor_cores(kind: Kind, *, eight_bit: bool) -> bool:
    """Return whether decodes are computed on tensor cores: where a KV head serves enough query heads to fill them, and
    wherever there is no other kernel.
    """
    return kind.group >= 4 or eight_bit or kind.group not in CUDA_CORE_GROUPS


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of each request that are read: `kv_indptr` int32 [batch + 1] counts them up, `last_page_len` int32
    [batch] are the keys in the last one, 1 at least. `firsts` int32 [batch] is the first one of a request's pages.
    """

    kv_indptr: NDArray[np.int32]
    last_page_len: NDArray[np.int32]
    firsts: NDArray[np.int32]
    longest: int

    @property
    def total(self) -> int:
        return int(self.kv_indptr[-1])


def list_pages(seq_lens: Ints, first_keys: Ints | int, page_size: int) -> Pages:
    """Return the pages from the one that holds a request's key `first_keys` up to its last one."""
    ends = -(-seq_lens // page_size)
    firsts = np.broadcast_to(np.asarray(first_keys) // page_size, ends.shape)
    counts = ends - firsts
    last = seq_lens - (ends - 1) * page_size
    longest = int(counts.max(initial=0))
    return Pages(indptr(counts), last.astype(np.int32), firsts.astype(np.int32), longest)


def shared_pages(common_prefix: int, page_size: int) -> Pages:
    """Return the pages of the common prefix, as those of one request."""
    return list_pages(np.array([common_prefix], dtype=np.int64), 0, page_size)


def first_keys(lens: Lens, window: int | None) -> Ints:
    """Return the first key that any new token of a request sees.

    The first place that a new token can have is that of the first new token, or of the tail's root.
    """
    if window is None:
        return np.zeros_like(lens.seq)
    return np.maximum(lens.seq - np.where(lens.tail > 0, lens.tail, lens.new) - window + 1, 0)


def indptr(counts: Ints) -> NDArray[np.int32]:
    """Return counts, summed up from 0: int32 [n + 1]."""
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
