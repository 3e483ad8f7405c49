"""The section ``plugins.windows``, and the key of `memory` that the plugin adds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pegboard.core.interfaces.options import Options, SectionFields


class WindowFields(SectionFields):
    """Whether layers have pages by their windows."""

    window_pages: Literal["auto"] | bool = "auto"
    """Whether layers with a sliding window give back the KV memory of tokens that they do not read again, so that more
    requests fit. Does not work with speculation, tiers, ranks, disaggregation or the runner `cpu_native`. `auto`:
    off."""


class WindowOptions(Options):
    """KV of prefixes that window layers keep for later requests."""

    snapshot_every: int = Field(default=256, ge=1)
    """Number of tokens of an output between two places from which later requests can continue. They can also continue
    from the last whole page of a prompt and of an answer, and from where prompts branch."""
