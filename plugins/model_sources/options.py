"""Options of the model sources."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class HFOptions(Options):
    """Options of `hf`."""

    revision: str | None = Field(default=None)
    """Branch, tag or commit of a hub id; null: its main branch. Not for directories."""

    offline: bool = Field(default=False)
    """Use only the hub's local cache; HF_HUB_OFFLINE=1 has the same effect."""

    needs_weights: bool = True
    """Refuse a directory without safetensors. Set it to false with `model.load_format: dummy`, which reads no
    weights."""
