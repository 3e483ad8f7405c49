"""Options of the llguidance backend."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import Options


class LLGuidanceOptions(Options):
    """Options of `llguidance`."""

    max_whitespace: Annotated[int, Field(ge=0, le=1000)] | None = 64
    """Most blanks in a row between the parts of a JSON answer, so that no model fills its answer with them. 0: none at
    all; null: no limit."""

    max_row_items: Annotated[int, Field(gt=0)] = 400
    """Most readings of an EBNF text that are kept at once, by rule and place of its beginning. An ambiguous grammar has
    more with each token, and masks take longer and longer; its request fails with 400 there."""

    lenient_schemas: bool = False
    """Take JSON schemas with keywords that cannot be enforced, as if these were not there. Off, they are refused."""
