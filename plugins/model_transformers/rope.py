"""Rotary embeddings of transformers whose frequencies depend on how long the longest sequence of a batch is."""

from __future__ import annotations

from typing import Any


def hold_rope_still(model: Any) -> None:
    """Keep the frequencies that the rotary embeddings of `model` were made with, those of short sequences, so that they
    do not look at positions. `limits` takes no context for which they would be others.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str | dict):
            module.rope_type = "default" if isinstance(kind, str) else dict.fromkeys(kind, "default")
