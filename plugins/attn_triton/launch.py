"""Shapes of launches: block sizes by head dimension, tiles of an extend, parts of a decode. Needs no triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.plugins.attn_triton.options import TritonAttentionOptions

MAX_HEAD_DIM = 512
MAX_GROUP = 128
"""Query heads per KV head: all of a token's are rows of one tile."""

MAX_SPLITS = 64
MIN_SPLIT = 128
"""Tokens: a shorter part costs more in the reduction than it saves."""


def power_of_two(value: int, least: int = 16) -> int:
    """The next power of two; at least 16, the smallest side that `tl.dot` takes."""
    return max(least, 1 << (value - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Kind:
    """What the launches of a layer depend on. Layers of one kind share them."""

    kv_group: int
    num_kv_heads: int
    group: int
    qk_head_dim: int
    v_head_dim: int
    window: int | None

    @classmethod
    def of(cls, layer: LayerSpec) -> Kind:
        group = layer.num_heads // layer.num_kv_heads
        return cls(layer.kv_group, layer.num_kv_heads, group, layer.qk_head_dim, layer.v_head_dim, layer.window)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Compile-time sizes of one launch."""

    rows: int
    keys: int
    warps: int
    stages: int


def extend_blocks(kind: Kind, itemsize: int, rows: int, options: TritonAttentionOptions) -> Blocks:
    """Blocks for tiles of up to `rows` useful query rows (tokens times group).

    A tile lives in registers (rows x v dim of float32) and shared memory (q, and `stages` blocks of k and v): 128 x 64 with
    128-dim heads in 16 bits takes 32 KB and 32 KB a stage, of 227 KB on an H100 or H200, so two tiles fit on a multiprocessor. Wider
    heads or float32 halve the keys, then the rows.
    """
    dim = power_of_two(max(kind.qk_head_dim, kind.v_head_dim))
    wide = dim * itemsize  # bytes of a padded key
    most = 128 if wide <= 256 else 64 if wide <= 1024 else 32
    least = power_of_two(kind.group)
    block_rows = options.block_rows or min(most, power_of_two(rows))
    block_keys = options.block_keys or (64 if wide <= 256 else 32 if wide <= 1024 else 16)
    block_rows = max(block_rows, least)
    warps = 8 if block_rows * dim >= 128 * 128 else 4
    return Blocks(block_rows, block_keys, warps, 3 if wide <= 256 else 2)


def decode_blocks(kind: Kind, itemsize: int, options: TritonAttentionOptions) -> Blocks:
    """Blocks of a decode: few rows, so memory is the limit, and more keys in flight are what counts."""
    wide = power_of_two(max(kind.qk_head_dim, kind.v_head_dim)) * itemsize
    keys = options.block_keys or (128 if wide <= 128 else 64 if wide <= 256 else 32 if wide <= 1024 else 16)
    return Blocks(min(power_of_two(kind.group), 64), keys, 4, 3 if wide <= 512 else 2)


def extend_tiles(
    requests: NDArray[np.int64], new: NDArray[np.int64], prefix: NDArray[np.int64], tokens: int, window: int | None
) -> NDArray[np.int32]:
    """Tiles int32 [tiles, 2], (request, first new token), that cover `new` tokens of each of `requests`.

    `tokens` to a tile; those with the most keys first, so that the last ones to run are short.
    """
    counts = -(-new // tokens)
    owner = np.repeat(np.arange(len(requests)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    keys = prefix[owner] + np.minimum(first + tokens, new[owner])
    if window is not None:
        keys = np.minimum(keys, window + tokens)
    order = np.argsort(-keys, kind="stable")
    return np.stack((requests[owner], first), axis=1)[order].astype(np.int32)


def split_decode(
    seen: NDArray[np.int64], programs: int, block_keys: int, multiprocessors: int, fixed: int | None
) -> tuple[int, int]:
    """(tokens of KV per part, parts of the longest request) for requests that see `seen` tokens each.

    `programs` run per request and part. Parts are cut so that every multiprocessor gets two programs, if there is as
    much to read; `fixed` overrides their size.
    """
    longest = int(seen.max())
    size = fixed or int(seen.sum()) * programs // (2 * multiprocessors)
    size = max(size, fixed or MIN_SPLIT, -(-longest // MAX_SPLITS))
    size = -(-size // block_keys) * block_keys
    return size, -(-longest // size)
