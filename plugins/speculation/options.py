"""The section `speculation` of the config, beside `use` and the speculator's own options."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import PositiveInt, SectionFields


class SpeculationSection(SectionFields):
    """Speculative decoding: tokens that are proposed cheaply, and verified several at a time. Answers stay the same,
    unless a speculator's options say otherwise.
    """

    max_batch: PositiveInt = 16
    """Most running requests for which tokens are proposed: with more of them a step has enough to do anyway."""
    max_nodes: Annotated[int, Field(ge=2, le=64)] = 8
    """Most tokens of a request that are verified at once, the one included that it would compute anyway."""
    adaptive: bool = True
    """Propose no more than pays, by what was accepted of a request so far and by what verifying has cost; off, always
    `max_nodes`."""
