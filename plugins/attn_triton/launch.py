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
    """Return the next power of two; at least 16, the smallest side that `tl.dot` takes."""
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


def extend_blocks(
    kind: Kind, itemsize: int, rows: int, options: TritonAttentionOptions, *, tails: bool = False
) -> Blocks:
    """Return blocks for tiles of up to `rows` useful query rows (tokens times group).

    A tile keeps rows x v dim of float32 in registers, and q and `stages` blocks of k and v in shared memory. For
    128-dim heads in 16 bits, 128 x 64 takes 213 registers of each of 256 threads, which fills a multiprocessor of an
    H200, and runs on wgmma. Float32 has no tensor cores without rounding to tf32: its products take registers instead,
    and these are the largest blocks that do not spill (all checked with ptxas for sm_90). With `tails` each row's bits
    take registers, too.
    """
    dim = power_of_two(max(kind.qk_head_dim, kind.v_head_dim))
    if itemsize == 4:
        most, keys, warps, stages = (64, 32, 8, 2) if dim <= 64 and not tails else (32, 16, 8, 2)
    elif dim <= 128:
        most, keys, warps, stages = 128, 64, 4 if dim <= 64 else 8, 3
    else:
        most, keys, warps, stages = 64, 32, 8, 2
    block_rows = options.block_rows or min(most, power_of_two(rows))
    if block_rows * dim < 64 * 64:
        warps = 4
    return Blocks(max(block_rows, power_of_two(kind.group)), options.block_keys or keys, warps, stages)


def decode_blocks(kind: Kind, itemsize: int, options: TritonAttentionOptions) -> Blocks:
    """Return blocks of a decode. There are few rows, so memory is the limit, and what counts is keys in flight: 16 to
    24 KB of K and V a stage.
    """
    dim = power_of_two(max(kind.qk_head_dim, kind.v_head_dim))
    if itemsize == 4:
        keys, warps, stages = 32 if dim <= 64 else 16, 8, 2
    else:
        keys, warps, stages = 128 if dim <= 64 else 64 if dim <= 128 else 32, 4, 3 if dim <= 256 else 2
    return Blocks(min(power_of_two(kind.group), 64), options.block_keys or keys, warps, stages)


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
