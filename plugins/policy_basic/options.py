"""Options of the policies that rank requests by urgency."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class PriorityOptions(Options):
    """Options of `priority`."""

    aging: float | None = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds of waiting that count as much as one point of priority, so that nothing waits for ever; null for
    priorities that never age."""

    preempt: bool = True
    """Whether a waiting request may push out running ones of lower priority when it does not fit."""

    preempt_threshold: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """By how many points of priority a running request must be lower to be pushed out."""


class SrtfOptions(Options):
    """Options of `srtf`."""

    prefill_weight: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    """What a token of the prompt costs, in generated tokens: many are computed in one step."""

    expected_output_tokens: int | None = Field(default=None, ge=1)
    """How many tokens a request is expected to generate where its limit allows more; null expects the limit itself
    (`max_new_tokens`)."""

    aging: float | None = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Generated tokens that a second of waiting counts for, so that nothing waits for ever; null for none."""
