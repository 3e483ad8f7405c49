"""What a sampler may draw, in float64 and with a sort of the whole vocabulary.

Of the tokens that the filters keep it is the one with the largest logit / temperature + noise. So there is one right
token, or one for each of the sets that are kept where a token stands upon the border of a filter.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.plugins.sampler_torch.noise_reference import noise

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLOSE = 2e-6
"""What float32 sums over a vocabulary may be off by."""


def choices(logits: NDArray[np.float32], row: Mapping[str, Any]) -> set[int]:
    """The tokens that are right for `logits` [vocab], none of them NaN, with the parameters of `row`."""
    exact = np.minimum(logits, np.finfo(np.float32).max).astype(np.float64)
    temperature = float(np.float32(row.get("temperature", 0.0)))
    if temperature == 0 or row.get("top_k") == 1:
        return {int(exact.argmax())}
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        ahead = (exact - exact.max()) / temperature
    # Each of the borders may lie a little to either side.
    return {_choice(exact, ahead, row, *more) for more in itertools.product((1 - CLOSE, 1 + CLOSE), repeat=2)}


def _choice(
    exact: NDArray[np.float64], ahead: NDArray[np.float64], row: Mapping[str, Any], top_p_by: float, min_p_by: float
) -> int:
    vocab = len(exact)
    mass = np.exp(ahead)
    order = np.argsort(-exact, kind="stable")
    head = mass[order]
    head[row.get("top_k", vocab) :] = 0.0
    top_p = float(np.float32(row.get("top_p", 1.0)))
    stays = np.arange(vocab) < row.get("top_k", vocab)
    if top_p < 1.0:
        stays &= np.cumsum(head) - head < top_p * head.sum() * top_p_by
    stays &= mass[order] >= min(float(np.float32(row.get("min_p", 0.0))) * min_p_by, 1.0)
    kept = np.sort(order[stays])
    scores = ahead[kept] + noise(row["seed"], row.get("step", 0), kept)
    return int(kept[scores.argmax()])
