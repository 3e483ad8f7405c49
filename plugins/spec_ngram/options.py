"""Options of the n-gram speculator."""

from __future__ import annotations

from pydantic import Field, model_validator

from pegboard.toolkit.speculation.accepting import AcceptOptions

LONGEST_MATCH = 16


class NgramOptions(AcceptOptions):
    """How long matches are, when it pauses, whether requests learn from each other, and which drafts stand."""

    min_match: int = Field(default=2, ge=1, le=LONGEST_MATCH)
    """Least tokens that must have come before for what followed them to be proposed."""

    max_match: int = Field(default=8, ge=1, le=LONGEST_MATCH)
    """Longer matches count as this long; among equally long ones the newest is taken."""

    longest_pause: int = Field(default=1, ge=1)
    """A request that nothing is found for, or whose drafts are all rejected, is looked at in every 2nd step, then every
    4th and so on, up to this. One accepted draft ends it. 1: never pause, since a look takes a hundredth of a step or
    less, and a pause misses where a quotation begins."""

    shared: bool = False
    """Where a request's own text has no match, look in the outputs of others of the same namespace. How fast an answer
    comes then tells what they have written."""

    capacity: int = Field(default=65536, ge=1)
    """Most places in others' outputs that are remembered, about 200 bytes each; `max_match` - `min_match` + 1 for each
    token."""

    @model_validator(mode="after")
    def _check(self) -> NgramOptions:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is larger than max_match {self.max_match}")
        return self
