"""What the masks that a model asks for amount to: each earlier key, or a sliding window."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.configs import NotServable


def mask_window(
    call: bridge.AttentionCall,
    name: str,
    masks: Mapping[int, tuple[torch.Tensor, bridge.MaskFunction]],
    max_context_len: int,
) -> int | None:
    """Return the sliding window that the mask of a call amounts to; its own eager attention would see nothing but the
    mask.
    """
    if call.mask is None:
        causal = call.arguments.get("is_causal")
        if causal is False or (causal is None and getattr(call.module, "is_causal", True) is False):
            raise NotServable(f"attends in both directions in {name}")
        window = call.arguments.get("sliding_window")
        return int(window) if window is not None and window < max_context_len else None
    base = call.mask if id(call.mask) in masks else call.mask._base
    if base is None or id(base) not in masks:
        raise NotServable(f"computes an attention mask of its own for {name}")
    return window_of(masks[id(base)][1], max_context_len, name)


def window_of(mask: bridge.MaskFunction, max_context_len: int, name: str) -> int | None:
    """Return the window of a causal mask function up to `max_context_len`, None where every earlier key is seen.

    Raises NotServable where the mask is neither causal nor a sliding window.
    """
    last = max_context_len - 1
    seen = _seen(mask, last, max_context_len, name)
    width = int(seen.sum())
    for position in sorted({0, last // 3, last // 2, max(0, min(width, last) - 1), min(width, last), last}):
        expected = torch.zeros(max_context_len + 1, dtype=torch.bool)
        expected[max(0, position + 1 - width) : position + 1] = True
        if not torch.equal(_seen(mask, position, max_context_len, name), expected):
            raise NotServable(
                f"masks attention in {name} in a way that is neither causal nor a sliding window (in both directions, "
                "or in chunks)"
            )
    return width if width < max_context_len else None


def _seen(mask: bridge.MaskFunction, position: int, max_context_len: int, name: str) -> torch.Tensor:
    """Return which keys [max_context_len + 1] the query at `position` sees."""
    zero = torch.zeros((), dtype=torch.long)
    keys = torch.arange(max_context_len + 1)
    try:
        seen = mask(zero, zero, torch.tensor(position), keys)
        return seen.expand_as(keys).clone()
    except Exception as err:  # a mask that looks into tensors which are not there
        raise NotServable(f"masks attention in {name} by something other than positions") from err
