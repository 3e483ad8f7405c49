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
    """With more running requests than this, no tokens are proposed."""
    max_nodes: Annotated[int, Field(ge=2, le=64)] = 8
    """Maximum number of tokens per request that are verified at once, including the token that it would compute
    anyway."""
    adaptive: bool = True
    """Propose only as many tokens as pay off, judged by the request's accepted drafts and the measured cost of
    verifying. Off: always `max_nodes`."""
