"""Options of the family."""

from __future__ import annotations

from typing import Literal

from pegboard.core.interfaces.options import Options


class DenseOptions(Options):
    """How the network keeps its weights."""

    packed: Literal["auto", "on", "off"] = "auto"
    """Weights on a CPU in the layout in which oneDNN multiplies: `auto` where that can be done, `on` insists, `off`
    keeps them as they were read."""
