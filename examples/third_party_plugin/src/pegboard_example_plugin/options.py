"""What can be set in the config, below a provider's `use`: a type, a default and a description for each."""

from typing import Literal

from pegboard.core.interfaces import GateOptions, Options
from pydantic import Field


class ShortestPromptOptions(Options):
    bucket: int = Field(default=1, ge=1)
    """Prompt lengths are compared in steps of this many tokens; within a step the order is that of arrival."""


class WholePromptOptions(Options):
    evict: Literal["least_used", "oldest"] = "least_used"
    """What goes first when memory runs out: what was found least recently, or what has been there longest."""


class NoRepeatOptions(Options):
    longest: int = Field(default=32, ge=1)
    """The largest `size` that a request may ask for."""


class TopNSigmaOptions(Options):
    n: float = Field(default=1.5, gt=0.0)
    """Standard deviations below the largest logit down to which tokens are drawn, unless a request says otherwise."""


class BigramsOptions(Options):
    nodes: int = Field(default=4, ge=2, le=64)
    """Most tokens of a request that are verified at once, the one included that it would compute anyway."""


class RateLimitOptions(GateOptions):
    per_second: float = Field(default=10.0, gt=0.0)
    """Requests of one API key that pass in a second, on the long run."""
    burst: int = Field(default=20, ge=1)
    """Requests of one API key that pass at once after a pause."""
    waiting: int = Field(default=20, ge=0)
    """Requests of one API key that may wait for their turn; one more is refused with status 429."""


class CompletionLinesOptions(Options):
    max_tokens: int = Field(default=256, ge=1)
    """Length of an answer, in tokens, for a request that names none."""
    keep_alive: float | None = Field(default=None, gt=0.0)
    """Seconds without a line after which a stream sends an empty one, for proxies that close silent connections;
    null: never."""


class BracketedOptions(Options):
    begin: str = Field(default="[[", min_length=1)
    """What stands before a call."""
    end: str = Field(default="]]", min_length=1)
    """What stands behind a call."""
