"""How KV travels through Mooncake's transfer engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pegboard.plugins.kv_handoff.api.staging import StagingOptions


class MooncakeTransferOptions(StagingOptions):
    """Options of the engine `mooncake`."""

    hostname: str = "127.0.0.1"
    """This machine's address, as peers reach it. Mooncake listens on all addresses, on ports of its choice; anyone who
    reaches them can read and write the KV."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Protocol for KV."""
    devices: str = ""
    """For rdma: network devices, separated by commas."""
    timeout: Annotated[float, Field(gt=0)] = 10.0
    """If no part of a peer's reads completes for this many seconds, they fail. The memory of running reads is not
    reused before Mooncake reports their end."""
