"""Similar names: what a misspelt name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], limit: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return the names closest to `name`, best first; empty where none has a likeness of `cutoff`, from 0 to 1."""
    folded = {one.casefold(): one for one in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=limit, cutoff=cutoff)
    return [folded[one] for one in found]


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``"did you mean 'radix'?"``, or "" where nothing is close."""
    found = nearest(name, known, cutoff=cutoff)
    if not found:
        return ""
    return f"did you mean {' or '.join(repr(one) for one in found)}?"


def or_hint(name: str, known: Iterable[str]) -> str:
    """`did_you_mean` for the middle of a sentence: ``"did you mean 'radix'? "``, or ""."""
    hint = did_you_mean(name, known)
    return f"{hint} " if hint else ""
