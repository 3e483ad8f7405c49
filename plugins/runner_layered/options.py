"""Options of the runner."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pegboard.core.interfaces.options import Options


class LayeredOptions(Options):
    """How steps are run."""

    graphs: Literal["auto", "on", "off"] = "auto"
    """Record decode steps as CUDA graphs at the start and replay them, which saves the host's time. `auto`: if device,
    attention backend and model support it; `on`: fail if they do not; `off`: no graphs."""
    graph_sizes: list[Annotated[int, Field(ge=1)]] | None = None
    """Batch sizes for which decode graphs are recorded. A step uses the next larger size; larger batches run without
    graphs. Unset: 1, 2, 4, 8 to 64 by 8, to 256 by 16, and by 32 up to `scheduler.max_running_requests`."""
    prefill_graph_sizes: list[Annotated[int, Field(ge=1)]] | None = None
    """Numbers of new tokens for which graphs of prefills and mixed batches are recorded, if the attention backend
    supports it. A batch uses the next larger number; larger batches run without graphs. []: no graphs. Unset: 16, 32 to
    128 by 32, to 512 by 64, to 1024 by 128, to 2048 by 256."""

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        return declared - {"graph"} if self.graphs == "off" else declared
