"""Pools of more than 2**31 elements: keys and values are stored where they belong."""

from __future__ import annotations

import pytest
import torch

from pegboard.toolkit.kernels import operations
from tests.far import far

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's memory is all real")


def test_where_a_pool_lies(device: torch.device) -> None:
    """Slots and heads are more than 2**31 elements apart: with an offset that overflows they would miss some."""
    q, k, v = torch.randn(7, 16, 32, dtype=torch.float16).split((8, 4, 4), dim=1)
    cos, sin = torch.randn(2, 7, 1, 16, dtype=torch.float16)
    slots = torch.tensor([31, 4, 5, 39, 0, 17, 2])
    keys, values = torch.full((2, 40, 4, 32), 7.0, dtype=torch.float16)
    far_keys, far_values = (far(one, (60_000_000, 721_000_000, 1)) for one in (keys, values))
    for store in (operations.Store(keys, values, slots), operations.Store(far_keys, far_values, slots)):
        operations.qk_norm_rope_store(q, k, v, cos, sin, store)
    assert torch.equal(keys[0] != 7.0, torch.ones(4, 32, dtype=torch.bool))
    assert torch.equal(far_keys, keys)
    assert torch.equal(far_values, values)
