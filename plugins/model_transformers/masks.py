"""What the masks that a model asks for amount to: each earlier key, a sliding window, or chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch.overrides import TorchFunctionMode

from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.configs import NotServable

Reach = tuple[int | None, bool]
"""The window of a layer, None where it sees each earlier key, and whether it is one of chunks: see LayerSpec."""


def mask_reach(
    call: bridge.AttentionCall,
    name: str,
    masks: Mapping[int, tuple[torch.Tensor, bridge.MaskFunction]],
    max_context_len: int,
) -> Reach:
    """Return what the mask of a call amounts to; its own eager attention would see nothing but the mask."""
    if call.mask is None:
        causal = call.arguments.get("is_causal")
        if causal is False or (causal is None and getattr(call.module, "is_causal", True) is False):
            raise NotServable(f"attends in both directions in {name}")
        window = call.arguments.get("sliding_window")
        return int(window) if window is not None and window < max_context_len else None, False
    base = call.mask if id(call.mask) in masks else call.mask._base
    if base is None or id(base) not in masks:
        raise NotServable(f"computes an attention mask of its own for {name}")
    return reach_of(masks[id(base)][1], max_context_len, name)


def reach_of(mask: bridge.MaskFunction, max_context_len: int, name: str) -> Reach:
    """Return what a mask function amounts to up to `max_context_len`.

    Raises NotServable where the mask is neither causal nor a sliding window nor one of chunks.
    """
    try:
        found = _reach(mask, max_context_len)
    except Exception as err:  # a mask that looks into tensors which are not there
        raise NotServable(f"masks attention in {name} by something other than positions") from err
    if found is None:
        text = "neither causal nor a sliding window nor in chunks (in both directions, for example)"
        raise NotServable(f"masks attention in {name} in a way that is {text}")
    return found


@lru_cache(maxsize=4)  # layers share masks, and a context may have millions of positions
def _reach(mask: bridge.MaskFunction, length: int) -> Reach | None:
    """Return what a mask amounts to, None: nothing that is known here."""
    last, positions = length - 1, torch.arange(length + 1)
    sees_first = _seen(mask, positions[:length], torch.tensor(0))
    width = length if bool(sees_first.all()) else int(sees_first.int().argmin())
    if not width:
        return None
    places = {0, last // 3, last // 2, *(count * width + more for count in (1, 2) for more in (-1, 0)), last}
    for chunked in (False, True):
        for position in sorted(place for place in places if place <= last):
            first = position // width * width if chunked else max(0, position + 1 - width)
            expected = (positions >= first) & (positions <= position)
            if not torch.equal(_seen(mask, torch.tensor(position), positions), expected):
                break
        else:
            return (None, False) if width == length else (width, chunked)
    return None


class _WithoutPadding(TorchFunctionMode):
    """Tensors without values, as that with the padding before each sequence, count as zeros: there is no padding. If a
    mask looks at something else, the comparison at the start finds other logits.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return func(*map(_valued, args), **(kwargs or {}))


def _valued(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        return torch.zeros(value.shape, dtype=value.dtype)
    return value


def _seen(mask: bridge.MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return which of `keys` are seen by `queries`, positions int64 of which one is a scalar."""
    zero = torch.zeros((), dtype=torch.long)
    with _WithoutPadding():
        seen = mask(zero, zero, queries, keys)
    return seen.expand_as(queries + keys).clone()
