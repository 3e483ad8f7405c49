"""The section `parallel`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import PositiveInt, SectionFields


class ParallelSection(SectionFields):
    """Ranks: processes that compute one model together."""

    tensor: PositiveInt = 1
    """Ranks that share each matrix of the model. 1: this server's own process computes it alone."""

    timeout: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Seconds that a rank may be silent before the server starts all of them anew, and that ranks wait for each other
    at their start. At most half of `scheduler.watchdog_timeout`."""

    cores: PositiveInt | None = None
    """Cores that the ranks on this machine share evenly; by default those that this process may use. More ranks than
    cores are refused."""


class ParallelFields(SectionFields):
    """Keys of the whole config."""

    parallel: ParallelSection = ParallelSection()
    """Ranks: how many processes compute the model together, and what starts and connects them."""
