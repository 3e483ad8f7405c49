"""Options of the session gate."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.admission_gate import GateOptions


class SessionGateOptions(GateOptions):
    """Options of `session`."""

    timeout: float | None = Field(default=600.0, gt=0)
    """Seconds that a turn may wait for the ones before it; then it ends with status 504. null: for ever."""

    max_waiting_turns: int = Field(default=16, ge=1)
    """Turns of one session that may wait; one more is refused with status 429."""
