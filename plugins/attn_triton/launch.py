"""Shapes of launches: tiles of an extend, parts of a decode. Needs no triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_PARTS = 64
LEAST_PART = 128
"""Tokens: a shorter part costs more in the reduction than it saves."""


def extend_tiles(
    requests: NDArray[np.int64], new: NDArray[np.int64], prefix: NDArray[np.int64], tokens: int, window: int | None
) -> NDArray[np.int32]:
    """Tiles int32 [tiles, 2], (request, first new token), that cover `new` tokens of each of `requests`.

    `tokens` to a tile; those with the most keys first, so that the last ones to run are short.
    """
    counts = -(-new // tokens)
    owner = np.repeat(np.arange(len(requests)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    keys = prefix[owner] + np.minimum(first + tokens, new[owner])
    if window is not None:
        keys = np.minimum(keys, window + tokens)
    order = np.argsort(-keys, kind="stable")
    return np.stack((requests[owner], first), axis=1)[order].astype(np.int32)


def most_parts(programs: int, multiprocessors: int, longest: int, least: int) -> int:
    """Return into how many parts KV is cut at most, a power of two. `programs` run per part, of all requests together.

    So many that every multiprocessor gets two programs, and none that `longest`, the tokens that a request may see at
    most, could not fill with `least` tokens each. What requests there are decides nothing: a batch of this size is
    always launched alike.
    """
    wanted = min(-(-2 * multiprocessors // max(1, programs)), -(-longest // least), MAX_PARTS)
    return 1 << (wanted - 1).bit_length() if wanted > 1 else 1


def prefix_parts(prefix: int, programs: int, multiprocessors: int, block_keys: int, least: int) -> tuple[int, int]:
    """Return (parts of a shared prefix, tokens in each but the last), whole blocks."""
    parts = most_parts(programs, multiprocessors, prefix, least)
    size = -(-prefix // (parts * block_keys)) * block_keys
    return -(-prefix // size), size
