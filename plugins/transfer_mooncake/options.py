"""How KV travels through Mooncake's transfer engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pegboard.plugins.kv_handoff.api.staging import StagingOptions


class MooncakeTransferOptions(StagingOptions):
    """Options of the engine `mooncake`."""

    hostname: str = "127.0.0.1"
    """This machine's address, as peers reach it. Mooncake listens on all of its addresses, on ports of its choice: what
    reaches them can read and write the KV."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """What KV travels over."""
    devices: str = ""
    """For rdma: the network devices, separated by commas."""
    timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds without a part's end after which reads of a peer are given up. What is under way by then ends only when
    Mooncake says so, and its memory is not used before."""
