"""Mixtures of experts: tokens are routed, sorted by expert, multiplied by each expert's weights, and summed up.

In kernels where those are to be used, one launch for each of these, and in torch elsewhere. Nothing looks at data, so
that all of it can be captured in a graph, and what is asked of a device depends on the number of tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pegboard.toolkit.kernels import usable
from pegboard.toolkit.kernels.launch import launch
from pegboard.toolkit.kernels.operations import power_of_two, takes

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.toolkit.kernels.launch import Constant

_FEW_PAIRS = 4096
"""Pairs that a kernel sorts in one launch, in a time that grows with their square; torch sorts more of them."""
_COMMON: dict[str, Constant] = {"enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs of a token and one of its `experts`, each with a position: in the order of experts, and those of one expert
    in the order of tokens.

    `rows` int32 [pairs] is the token at each position, `places` int32 [tokens, per token] the position of each pair,
    and `offsets` int32 [experts] the position after each expert's last one. Where kernels are used, `tiles` int32
    [n, 3] are an expert, the first position of the tile, and the one after the expert's last; a tile has `tile`
    positions at most. The expert of a spare tile is -1.
    """

    rows: Tensor
    places: Tensor
    offsets: Tensor
    tiles: Tensor | None
    tile: int

    @property
    def pairs(self) -> int:
        return self.rows.shape[0]

    @property
    def experts(self) -> int:
        return self.offsets.shape[0]

    def expert_of_position(self) -> Tensor:
        """Return int64 [pairs]."""
        at = torch.arange(self.pairs, dtype=torch.int32, device=self.offsets.device)
        return torch.searchsorted(self.offsets, at, right=True)


def route(logits: Tensor, per_token: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the largest shares of a softmax, float32 [tokens, per_token], and their experts, int32 likewise. `logits`
    are float32 [tokens, experts]. Of equal ones the first is taken. If `normalised` a token's shares add up to 1.
    """
    tokens, experts = logits.shape
    if takes(logits):
        from pegboard.toolkit.kernels.expert_functions import route_kernel

        weights = torch.empty(tokens, per_token, dtype=torch.float32, device=logits.device)
        chosen = torch.empty(tokens, per_token, dtype=torch.int32, device=logits.device)
        shape: dict[str, Constant] = {"EXPERTS": experts, "PER_TOKEN": per_token, "NORMALISED": normalised}
        shape |= {"BLOCK": power_of_two(experts), "SLOTS": power_of_two(per_token), "num_warps": 1, **_COMMON}
        launch(route_kernel, (tokens,), logits, weights, chosen, logits.stride(0), **shape)
        return weights, chosen
    best, chosen = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    best, chosen = best[:, :per_token], chosen[:, :per_token]
    return best / best.sum(-1, keepdim=True) if normalised else best, chosen.int()


def grouped(experts: Tensor, count: int) -> Groups:
    """Return the pairs of `experts` int32 [tokens, per token], of which there are `count`, sorted."""
    pairs = experts.numel()
    # Larger tiles where experts have more positions than that.
    tile = 16 if pairs < 16 * count else 64
    tiled = usable(experts.device)
    if tiled and 0 < pairs <= _FEW_PAIRS:
        return _grouped_by_kernel(experts, count, tile)
    per_token = experts.shape[1]
    of, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(max(pairs, count), dtype=torch.int32, device=experts.device)
    offsets = torch.searchsorted(of, numbers[:count], right=True, out_int32=True)
    places = torch.empty_like(of).scatter_(0, order, numbers[:pairs]).view_as(experts)
    groups = Groups((order // per_token).int(), places, offsets, None, tile)
    return replace(groups, tiles=tiles_of(groups)) if tiled else groups


def _grouped_by_kernel(experts: Tensor, count: int, tile: int) -> Groups:
    from pegboard.toolkit.kernels.expert_functions import group_kernel

    pairs = experts.numel()
    most_tiles = _most_tiles(pairs, count, tile)
    experts = experts.contiguous()
    rows, places = experts.new_empty(pairs), torch.empty_like(experts)
    offsets, tiles = experts.new_empty(count), experts.new_empty(most_tiles, 3)
    wide = power_of_two(count)
    block = min(max(4096 // wide, 16), 64)
    shape: dict[str, Constant] = {"EXPERTS": count, "TILE": tile, "BLOCK": block, "BLOCK_E": wide, "num_warps": 4}
    tensors = experts, rows, places, offsets, tiles
    launch(group_kernel, (-(-pairs // block),), *tensors, pairs, most_tiles, experts.shape[1], **shape, **_COMMON)
    return Groups(rows, places, offsets, tiles, tile)


def tiles_of(groups: Groups) -> Tensor:
    """Return what `Groups.tiles` are where there are none yet."""
    offsets, tile = groups.offsets, groups.tile
    numbers = torch.arange(_most_tiles(groups.pairs, groups.experts, tile), dtype=torch.int32, device=offsets.device)
    begins = torch.cat((offsets.new_zeros(1), offsets[:-1]))
    own = (offsets - begins + (tile - 1)) // tile
    last = own.cumsum(0, dtype=torch.int32)
    expert = torch.searchsorted(last, numbers, right=True)
    known = expert.clamp(max=groups.experts - 1)
    begin = begins[known] + (numbers - (last - own)[known]) * tile
    return torch.stack((torch.where(numbers < last[-1], expert.int(), -1), begin, offsets[known]), dim=1)


def _most_tiles(pairs: int, experts: int, tile: int) -> int:
    """Return how many tiles there may be: the last one of each expert is not full."""
    return -(-pairs // tile) + min(experts, pairs)


def product(x: Tensor, weights: Tensor, bias: Tensor | None, groups: Groups, *, gather: bool) -> Tensor:
    """Return for each position a row of x times the transposed weights of its expert: [pairs, outputs], in x's dtype.

    `weights` are [experts, outputs, cols], in any strides, `bias` [experts, outputs]. x has a row for each position, or
    if `gather`, for each token.
    """
    if groups.tiles is not None and takes(x):
        return _product_by_kernel(x, weights, bias, groups, groups.tiles, gather)
    if gather:
        x = x.index_select(0, groups.rows)
    out = _product_by_torch(x.contiguous(), weights, groups)
    return out if bias is None else out + bias.index_select(0, groups.expert_of_position())


def why_it_waits(weights: Tensor) -> str | None:
    """Return None where `product` with these weights does not wait for the device, or the reason why it does."""
    if usable(weights.device) or all(one == 1 or one * weights.itemsize % 16 == 0 for one in weights.stride()):
        return None
    return f"torch has no product of experts of {list(weights.shape[1:])}, whose rows are no multiple of 16 bytes"


def _product_by_torch(x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Return the products of x [pairs, cols], of which each position has a row."""
    if why_it_waits(weights) is None:
        return F.grouped_mm(x, weights.transpose(1, 2), offs=groups.offsets)
    out = x.new_empty(x.shape[0], weights.shape[1])
    start = 0
    for expert, end in enumerate(groups.offsets.tolist()):
        if end > start:
            torch.mm(x[start:end], weights[expert].t(), out=out[start:end])
        start = end
    return out


def _product_by_kernel(
    x: Tensor, weights: Tensor, bias: Tensor | None, groups: Groups, tiles: Tensor, gather: bool
) -> Tensor:
    from pegboard.toolkit.kernels.expert_functions import product_kernel

    outputs, cols = weights.shape[1:]
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(groups.pairs, outputs, dtype=x.dtype, device=x.device)
    block_n, block_k, warps = (64, 128, 4) if groups.tile == 16 else (128, 64, 8)
    if x.dtype == torch.float32:
        block_n, block_k, warps = 64, 32, 4
    shape: dict[str, Constant] = {"GATHER": gather, "BIAS": bias is not None, "EVEN": cols % block_k == 0}
    shape |= {
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "TILE": groups.tile,
        "num_warps": warps,
        "num_stages": 3,
        **_COMMON,
    }
    tensors = x, weights, x if bias is None else bias.contiguous(), groups.rows, tiles, out
    strides = x.stride(0), out.stride(0), *weights.stride()
    launch(product_kernel, (-(-outputs // block_n), tiles.shape[0]), *tensors, *strides, outputs, cols, **shape)
    return out


def combined(products: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Return the sum of each token's products, [pairs, size] in the order of positions, times its `weights` float32
    [tokens, per token]: [tokens, size] in their dtype, summed in float32 in the router's order.
    """
    tokens, per_token = weights.shape
    if takes(products):
        from pegboard.toolkit.kernels.expert_functions import combine_kernel

        size = products.shape[1]
        out = torch.empty(tokens, size, dtype=products.dtype, device=products.device)
        block = min(power_of_two(size), 1024)
        tensors = products, weights.contiguous(), groups.places, out
        strides = products.stride(0), out.stride(0), size
        shape: dict[str, Constant] = {"PER_TOKEN": per_token, "BLOCK": block, "num_warps": 4, **_COMMON}
        launch(combine_kernel, (tokens, -(-size // block)), *tensors, *strides, **shape)
        return out
    rows = products.index_select(0, groups.places.flatten()).view(tokens, per_token, products.shape[1]).float()
    return rows.mul_(weights.unsqueeze(-1)).sum(1).to(products.dtype)
