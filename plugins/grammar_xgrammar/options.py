"""Options of the xgrammar backend."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import Options


class XGrammarOptions(Options):
    """Options of `xgrammar`."""

    max_whitespace: Annotated[int, Field(gt=0, le=1000)] | None = 16
    """Maximum number of consecutive spaces between the parts of a JSON answer, so that a model cannot fill its answer
    with them. With a higher number, schemas take longer to compile. null: no limit."""

    lenient_schemas: bool = False
    """Accept JSON schemas with keywords that cannot be enforced, and ignore these keywords. Off: refuse such
    schemas."""
