"""Options of the session gate."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.admission_gate import GateOptions


class SessionGateOptions(GateOptions):
    """Options of `session`."""

    timeout: float | None = Field(default=600.0, gt=0)
    """Seconds that a turn may wait for earlier turns; then it ends with status 504. null: no limit."""

    max_waiting_turns: int = Field(default=16, ge=1)
    """Maximum number of waiting turns of one session; one more gets status 429."""
