"""Options of the policies that rank requests by urgency."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class PriorityOptions(Options):
    """Options of `priority`."""

    aging: float | None = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds of waiting that count as one point of priority, so that no request waits for ever. null: no aging."""

    preempt: bool = True
    """Let a waiting request that does not fit preempt running requests of lower priority."""

    preempt_threshold: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Number of points by which a running request's priority must be lower to be preempted."""


class SrtfOptions(Options):
    """Options of `srtf`."""

    prefill_weight: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    """Cost of a prompt token, in generated tokens: many prompt tokens are computed in one step."""

    expected_output_tokens: int | None = Field(default=None, ge=1)
    """Expected number of generated tokens, for requests whose limit allows more. null: the limit itself
    (`max_new_tokens`)."""

    aging: float | None = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Number of generated tokens for which a second of waiting counts, so that no request waits for ever. null: no
    aging."""
