"""Options of the llguidance backend."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import Options


class LLGuidanceOptions(Options):
    """Options of `llguidance`."""

    max_whitespace: Annotated[int, Field(ge=0, le=1000)] | None = 64
    """Maximum number of consecutive spaces between the parts of a JSON answer, so that a model cannot fill its answer
    with them. 0: none; null: no limit."""

    max_row_items: Annotated[int, Field(gt=0)] = 400
    """Maximum number of parses of an EBNF text that are kept at once. An ambiguous grammar has more with each token, so
    that masks take longer and longer; beyond this limit its request gets 400."""

    lenient_schemas: bool = False
    """Accept JSON schemas with keywords that cannot be enforced, and ignore these keywords. Off: refuse such
    schemas."""
