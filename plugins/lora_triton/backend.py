"""Adapters in Triton: for each site one launch for the small products and one for what is added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.adapters.api import COLUMN, AdapterBackend, AdapterContext
from pegboard.toolkit.kernels import objection
from pegboard.toolkit.kernels.launch import launch
from pegboard.toolkit.kernels.operations import TYPES, power_of_two

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from pegboard.plugins.adapters.api import AdapterWeights, LowRank, Put
    from pegboard.toolkit.kernels.launch import Constant
    from pegboard.toolkit.model.linear import Site

BLOCK_T, BLOCK_N, BLOCK_K = 16, 64, 64
"""Tokens, rows and columns of a tile."""
PROGRAMS = 256
"""Of a launch at least, where the columns of small products can be cut."""
SHORTEST = 256
"""Columns of a piece, at least."""


@dataclass(frozen=True, slots=True)
class _Matrices:
    """What a site has in all slots: `a` [slots, parts * ranks, cols], `b` [slots, rows, ranks], `ranks` int32 [slots,
    parts]. `blocks` int32 [n, 3]: see the kernels.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    blocks: Tensor


_Prepared = dict[int, list[tuple[int, int, Tensor, Tensor]]]
"""By site its parts: the part's number, its first row, and its matrices, b scaled, as large as the adapter has them."""
"""By site, what goes into a slot."""


class TritonAdapters(AdapterBackend[NoOptions]):
    """Keeps all slots in tensors of a fixed size and place. Matrices have the type in which the network computes, `b`
    with the scale in it; small products are float32.
    """

    def __init__(self, options: NoOptions, ctx: AdapterContext) -> None:
        super().__init__(options, ctx)
        self.ranks = power_of_two(max(16, ctx.max_rank))
        self._sites = {site.number: site for site in ctx.sites}
        self._matrices = {site.number: self._empty(site) for site in ctx.sites}

    @classmethod
    def supports(cls, options: NoOptions, ctx: AdapterContext) -> str | None:
        if ctx.computed_by:
            return f"the runner {ctx.computed_by!r} takes another backend's additions only"
        if ctx.dtype not in TYPES:
            return f"it computes in float16, bfloat16 and float32, not {ctx.dtype}"
        return objection(ctx.device)

    def _empty(self, site: Site) -> _Matrices:
        slots, parts, device = self.ctx.slots, len(site.parts), self.ctx.device
        blocks, start = [], 0
        for number, part in enumerate(site.parts):
            end = start + part.rows
            blocks += [(number, row, end) for row in range(start, end, BLOCK_N)]
            start = end
        return _Matrices(
            torch.zeros(slots, parts * self.ranks, site.cols, dtype=self.ctx.dtype, device=device),
            torch.zeros(slots, site.rows, self.ranks, dtype=self.ctx.dtype, device=device),
            torch.zeros(slots, parts, dtype=torch.int32, device=device),
            torch.tensor(blocks, dtype=torch.int32, device=device),
        )

    @property
    def device_bytes(self) -> int:
        return sum(matrices.a.nbytes + matrices.b.nbytes for matrices in self._matrices.values())

    def prepare(self, weights: AdapterWeights) -> _Prepared:
        return {number: self._packed(self._sites[number], parts) for number, parts in weights.sites.items()}

    def _packed(self, site: Site, parts: Sequence[LowRank]) -> list[tuple[int, int, Tensor, Tensor]]:
        starts, dtype = np.cumsum([0, *(part.rows for part in site.parts)]).tolist(), self.ctx.dtype
        return [
            (starts.index(part.start), part.start, part.a.to(dtype, copy=True), (part.b.float() * part.scale).to(dtype))
            for part in parts
        ]

    def activate(self, slot: int, prepared: object) -> None:
        assert isinstance(prepared, dict)
        for number, matrices in self._matrices.items():
            a, b, ranks = matrices.a[slot - 1], matrices.b[slot - 1], torch.zeros_like(matrices.ranks[0], device="cpu")
            a.zero_()
            b.zero_()
            for part, start, small_a, small_b in prepared.get(number, ()):
                rank = ranks[part] = len(small_a)
                a[part * self.ranks : part * self.ranks + rank].copy_(small_a, non_blocking=True)
                b[start : start + len(small_b), :rank].copy_(small_b, non_blocking=True)
            matrices.ranks[slot - 1].copy_(ranks, non_blocking=True)

    def clear(self, slot: int) -> None:
        for matrices in self._matrices.values():
            matrices.ranks[slot - 1].zero_()

    def begin(self, slots: NDArray[np.int64], lens: NDArray[np.int64], put: Put) -> TritonAdditions | None:
        tokens = slots.repeat(lens)
        order = np.argsort(tokens, kind="stable")[np.count_nonzero(tokens == 0) :]
        if not len(order):
            return None
        tiles, first = [], 0
        for slot, count in zip(*np.unique(tokens[order], return_counts=True), strict=True):
            ends = range(0, int(count), BLOCK_T)
            tiles += [(int(slot), first + at, min(BLOCK_T, int(count) - at)) for at in ends]
            first += int(count)
        where = put(np.array(tiles, np.int32)), put(order.astype(np.int32))
        return TritonAdditions(self.ranks, self._matrices, *where, len(tokens))


class TritonAdditions:
    """What the adapters of one batch of `tokens` add. `tiles` and `order` are what the kernels say."""

    def __init__(
        self,
        ranks: int,
        matrices: dict[int, _Matrices],
        tiles: Tensor,
        order: Tensor,
        tokens: int,
        *,
        fixed: bool = False,
    ) -> None:
        self._ranks, self._matrices = ranks, matrices
        self._tiles, self._order, self._tokens, self._fixed = tiles, order, tokens, fixed

    def fixed(self, size: int, extras: Mapping[str, Tensor]) -> TritonAdditions:
        slots = extras[COLUMN]
        return TritonAdditions(self._ranks, self._matrices, slots, slots, size, fixed=True)

    def add(self, site: int, x: Tensor, out: Tensor) -> None:
        matrices = self._matrices[site]
        if x.stride(1) != 1:
            x = x.contiguous()
        if out.stride(1) != 1:
            dense = out.contiguous()
            self._add(matrices, x, dense)
            out.copy_(dense)
        else:
            self._add(matrices, x, out)

    def _add(self, matrices: _Matrices, x: Tensor, out: Tensor) -> None:
        from pegboard.plugins.lora_triton.kernels import expand_kernel, shrink_kernel

        cols, parts = x.shape[1], matrices.ranks.shape[1]
        block_r = min(32, self._ranks)
        tiles, rank_blocks = self._tiles.shape[0], parts * self._ranks // block_r
        pieces = max(1, min(cols // SHORTEST, PROGRAMS // (tiles * parts)))
        each = -(-cols // (pieces * BLOCK_K)) * BLOCK_K
        pieces = -(-cols // each)
        small = torch.empty(pieces, self._tokens, parts * self._ranks, dtype=torch.float32, device=x.device)
        shape: dict[str, Constant] = {
            "PARTS": parts, "RANKS": self._ranks, "FIXED": self._fixed, "BLOCK_T": BLOCK_T, "BLOCK_R": block_r,
            "num_warps": 4,
        }  # fmt: skip
        where = matrices.ranks, self._tiles, self._order
        launch(
            shrink_kernel, (tiles, rank_blocks, pieces), x, matrices.a, *where, small, x.stride(0), self._tokens, cols,
            each, BLOCK_K=BLOCK_K, num_stages=3, **shape,
        )  # fmt: skip
        ranks, *rest = where
        launch(
            expand_kernel, (tiles, matrices.blocks.shape[0]), small, matrices.b, ranks, matrices.blocks, *rest, out,
            out.stride(0), self._tokens, out.shape[1], pieces, BLOCK_N=BLOCK_N, num_stages=1, **shape,
        )  # fmt: skip
