"""What is decided on the host, once per batch: which requests run which kernel, with which grids.

Of a decode batch nothing but its size decides, so that a graph of it can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from pegboard.plugins.attn_triton.blocks import Blocks, Device, Kind, decode_blocks, extend_blocks
from pegboard.plugins.attn_triton.launch import LEAST_PART, cut, prefix_parts
from pegboard.toolkit.kernels.launch import launch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.attention import AttentionContext
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.plugins.attn_triton.options import TritonAttentionOptions
    from pegboard.toolkit.kernels.launch import Constant

_LISTS: dict[str, Constant] = {"BLOCK": 128, "num_warps": 1, "enable_fp_fusion": True}
"""Of the kernels that list what a batch has: requests that a program looks at together."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """The requests of one new token: rows of the row table, lengths and packed tokens, int64 [n]. All of them share the
    KV of their first `prefix` tokens, which is to be read once.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    tokens: torch.Tensor
    prefix: int = 0

    @property
    def count(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class PrefixLaunch:
    """`parts` of `size` keys each, in tiles of `tiles` x kv heads programs."""

    blocks: Blocks
    tiles: int
    parts: int
    size: int


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Up to `parts` of at least `least` tokens. `results` [n, all parts, heads, v dim] and `tops` [n, all parts,
    heads], float32, hold what they give, between two kernels, for one layer after another; None where there is one
    part. Those of the shared `prefix` stand first.
    """

    blocks: Blocks
    parts: int
    least: int
    results: torch.Tensor | None = None
    tops: torch.Tensor | None = None
    prefix: PrefixLaunch | None = None

    def own_parts(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return results and tops of what is not shared; where there is one part, `out` in their places, with which the
        kernel is compiled without them.
        """
        if self.results is None or self.tops is None:
            return out[:, None], out
        shared = 0 if self.prefix is None else self.prefix.parts
        return self.results[:, shared:], self.tops[:, shared:]


@dataclass(frozen=True, slots=True)
class ExtendLaunch:
    """`tiles` int32 [n, 2], see `tiles_kernel`, of `tokens` new tokens each; of requests that all have a tail, or
    none.
    """

    blocks: Blocks
    tokens: int
    tiles: torch.Tensor
    tails: bool


class Extents(Protocol):
    """How many new tokens requests bring, as far as the host knows it."""

    def longest(self) -> int:
        """Return those of the longest request; 0 where there is none."""

    def tiles(self, tokens: int) -> int:
        """Return into how many tiles of so many tokens each request's are cut, together."""


@dataclass(frozen=True, slots=True)
class Counted:
    """New tokens, int64, of each request."""

    new: NDArray[np.int64]

    def longest(self) -> int:
        return int(self.new.max(initial=0))

    def tiles(self, tokens: int) -> int:
        return int((-(-self.new // tokens)).sum())


@dataclass(frozen=True, slots=True)
class Bounded:
    """Any lengths of up to so many requests, with so many new tokens together: what a graph has to have room for."""

    new: int
    requests: int

    def longest(self) -> int:
        return self.new

    def tiles(self, tokens: int) -> int:
        requests = min(self.requests, self.new // 2)  # of two tokens at least
        return (self.new + requests * (tokens - 1)) // tokens


@dataclass(frozen=True, slots=True)
class Extending:
    """What the extend kernel runs for: requests of several new tokens, and those that have a tail.

    `starts`, `prefix`, `new` and `tails` (None where there are none) int64 [batch] are of all requests, on the device.
    """

    several: Extents
    treed: Extents
    starts: torch.Tensor
    prefix: torch.Tensor
    new: torch.Tensor
    tails: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Split:
    """How many requests are decoded (None: all of them), and what the others are."""

    singles: int | None
    extending: Extending | None


class DecodePlans:
    """Launches of decodes, per kind of layer and number of requests. The memory for parts is one buffer, made at the
    start: all layers and batches run one after the other, and so whatever graph was captured finds it where it was.
    """

    def __init__(
        self, ctx: AttentionContext, options: TritonAttentionOptions, device: Device, multiprocessors: int
    ) -> None:
        self._ctx, self._options, self._device = ctx, options, device
        self._multiprocessors = multiprocessors
        self._found: dict[tuple[Kind, int], DecodeLaunch] = {}
        kinds = {Kind.of(layer, device.itemsize) for layer in ctx.layers}
        sizes = range(1, self.most_requests + 1)
        needed = max((self._floats(kind, count) for kind in kinds for count in sizes), default=0)
        self._memory = torch.empty(needed, dtype=torch.float32, device=ctx.device)

    @property
    def most_requests(self) -> int:
        return max(self._ctx.max_batch, *self._ctx.graph_sizes, 0)

    def get(self, kind: Kind, decoding: Decoding) -> DecodeLaunch:
        """Return the launch for so many requests; for those that share a prefix, one of its own."""
        if decoding.prefix and kind.window is None:
            return self._with_prefix(kind, decoding)
        found = self._found.get((kind, decoding.count))
        if found is None:
            found = self._found[kind, decoding.count] = self._make(kind, decoding.count)
        return found

    def _sizes(self, kind: Kind, count: int) -> tuple[Blocks, int, int]:
        """Blocks, parts at most, and the least tokens of one."""
        blocks = decode_blocks(kind, self._device, self._options)
        least = max(self._options.kv_split or LEAST_PART, blocks.keys)
        programs = count * kind.num_kv_heads * -(-kind.group // blocks.rows)
        longest = min(self._ctx.max_context_len, kind.window or self._ctx.max_context_len)
        if self._options.kv_parts:
            return blocks, self._options.kv_parts, least
        return blocks, *cut(programs, self._multiprocessors, longest, least)

    def _floats(self, kind: Kind, count: int) -> int:
        _, parts, _ = self._sizes(kind, count)
        return 0 if parts == 1 else count * parts * kind.heads * (kind.v_head_dim + 1)

    def _make(self, kind: Kind, count: int) -> DecodeLaunch:
        blocks, parts, least = self._sizes(kind, count)
        if parts == 1:
            return DecodeLaunch(blocks, 1, least)
        needed = self._floats(kind, count)
        if needed > len(self._memory):  # a kind or a size that the context did not name
            self._memory = self._memory.new_empty(needed)
        results, tops = _cut(self._memory, kind, count, parts)
        return DecodeLaunch(blocks, parts, least, results, tops)

    def _with_prefix(self, kind: Kind, decoding: Decoding) -> DecodeLaunch:
        blocks, parts, least = self._sizes(kind, decoding.count)
        rows = decoding.count * kind.group
        tile = extend_blocks(kind, self._device, rows, self._options)
        tiles = -(-rows // tile.rows)
        shared, size = prefix_parts(
            decoding.prefix, tiles * kind.num_kv_heads, self._multiprocessors, tile.keys, max(least, tile.keys)
        )
        floats = decoding.count * (shared + parts) * kind.heads * (kind.v_head_dim + 1)
        results, tops = _cut(self._memory.new_empty(floats), kind, decoding.count, shared + parts)
        return DecodeLaunch(blocks, parts, least, results, tops, PrefixLaunch(tile, tiles, shared, size))


def _cut(memory: torch.Tensor, kind: Kind, count: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results and tops, out of a buffer of floats."""
    tops = count * parts * kind.heads
    results = memory[: tops * kind.v_head_dim].view(count, parts, kind.heads, kind.v_head_dim)
    return results, memory[len(results.flatten()) :][:tops].view(count, parts, kind.heads)


class Places:
    """Where lists of a batch are kept: in memory of their own, or, for batches that are `fixed`, where those of the
    last one of the same size were.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}

    def take(self, batch: ForwardBatch, name: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with anything in it."""
        key = name, shape, batch.num_tokens, batch.batch_size, batch.prefills
        found = self._kept.get(key) if batch.fixed else None
        if found is None:
            found = batch.seq_lens.new_empty(shape, dtype=dtype)
            if batch.fixed:
                self._kept[key] = found
        return found


def split(batch: ForwardBatch, first: torch.Tensor) -> Split:
    """Return which kernels the requests of a batch run. `first` int64 are 0, 1, 2, ... on the device."""
    if batch.fixed and batch.forward_mode.is_extend:
        several, none = Bounded(batch.num_tokens, batch.prefills), Bounded(0, 0)
        # The last request is padding.
        return Split(batch.batch_size - batch.prefills - 1, Extending(several, none, *_lengths(batch), None))
    tails = batch.tail_lens_cpu
    treed = tails > 0 if tails is not None and tails.any() else np.zeros(batch.batch_size, np.bool_)
    on_device = batch.tail_lens if treed.any() else None
    new = batch.extend_lens_cpu if batch.forward_mode.is_extend else None
    if new is None:
        if on_device is None:
            return Split(None, None)
        # Decodes that have a tail: one new token each.
        new = np.ones(batch.batch_size, np.int64)
        lens = first, batch.seq_lens - 1, torch.ones_like(batch.seq_lens)
    else:
        lens = _lengths(batch)
    alone = (new == 1) & ~treed
    if alone.all():
        return Split(None, None)
    extents = Counted(new[(new > 1) & ~treed]), Counted(new[treed])
    return Split(int(alone.sum()), Extending(*extents, *lens, on_device))


def _lengths(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first packed token, the KV before and the new tokens of each request of an extend batch."""
    assert batch.extend_start_loc is not None
    assert batch.extend_prefix_lens is not None
    assert batch.extend_lens is not None
    return batch.extend_start_loc, batch.extend_prefix_lens, batch.extend_lens


def decodes_of(batch: ForwardBatch, split: Split, first: torch.Tensor, places: Places) -> Decoding | None:
    """Return the requests that the decode kernels run for; None where there are none."""
    if split.extending is None:
        if not batch.batch_size:
            return None
        alone = batch.forward_mode.is_decode and not batch.fixed and batch.batch_size > 1
        prefix = batch.common_prefix if alone else 0
        return Decoding(batch.req_pool_indices, batch.seq_lens, first, prefix)
    if not split.singles:
        return None
    from pegboard.plugins.attn_triton.tile_kernels import singles_kernel

    extending = split.extending
    # An even stride aligns all three to 16 bytes: for arrays that are not Triton would compile the kernels again.
    even = split.singles + split.singles % 2
    rows, seq_lens, tokens = places.take(batch, "singles", (3, even), torch.int64)[:, : split.singles]
    launch(
        singles_kernel,
        (batch.batch_size,),
        rows,
        seq_lens,
        tokens,
        batch.req_pool_indices,
        batch.seq_lens,
        extending.starts,
        extending.new,
        extending.new if extending.tails is None else extending.tails,
        batch.batch_size,
        split.singles,
        HAS_TAIL=extending.tails is not None,
        **_LISTS,
    )
    return Decoding(rows, seq_lens, tokens)


class Tiling:
    """The tiles of a batch's extends, for all kinds of layers: those that are cut alike share them."""

    def __init__(
        self, batch: ForwardBatch, extending: Extending, device: Device, options: TritonAttentionOptions, places: Places
    ) -> None:
        self._batch, self._places = batch, places
        self._extending, self._device, self._options = extending, device, options
        self._laid: dict[tuple[int, bool], torch.Tensor] = {}

    def launches(self, kind: Kind) -> tuple[ExtendLaunch, ...]:
        """Return the launches of one kind of layer: requests with a tail, and without, have one each."""
        found = []
        for extents, tails in ((self._extending.several, False), (self._extending.treed, True)):
            if longest := extents.longest():
                blocks = extend_blocks(kind, self._device, longest * kind.group, self._options)
                tokens = blocks.rows // kind.group
                found.append(ExtendLaunch(blocks, tokens, self._tiles(extents, tokens, tails), tails))
        return tuple(found)

    def _tiles(self, extents: Extents, tokens: int, tails: bool) -> torch.Tensor:
        from pegboard.plugins.attn_triton.tile_kernels import tiles_kernel

        found = self._laid.get((tokens, tails))
        if found is None:
            batch = self._extending
            most = extents.tiles(tokens)
            found = self._places.take(self._batch, f"tiles of {tokens}", (most, 2), torch.int32)
            self._laid[tokens, tails] = found
            launch(
                tiles_kernel,
                (len(batch.new),),
                found,
                batch.new,
                batch.prefix,
                batch.new if batch.tails is None else batch.tails,
                len(batch.new),
                tokens,
                most,
                HAS_TAIL=batch.tails is not None,
                KIND=2 if tails else 0,
                **_LISTS,
            )
        return found
