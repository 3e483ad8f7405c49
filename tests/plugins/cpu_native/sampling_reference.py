"""What a sampler may draw, in float64 and with a sort of the whole vocabulary.

The way to draw is part of it, as plugins/sampler_torch has it: in the order of ids without top_k and top_p, in that of
the logits with them, and wide nuclei by rejection. So for given numbers there is one right token, or two neighbours
where the uniform number falls upon the border between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLOSE = 2e-6
"""What float32 sums over a vocabulary may be off by."""

_BITS = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_WIDE = 256
_TRIALS = 8


def uniform(seed: int, step: int, trial: int = 0) -> float:
    """splitmix64 of seed and step; see sampler_torch."""

    def mixed(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
        return z ^ (z >> 31)

    seed = (seed + trial * 0x2545F4914F6CDD1D) & _BITS
    return (mixed((mixed((seed + _GAMMA) & _BITS) + (step + 1) * _GAMMA) & _BITS) >> 11) / 2**53


def choices(logits: NDArray[np.float32], row: Mapping[str, Any]) -> set[int]:
    """The tokens that are right for `logits` [vocab], none of them NaN, with the parameters of `row`."""
    exact = np.minimum(logits, np.finfo(np.float32).max).astype(np.float64)
    temperature = float(np.float32(row.get("temperature", 0.0)))
    if temperature == 0 or row.get("top_k") == 1:
        return {int(exact.argmax())}
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        mass = np.exp((exact - exact.max()) / temperature)
    # Each of the borders may lie a little to either side.
    found: set[int] = set()
    for more in itertools.product((1 - CLOSE, 1 + CLOSE), repeat=2):
        found |= _choices(exact, mass, row, *more)
    return found


def _choices(
    exact: NDArray[np.float64], mass: NDArray[np.float64], row: Mapping[str, Any], top_p_by: float, min_p_by: float
) -> set[int]:
    vocab, seed, step = len(exact), row["seed"], row.get("step", 0)
    top_k = row.get("top_k", vocab)
    top_p = float(np.float32(row.get("top_p", 1.0)))
    least = float(np.float32(row.get("min_p", 0.0))) * min_p_by
    likely = np.where(mass >= min(least, 1.0), mass, 0.0)
    if top_k >= vocab and top_p >= 1.0:
        return _invert(likely, uniform(seed, step))
    order = np.argsort(-exact, kind="stable")
    head = mass[order]
    head[top_k:] = 0.0
    share = top_p * head.sum() * top_p_by
    before = np.cumsum(head) - head
    stays = (before < share) | (top_p >= 1.0)
    count = max(int(stays[:top_k].sum()), 1)
    kept = np.where(np.arange(vocab) < count, likely[order], 0.0)
    trial = 0
    if top_k >= vocab > _WIDE:
        tied = int((exact >= exact[order[count - 1]]).sum())
        if tied >= _WIDE and head[_WIDE - 1] > 0:
            inside = np.zeros(vocab, dtype=np.bool_)
            inside[order[kept > 0]] = True
            maybe: set[int] = set()
            for trial in range(_TRIALS):
                drawn = _invert(mass, uniform(seed, step, trial))
                good = {token for token in drawn if inside[token]}
                maybe |= good
                if good == drawn:
                    return maybe
            trial = _TRIALS
            return maybe | {int(order[place]) for place in _invert(kept, uniform(seed, step, trial))}
    return {int(order[place]) for place in _invert(kept, uniform(seed, step))}


def _invert(mass: NDArray[np.float64], share: float) -> set[int]:
    """Places in whose part of the cumulated mass the share falls, give or take a little."""
    cumulated = np.cumsum(mass)
    target, close = share * cumulated[-1], CLOSE * cumulated[-1]
    here = (cumulated > target - close) & (cumulated - mass <= target + close) & (mass > 0)
    return {int(place) for place in np.flatnonzero(here)}
