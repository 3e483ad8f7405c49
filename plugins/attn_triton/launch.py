"""Shapes of launches: into how many parts KV is cut. Needs no triton."""

from __future__ import annotations

MAX_PARTS = 64
LEAST_PART = 128
"""Tokens: a shorter part costs more in the reduction than it saves."""


LONG_PARTS = 16
LONG_PART = 1024
"""Where requests fill the device without being cut, only long ones are, and into larger parts."""


def cut(programs: int, multiprocessors: int, longest: int, least: int) -> tuple[int, int]:
    """Return (parts at most, the least tokens of one) for decodes of `programs` programs per part.

    Where there are enough programs to fill the device, a long request among short ones would still be read by few of
    them, at the speed of one block each: so what is long is cut, too. Parts of 1,024 tokens cost nothing to speak of.
    """
    parts = most_parts(programs, multiprocessors, longest, least)
    if parts > 1 or longest <= max(LONG_PART, least):
        return parts, least
    wanted = -(-longest // LONG_PART)
    return min(LONG_PARTS, 1 << (wanted - 1).bit_length()), max(LONG_PART, least)


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
