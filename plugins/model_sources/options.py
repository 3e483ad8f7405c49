"""Options of the model sources."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class HFOptions(Options):
    """Options of `hf`."""

    revision: str | None = Field(default=None)
    """Branch, tag or commit of a hub id; null for its main branch. A directory has no revisions."""

    offline: bool = Field(default=False)
    """Use only what the hub's local cache holds; HF_HUB_OFFLINE=1 has the same effect."""

    needs_weights: bool = True
    """Whether a directory without safetensors is refused. Off with `model.load_format: dummy`, which reads none."""
