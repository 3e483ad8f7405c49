"""On a GPU, at the sizes of a real model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pegboard.conformance.attention.batches import AttentionRig, make_layer
from pegboard.plugins.attn_triton.backend import TritonAttention
from pegboard.plugins.attn_triton.options import TritonAttentionOptions
from pegboard.toolkit.model.eight_bit import EIGHT_BIT

LENS = [(0, 1500), (1000, 700), (3000, 1), (16, 1), (0, 17)]
DECODES = [(12_000, 1), (100, 1), (2047, 1)]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""As in the suite."""


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return torch's attention in float32 of new queries at the end of k and v, all of them [tokens, heads, dim]."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    q, k, v = (one.float().transpose(0, 1)[None] for one in (q, k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [LENS, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (16, 8, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_against_float32_sdpa(
    dtype: torch.dtype, heads: tuple[int, int, int], page_size: int, lens: list[tuple[int, int]]
) -> None:
    """The reference is torch's in float32, from the same rounded inputs."""
    device = torch.device("cuda")
    rig = AttentionRig([make_layer(*heads)], lens, page_size=page_size, dtype=dtype, device=device)
    reason = TritonAttention.supports(None, rig.context_for())  # type: ignore[arg-type]
    if reason is not None:
        pytest.skip(reason)
    out = rig.run(TritonAttention(TritonAttentionOptions(), rig.context_for()))
    queries = torch.split(rig.q[0], rig.new.tolist())
    for q, k, v, got in zip(queries, rig.k[0], rig.v[0], torch.split(out, rig.new.tolist()), strict=True):
        torch.testing.assert_close(got.float(), reference(q, k, v), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [LENS, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 4, 64), (16, 4, 256), (16, 1, 512)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kept", EIGHT_BIT, ids=str)
def test_eight_bit(
    kept: torch.dtype, dtype: torch.dtype, heads: tuple[int, int, int], lens: list[tuple[int, int]]
) -> None:
    """The reference is torch's in float32, from what the pool holds."""
    device = torch.device("cuda")
    rig = AttentionRig([make_layer(*heads)], lens, page_size=16, dtype=dtype, device=device, kv_dtype=kept)
    out = rig.run(TritonAttention(TritonAttentionOptions(), rig.context_for()))
    queries = torch.split(rig.q[0], rig.new.tolist())
    for q, k, v, got in zip(queries, rig.k[0], rig.v[0], torch.split(out, rig.new.tolist()), strict=True):
        expected = reference(q, *rig.read_back(0, k, v))
        torch.testing.assert_close(got.float(), expected, rtol=0, atol=TOLERANCE[dtype])
