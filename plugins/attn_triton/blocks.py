"""Block sizes, by what a launch computes and for which device. Needs no triton.

Tables and no tuning at run time: a kernel that tries sizes when it is first called cannot be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.plugins.attn_triton.options import TritonAttentionOptions

MAX_HEAD_DIM = 512
MAX_GROUP = 128
"""Query heads per KV head: all of a token's are rows of one tile."""


def power_of_two(value: int, least: int = 16) -> int:
    """Return the next power of two; at least 16, the smallest side that `tl.dot` takes."""
    return max(least, 1 << (value - 1).bit_length())


_LATENT_HEADS = {4: 16, 2: 32}
"""By the size of q's numbers: the most query heads of a latent in a tile, whose 512 numbers of output each have to fit
into registers.
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the launches of a layer depend on. Layers of one kind share them.

    The query heads of a latent layer are cut into groups of equal size. So it has several KV heads, which are the same
    memory.
    """

    kv_group: int
    num_kv_heads: int
    group: int
    qk_head_dim: int
    v_head_dim: int
    window: int | None
    latent: bool = False

    @classmethod
    def of(cls, layer: LayerSpec, itemsize: int = 2) -> Kind:
        """Return the kind of a layer, whose q has numbers of so many bytes."""
        group = layer.num_heads // layer.num_kv_heads
        if layer.latent:
            group = next(most for most in range(min(group, _LATENT_HEADS[itemsize]), 0, -1) if group % most == 0)
        sizes = layer.qk_head_dim, layer.v_head_dim
        return cls(layer.kv_group, layer.num_heads // group, group, *sizes, layer.window, layer.latent)

    @property
    def heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def dim(self) -> int:
        """The larger head dimension, as it is padded; of latents that of values."""
        return power_of_two(self.v_head_dim if self.latent else max(self.qk_head_dim, self.v_head_dim))


@dataclass(frozen=True, slots=True)
class Device:
    """What sizes depend on beside the layer: the type of q, bytes of a stored key's number, compute capability."""

    itemsize: int
    kv_itemsize: int
    capability: tuple[int, int]

    @property
    def width(self) -> int:
        """Bits of the products' operands, or 8 where 16 bits are widened from 8."""
        return 32 if self.itemsize == 4 else 8 * min(self.itemsize, self.kv_itemsize)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Compile-time sizes of one launch: query rows and keys of a tile, and how many dimensions of the heads a product
    for scores takes at a time (0: all of them).
    """

    rows: int
    keys: int
    warps: int
    stages: int
    chunk: int = 0

    @property
    def registers(self) -> int:
        """All that a thread may have. By itself ptxas sometimes takes half of it, and spills."""
        return min(255, 65536 // (32 * self.warps))


_HOPPER, _AMPERE, _SMALL = 227, 163, 99
"""KiB of shared memory that a block may have, by which tables go: 9.0 and 10.0, with wgmma; 8.0; all others."""

_MEMORY = {(9, 0): _HOPPER, (10, 0): _HOPPER, (10, 3): _HOPPER, (8, 0): _AMPERE}

_BY_DIM = dict[int, Blocks]
"""By the largest padded head dimension that an entry is for."""

_WIDE, _WIDE_DECODE = Blocks(32, 32, 8, 2), Blocks(64, 16, 8, 2)
"""For heads of more than 256, on any device."""

_LATENT = Blocks(32, 32, 8, 2)
"""For latents in 16 bits, of any size on any device, extends and decodes."""

_EXTEND_FLOAT32: _BY_DIM = {
    64: Blocks(64, 32, 8, 2, 32),
    256: Blocks(32, 32, 8, 2, 32),
    512: Blocks(16, 32, 8, 2, 32),
}
_DECODE_FLOAT32: _BY_DIM = {
    128: Blocks(64, 32, 8, 2, 32),
    256: Blocks(32, 32, 8, 2, 32),
    512: Blocks(16, 32, 8, 2, 32),
}
"""Float32 has no tensor cores without rounding to tf32. Its products keep their operands in registers, which do not
suffice for whole heads: so scores are added up over chunks of 32 dimensions, on any device.
"""

_EXTEND: dict[tuple[int, int], _BY_DIM] = {
    (_HOPPER, 8): {64: Blocks(128, 64, 8, 3), 128: Blocks(128, 128, 8, 5), 256: Blocks(64, 64, 8, 2), 512: _WIDE},
    (_HOPPER, 16): {64: Blocks(128, 64, 4, 3), 128: Blocks(128, 64, 8, 5), 256: Blocks(64, 32, 8, 2), 512: _WIDE},
    (_HOPPER, 32): _EXTEND_FLOAT32,
    (_AMPERE, 8): {64: Blocks(128, 32, 8, 3), 128: Blocks(64, 64, 8, 3), 256: Blocks(32, 32, 8, 2), 512: _WIDE},
    (_AMPERE, 16): {64: Blocks(128, 64, 8, 3), 128: Blocks(64, 64, 8, 3), 256: Blocks(64, 32, 8, 2), 512: _WIDE},
    (_AMPERE, 32): _EXTEND_FLOAT32,
    (_SMALL, 8): {64: Blocks(64, 32, 8, 2), 128: Blocks(64, 64, 8, 2), 256: Blocks(32, 32, 8, 2), 512: _WIDE},
    (_SMALL, 16): {64: Blocks(128, 64, 8, 2), 128: Blocks(64, 32, 8, 2), 256: Blocks(32, 32, 8, 2), 512: _WIDE},
    (_SMALL, 32): _EXTEND_FLOAT32,
}
"""Tiles of queries. They keep rows x v dim of float32 in registers, and q and `stages` blocks of k and v in shared
memory. For 128-dim heads in 16 bits, 128 x 64 takes 213 registers of each of 256 threads, which fills a multiprocessor
of an H100, and runs on wgmma. None of them spills, see docs/gpu-kernels.md.

K and V are reached through the row table, and Triton's pipeliner divides `stages - 1` by the levels of indirection:
with 3 stages it waits for each load that it has just issued, with 5 it loads a block ahead. No other block of the
multiprocessor hides that here: 8,192 tokens take 16% less time with 5 on an H100 (docs/gpu-results.md).
"""

_FEW = {2: 32 * 128, 4: 16 * 128}
"""By the size of q's numbers: up to this product of rows and dimensions four warps do."""

_DECODE: dict[tuple[int, int], _BY_DIM] = {
    (_HOPPER, 8): {64: Blocks(64, 128, 4, 3), 128: Blocks(64, 64, 2, 5), 256: Blocks(64, 32, 4, 3), 512: _WIDE_DECODE},
    (_HOPPER, 16): {64: Blocks(64, 128, 8, 3), 128: Blocks(64, 64, 4, 3), 256: Blocks(64, 32, 4, 3), 512: _WIDE_DECODE},
    (_HOPPER, 32): _DECODE_FLOAT32,
    (_AMPERE, 8): {64: Blocks(64, 128, 4, 3), 128: Blocks(32, 64, 4, 3), 256: Blocks(16, 32, 4, 2), 512: _WIDE_DECODE},
    (_AMPERE, 16): {64: Blocks(64, 128, 8, 3), 128: Blocks(32, 64, 4, 3), 256: Blocks(16, 32, 4, 3), 512: _WIDE_DECODE},
    (_AMPERE, 32): _DECODE_FLOAT32,
    (_SMALL, 8): {64: Blocks(64, 128, 4, 3), 128: Blocks(32, 64, 4, 3), 256: Blocks(16, 32, 4, 2), 512: _WIDE_DECODE},
    (_SMALL, 16): {64: Blocks(64, 128, 8, 2), 128: Blocks(32, 64, 4, 2), 256: Blocks(16, 32, 4, 3), 512: _WIDE_DECODE},
    (_SMALL, 32): _DECODE_FLOAT32,
}
"""Few rows: memory is the limit, and what counts is keys in flight, 16 to 32 KB of K and V a stage.

With 3 stages a block waits for each load that it has just issued (see above), and other blocks hide that: on an H100,
four blocks with 3 stages read 64 x 1,024 tokens 12% faster than three blocks with 5 (docs/gpu-results.md). Keys of 8
bits take half of the memory and more instructions: there two warps with 5 stages are 17 to 33% faster.
"""


def _entry(table: dict[tuple[int, int], _BY_DIM], kind: Kind, device: Device) -> Blocks:
    if kind.latent and device.width == 16:
        return _LATENT
    memory = _MEMORY.get(device.capability, _SMALL)
    return next(blocks for most, blocks in table[memory, device.width].items() if kind.dim <= most)


def extend_blocks(kind: Kind, device: Device, rows: int, options: TritonAttentionOptions) -> Blocks:
    """Return blocks for tiles of up to `rows` useful query rows (tokens times group)."""
    entry = _entry(_EXTEND, kind, device)
    block_rows = options.block_rows or (entry.rows if entry is _LATENT else min(entry.rows, power_of_two(rows)))
    # Keys that are widened take registers: all warps share that work.
    few = 0 if device.kv_itemsize == 1 else _FEW[device.itemsize]
    warps = options.warps or (4 if block_rows * kind.dim <= few else entry.warps)
    rows = max(block_rows, power_of_two(kind.group))
    keys = max(entry.keys * entry.rows // max(rows, entry.rows), 16)  # fewer where a group is larger than a tile
    return Blocks(rows, options.block_keys or keys, warps, options.stages or entry.stages, entry.chunk)


def decode_blocks(kind: Kind, device: Device, options: TritonAttentionOptions) -> Blocks:
    """Return blocks of a decode, whose rows are the query heads of a KV head."""
    entry = _entry(_DECODE, kind, device)
    rows = entry.rows if entry is _LATENT else min(power_of_two(kind.group), entry.rows)
    warps, stages = options.warps or entry.warps, options.stages or entry.stages
    return Blocks(rows, options.block_keys or entry.keys, warps, stages, entry.chunk)
