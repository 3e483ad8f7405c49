"""Where Ray starts ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pegboard.core.interfaces.options import Options, PositiveInt


class RayOptions(Options):
    """Options of the launcher `ray`."""

    address: Annotated[str, Field(pattern=r"^(auto|.+:\d+)$")] | None = None
    """The Ray cluster, of which this machine must be a part: `auto` for the one that runs here, or `HOST:PORT`. Unset:
    a cluster of this machine alone is started for this server, and ends with it."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How Ray places the ranks other than rank 0, which is the server's: on as few machines as it can (`PACK`), on as
    many (`SPREAD`), on one (`STRICT_PACK`), or each on another one (`STRICT_SPREAD`)."""
    cpus: PositiveInt | None = None
    """CPUs that each rank reserves, and threads that each rank computes with, rank 0 included. Unset: an even share of
    `parallel.cores`, or of the cores of this machine."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """What each rank reserves besides, by Ray's names, such as `{node:10.0.0.2: 0.01}` or a label of your own."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that Ray may take to find room for all ranks, and to start each of them."""
