"""Attention over gathered keys and values: torch's fused call where it fits, written out where it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from pegboard.core.interfaces.layers import LayerSpec


def fused_fits(layer: LayerSpec, sinks: torch.Tensor | None) -> bool:
    """Return whether scaled_dot_product_attention can compute this layer without falling back to its unfused path.

    That one would keep scores in the low precision of its inputs; ours keeps them in float32.
    """
    return layer.logit_cap is None and sinks is None and layer.qk_head_dim == layer.v_head_dim


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: LayerSpec,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of q [a, b, n, qk_dim] over k [a, b, m, qk_dim] and v [a, b, m, v_dim], as [a, b, n, v_dim].

    `mask` broadcasts to [a, b, n, m]; `causal` stands for the lower triangle of n = m and goes with no mask. `sinks`
    broadcast to [a, b, n, 1].
    """
    if fused_fits(layer, sinks):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=layer.scale)
    assert not causal
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)).mul_(layer.scale)
    if layer.logit_cap is not None:
        scores.div_(layer.logit_cap).tanh_().mul_(layer.logit_cap)
    if mask is not None:
        scores.add_(mask)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.to(wide))
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks.to(wide) - top).exp()
    return torch.matmul(weights, v.to(wide)).div_(total).to(q.dtype)
