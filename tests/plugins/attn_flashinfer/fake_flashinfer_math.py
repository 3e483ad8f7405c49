"""What FlashInfer's kernels compute, written out in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores become weights. Without a window `window_left` is -1, without a soft cap `soft_cap` 0."""

    scale: float
    soft_cap: float
    window_left: int


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 [queries, heads, dim] and the log-sum-exp [queries, heads], to the base of 2.

    q [queries, heads, dim], keys and values [keys, kv heads, dim], seen bool [queries, keys].
    """
    repeats = q.shape[1] // keys.shape[1]
    k, v = (one.double().repeat_interleave(repeats, 1) for one in (keys, values))
    found = torch.einsum("qhd,khd->hqk", q.double(), k) * scores.scale
    if scores.soft_cap > 0:
        found = scores.soft_cap * torch.tanh(found / scores.soft_cap)
    if scores.window_left >= 0:
        places = torch.arange(len(k), device=q.device)
        own = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        seen = seen & (places + scores.window_left >= own)
    found = found.masked_fill(~seen, -math.inf)
    lse = found.logsumexp(-1)
    weights = torch.where(lse.isinf()[..., None], 0.0, torch.exp(found - lse[..., None]))
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T / math.log(2.0)


def causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return which keys are seen where the last query is the last key, bool [queries, keys]."""
    return torch.ones((queries, keys), dtype=torch.bool, device=device).tril(keys - queries)


def unpack(packed: torch.Tensor, start: int, queries: int, keys: int) -> torch.Tensor:
    """Return a mask bool [queries, keys] whose bits begin with the byte `start`, the lowest bit first."""
    count = queries * keys
    some = packed[start : start + (count + 7) // 8]
    bits = (some[:, None] >> torch.arange(8, device=packed.device)) & 1
    return bits.flatten()[:count].view(queries, keys).bool()


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge the other result into (v, s): outputs [tokens, heads, dim], and log-sum-exps to the base of 2."""
    if mask is not None:
        raise NotImplementedError("the imitation merges all of it")
    if s.dtype != torch.float32 or s_other.dtype != torch.float32:
        raise ValueError("log-sum-exps have to be float32: others are merged into a copy")
    vector = max(16 // v.itemsize, v.shape[2] // 32)
    if v.shape[1] * (v.shape[2] // vector) > 1024:
        raise ValueError("a block of the merging kernel has no place for so many heads")
    both = torch.stack([s, s_other]).double()
    top = both.amax(0)
    weights = torch.exp2(both - top)
    total = weights.sum(0)
    parts = torch.stack([v, v_other]).double() * (weights / total)[..., None]
    v.copy_(parts.sum(0))
    s.copy_(top + torch.log2(total))
