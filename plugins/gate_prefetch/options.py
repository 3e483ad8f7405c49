"""Options of the prefetch gate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pegboard.core.interfaces.admission_gate import GateOptions
from pegboard.core.interfaces.options import Options


class WaitLimit(Options):
    """Seconds that a prompt may wait, by its length."""

    base: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """Seconds for any prompt."""
    per_1024: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Seconds more for each 1,024 tokens of it."""
    max: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Most seconds."""


class PrefetchGateOptions(GateOptions):
    """Options of `prefetch`."""

    timeout: Literal[None] = None
    """Always null: `limit` and `stall` end the wait, and this gate never fails a request."""

    policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    """How long a request waits for KV from storages. `best_effort`: not at all; what arrives before its turn is used.
    `wait_complete`: until all of it has arrived. `timeout`: at most `limit`."""

    limit: Literal["auto"] | WaitLimit = "auto"
    """How long a request waits with the policy `timeout`. `auto`: not longer than computing would take, at the recently
    measured speed. Or an object with `base` (2.0), `per_1024` (0.1) and `max` (30.0): `base` seconds plus `per_1024`
    for each 1,024 tokens of the prompt, but at most `max`."""

    stall: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """If nothing arrives for this many seconds, requests stop waiting, whatever the policy."""

    threshold: int = Field(default=256, ge=1)
    """Prompts with fewer tokens do not wait, because computing them is faster."""
