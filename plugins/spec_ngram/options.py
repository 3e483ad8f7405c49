"""Options of the n-gram speculator."""

from __future__ import annotations

from pydantic import Field, model_validator

from pegboard.toolkit.speculation.accepting import AcceptOptions

LONGEST_MATCH = 16


class NgramOptions(AcceptOptions):
    """How long matches are, when it pauses, whether requests learn from each other, and which drafts stand."""

    min_match: int = Field(default=2, ge=1, le=LONGEST_MATCH)
    """Smallest number of tokens that must match earlier text; what followed there is then proposed."""

    max_match: int = Field(default=8, ge=1, le=LONGEST_MATCH)
    """Longer matches count as this long. Of equally long matches the newest is used."""

    longest_pause: int = Field(default=1, ge=1)
    """If nothing is found for a request, or all of its drafts are rejected, it is searched only in every 2nd step, then
    every 4th and so on, up to this. An accepted draft ends the pause. 1: never pause, because a search takes at most a
    hundredth of a step, and a pause misses the beginning of a quotation."""

    shared: bool = False
    """If a request's own text has no match, search the outputs of other requests of the same namespace. The speed of an
    answer then reveals what they contain."""

    capacity: int = Field(default=65536, ge=1)
    """Maximum number of remembered places in others' outputs, about 200 bytes each; each token takes `max_match` -
    `min_match` + 1 places."""

    @model_validator(mode="after")
    def _check(self) -> NgramOptions:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is larger than max_match {self.max_match}")
        return self
