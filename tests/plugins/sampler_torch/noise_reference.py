"""The noise of seed, step and token id, in plain Python and numpy: what the samplers have to agree with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LONG, _WORD = 2**64 - 1, 2**32 - 1


def key(seed: int, step: int) -> int:
    """64 bits: splitmix64's finaliser of the seed, and of that with the step."""

    def mixed(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _LONG
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    return mixed((mixed((seed + gamma) & _LONG) + (step + 1) * gamma) & _LONG)


def bits(seed: int, step: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """32 bits for each token id, as signed numbers."""
    low, high = key(seed, step) & _WORD, key(seed, step) >> 32
    # Each product is below 2^64.
    z = (ids.astype(np.uint64) * np.uint64(0x9E3779B9) + np.uint64(low)) & np.uint64(_WORD)
    z = ((z ^ (z >> np.uint64(16))) * np.uint64(0x7FEB352D)) & np.uint64(_WORD)
    z = ((z ^ (z >> np.uint64(15)) ^ np.uint64(high)) * np.uint64(0x846CA68B)) & np.uint64(_WORD)
    z = z ^ (z >> np.uint64(16))
    return z.astype(np.uint32).view(np.int32).astype(np.int64)


def noise(seed: int, step: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Gumbel noise of each token id."""
    unit = (bits(seed, step, ids) + (2.0**31 + 0.5)) / 2.0**32
    return np.asarray(-np.log(-np.log(unit)))
