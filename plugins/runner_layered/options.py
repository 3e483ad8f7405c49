"""Options of the runner."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pegboard.core.interfaces.options import Options


class LayeredOptions(Options):
    """How steps are run."""

    graphs: Literal["auto", "on", "off"] = "auto"
    """Decode steps as graphs, recorded at the start and replayed, so that a step costs the host next to nothing: `auto`
    where the device, the attention backend and the model's network can, `on` insists, `off` calls every operator."""
    graph_sizes: list[Annotated[int, Field(ge=1)]] | None = None
    """Numbers of requests for which there is a graph; a step takes the next larger one, and larger batches run without.
    Unset: 1, 2, 4, 8 to 64 by 8, to 256 by 16, and by 32 up to `scheduler.max_running_requests`."""
    prefill_graph_sizes: list[Annotated[int, Field(ge=1)]] | None = None
    """Numbers of new tokens for which prefills and mixed batches are graphs, too, where the attention backend can: a
    batch takes the next larger one, and larger ones run without; [] for none. Unset: 16, 32 to 128 by 32, to 512 by 64,
    to 1024 by 128, to 2048 by 256."""

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        return declared - {"graph"} if self.graphs == "off" else declared
