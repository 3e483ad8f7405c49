"""Options of the drill gate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pegboard.core.interfaces.admission_gate import GateOptions

Act = Literal["open", "delay", "fail", "never", "raise"]


class DrillGateOptions(GateOptions):
    """Options of `drill`. A request says otherwise with ``params["drill"]``, under the same names."""

    timeout: float | None = Field(default=5.0, gt=0)
    """Seconds that a request may wait here; then it ends with status 504. null: for ever."""

    act: Act = "open"
    """What happens to a request: let through, `delay`ed, failed after the delay, never answered, or the gate raises."""

    delay: float = Field(default=0.1, ge=0)
    """Seconds before the gate opens or fails."""

    hold: float = Field(default=0.0, ge=0)
    """Seconds for which a finished request's KV is kept."""
