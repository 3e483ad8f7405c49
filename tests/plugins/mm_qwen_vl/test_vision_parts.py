"""Rotations of the vision towers, bit by bit as the toolkit's."""

from __future__ import annotations

import pytest
import torch

from pegboard.plugins.mm_qwen_vl import vision_parts
from pegboard.plugins.mm_qwen_vl.vision_parts import turned
from pegboard.toolkit.model.rope import apply_rope


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_turned_block_by_block_are_those_of_the_toolkit(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, dim = 3, 16
    monkeypatch.setattr(vision_parts, "TURNED_AT_ONCE", 8 * heads * dim)
    made = torch.Generator().manual_seed(rows)
    # As the tower has them: queries and keys are a part of a larger tensor.
    x = torch.randn(rows, 2 * heads, dim, generator=made).to(dtype)[:, :heads]
    angles = torch.randn(rows, 1, dim // 2, generator=made) * 100
    cos, sin = angles.cos(), angles.sin()
    before = x.clone()
    found = turned(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    assert torch.equal(found, apply_rope(x.float(), cos, sin).to(dtype))
    assert torch.equal(x, before)
