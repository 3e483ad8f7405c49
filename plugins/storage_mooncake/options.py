"""Options of the storage in Mooncake Store."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pegboard.core.interfaces.options import Options


class MooncakeOptions(Options):
    """Options of `mooncake`."""

    master: str = "127.0.0.1:50051"
    """Where `mooncake_master` listens, host:port."""

    metadata: str = "P2PHANDSHAKE"
    """Mooncake's metadata server, such as `http://host:8080/metadata`; P2PHANDSHAKE: none is needed."""

    hostname: str = "127.0.0.1"
    """This machine's address, as the others reach it."""

    protocol: Literal["tcp", "rdma"] = "tcp"
    """What blocks travel over."""

    devices: str = ""
    """For rdma: the network devices, separated by commas."""

    segment_bytes: int = Field(default=1 << 30, ge=0)
    """Memory that this server lends to the store, from the start. What is in it is lost when the server ends; with 0
    this server lends none, and blocks are in the memory of others."""

    prefix: str = Field(default="pegboard", pattern=r"^[A-Za-z0-9_-]+$")
    """What the store's keys begin with: `prefix:identity:key in hexadecimal`."""

    timeout: float = Field(default=2.0, gt=0)
    """Seconds that a call waits for the connection to the store; less than the 5 that a whole call may take."""

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        """Return what it has: blocks in memory of its own do not outlive it."""
        return declared - {"persistent"} if self.segment_bytes else declared
