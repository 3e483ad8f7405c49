"""Options of the xgrammar backend."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import Options


class XGrammarOptions(Options):
    """Options of `xgrammar`."""

    max_whitespace: Annotated[int, Field(gt=0, le=1000)] | None = 16
    """Most blanks in a row between the parts of a JSON answer, so that no model fills its answer with them; the more,
    the longer a schema takes to compile. null: no limit."""

    lenient_schemas: bool = False
    """Take JSON schemas with keywords that cannot be enforced, as if these were not there. Off, they are refused."""
