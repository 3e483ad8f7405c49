"""The section `parallel`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from pegboard.core.interfaces.options import PositiveInt, SectionFields


class ParallelSection(SectionFields):
    """Ranks: processes that compute one model together."""

    tensor: PositiveInt = 1
    """Ranks that share each matrix of a layer. 1: each matrix is one rank's."""

    pipeline: PositiveInt = 1
    """Sections of layers, each computed by ranks of its own: there are `tensor` times `pipeline` ranks. 1: all ranks
    compute all layers. If both are 1, this server's own process computes the model alone."""

    layers: list[PositiveInt] | None = None
    """Number of layers of each section. By default they are divided by the bytes of their weights; the first section
    also has the embeddings and the head."""

    timeout: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Seconds that a rank may be silent before the server starts all of them anew, and that ranks wait for each other
    at their start. At most half of `scheduler.watchdog_timeout`."""

    cores: PositiveInt | None = None
    """Cores that the ranks on this machine share evenly; by default those that this process may use. More ranks than
    cores are refused."""

    @model_validator(mode="after")
    def _a_number_for_each_section(self) -> ParallelSection:
        if self.layers is not None and len(self.layers) != self.pipeline:
            raise ValueError(
                f"layers has {len(self.layers)} numbers, and pipeline makes {self.pipeline} sections: give one for each"
            )
        return self


class ParallelFields(SectionFields):
    """Keys of the whole config."""

    parallel: ParallelSection = ParallelSection()
    """Ranks: how many processes compute the model together, and what starts and connects them."""
