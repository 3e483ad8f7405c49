"""The towers of all families, put together from the same parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pegboard.plugins.mm_qwen_vl.vision_parts import Block, Merger, Segments
from pegboard.toolkit.model.layers import FusedLinear, empty_parameter

if TYPE_CHECKING:
    from pegboard.plugins.mm_qwen_vl.vision_spec import VisionSpec
    from pegboard.toolkit.model.weights import Target


class VisionTower(nn.Module):
    """A vision transformer with its weights in `dtype` on `device`, uninitialised until `targets()` are filled."""

    def __init__(self, spec: VisionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, self.device = spec, dtype, device
        # A convolution whose stride is its kernel's size is a matrix product of each patch.
        self.patch_embed = FusedLinear(
            spec.patch_values, (spec.width,), bias=spec.patch_bias, dtype=dtype, device=device
        )
        self.grid = empty_parameter(spec.grid_rows, spec.width, dtype=dtype, device=device) if spec.grid_rows else None
        self.blocks = nn.ModuleList(Block(spec, dtype=dtype, device=device) for _ in range(spec.depth))
        self.merger = Merger(spec, dtype=dtype, device=device)
        self.deep_mergers = nn.ModuleList(Merger(spec, whole=True, dtype=dtype, device=device) for _ in spec.deep)

    def embed(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Return the first states [rows * columns, width] of one picture's patches, [rows * columns, patch_values],
        those of a token one after the other.
        """
        x: Tensor = self.patch_embed(patches.to(self.dtype))
        if self.grid is None:
            return x
        return x + learned_positions(self.grid, self.spec, rows, columns).to(self.dtype)

    def forward(self, x: Tensor, rows: int, columns: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return states [tokens, out_size] of what `embed` made, and those of each deep level."""
        spec = self.spec
        cos, sin = rotations(spec, rows, columns, self.device)
        whole: Segments = [(1, rows * columns)]
        order, windows = window_order(spec, rows // spec.merge, columns // spec.merge)
        if order is not None:
            order = order.to(self.device)
            x, cos, sin = (_blocks_in(order, one, spec.merge**2) for one in (x, cos, sin))
        mergers, deep = dict(spec.deep), []
        for index, block in enumerate(self.blocks):
            full = order is None or index in spec.full_layers
            x = block(x, cos, sin, whole if full else windows)
            if index in mergers:
                deep.append(self.deep_mergers[mergers[index]](x))
        states: Tensor = self.merger(x)
        return states if order is None else torch.empty_like(states).index_copy_(0, order, states), tuple(deep)

    def pack(self) -> None:
        """Replace the loaded matrices by packed ones, one after another, so that one is held twice at most."""
        for module in self.modules():
            if isinstance(module, FusedLinear):
                module.pack()

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint name -> buffer, for all weights, under the names that transformers gives them after `prefix`."""
        spec = self.spec
        named = ("linear_fc1", "linear_fc2") if self.grid is not None else ("fc1", "fc2")
        found = self.patch_embed.targets((f"{prefix}patch_embed.proj",))
        kernel = (spec.width, 3, spec.temporal, spec.patch, spec.patch)
        found[f"{prefix}patch_embed.proj.weight"] = self.patch_embed.weight.view(kernel)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            found |= block.targets(f"{prefix}blocks.{index}", named)
        if self.grid is None:
            found |= self.merger.norm.targets(f"{prefix}merger.ln_q")
            return found | self.merger.mlp.targets(f"{prefix}merger.mlp.0", f"{prefix}merger.mlp.2")
        found[f"{prefix}pos_embed.weight"] = self.grid
        mergers = {f"{prefix}deepstack_merger_list.{number}": one for number, one in enumerate(self.deep_mergers)}
        for name, merger in {f"{prefix}merger": self.merger, **mergers}.items():
            assert isinstance(merger, Merger)
            found |= merger.norm.targets(f"{name}.norm")
            found |= merger.mlp.targets(*(f"{name}.{one}" for one in named))
        return found


def _merge_order(spec: VisionSpec, x: Tensor) -> Tensor:
    """Return [rows * columns, ...] of x [rows, columns, ...], the patches of a token one after the other."""
    rows, columns, m = x.shape[0], x.shape[1], spec.merge
    blocks = x.reshape(rows // m, m, columns // m, m, *x.shape[2:]).transpose(1, 2)
    return blocks.reshape(rows * columns, *x.shape[2:])


def _blocks_in(order: Tensor, x: Tensor, unit: int) -> Tensor:
    """Return x [tokens * unit, ...] with its groups of `unit` rows in another order."""
    return x.view(-1, unit, *x.shape[1:])[order].view(x.shape)


def rotations(spec: VisionSpec, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin float32 [patches, 1, head_dim] of patches, as `turned` takes them: rows turn the first half of
    the frequencies, columns the second.
    """
    half = spec.head_dim // 2
    powers = torch.arange(0, half, 2, dtype=torch.float32) / half
    inverse = (1.0 / spec.rope_theta**powers).to(device)
    row, column = (torch.arange(n, dtype=torch.float32, device=device)[:, None] * inverse for n in (rows, columns))
    both = torch.cat((row[:, None].expand(-1, columns, -1), column[None].expand(rows, -1, -1)), dim=-1)
    angles = _merge_order(spec, both)[:, None]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def learned_positions(grid: Tensor, spec: VisionSpec, rows: int, columns: int) -> Tensor:
    """Return float32 [patches, width]: a grid of side by side learned positions, stretched bilinearly to a picture so
    that corners meet corners, in the order of operations of transformers' `vision_utils`.
    """
    side, device = spec.grid_side, grid.device
    (row_taps, row_weights), (column_taps, column_weights) = (_taps(n, side, device) for n in (rows, columns))
    wide, out = grid.float(), None
    for i in range(2):
        for j in range(2):
            index = _merge_order(spec, row_taps[:, None, i] * side + column_taps[None, :, j])
            weight = _merge_order(spec, row_weights[:, None, i] * column_weights[None, :, j])
            part = wide.index_select(0, index).mul_(weight[:, None])
            out = part if out is None else out.add_(part)
    assert out is not None
    return out


def _taps(length: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two grid lines beside each of `length` positions, int64 [length, 2], and their weights."""
    place = torch.arange(length, dtype=torch.float32, device=device) * (side - 1) / max(length - 1, 1)
    below = place.floor()
    lines = below.long()[:, None] + torch.arange(2, device=device)
    weights = (1 - (place[:, None] - lines).abs()).clamp(min=0)
    return lines.clamp(max=side - 1), weights


def window_order(spec: VisionSpec, rows: int, columns: int) -> tuple[Tensor | None, Segments]:
    """Return the tokens of a picture of rows by columns merged blocks, int64 [tokens], sorted so that those of a window
    follow each other and windows of one size as well; and the windows, sized in patches. None for a tower without
    windows.

    Windows begin at the top left; those at the right and the bottom end may be smaller.
    """
    if spec.window is None:
        return None, []
    side, unit = spec.window, spec.merge**2
    tokens = torch.arange(rows * columns).view(rows, columns)
    order, segments = [], []
    for across in _bands(tokens, 0, side):
        for part in _bands(across, 1, side):
            height, width = min(side, part.shape[0]), min(side, part.shape[1])
            windows = part.reshape(part.shape[0] // height, height, part.shape[1] // width, width).transpose(1, 2)
            order.append(windows.reshape(-1))
            segments.append((part.numel() // (height * width), height * width * unit))
    return torch.cat(order), segments


def _bands(x: Tensor, dim: int, side: int) -> list[Tensor]:
    """Return the part of x that windows of `side` fill, and the rest, along a dimension; without empty ones."""
    full = x.shape[dim] // side * side
    return [part for part in x.split_with_sizes((full, x.shape[dim] - full), dim) if part.numel()]
