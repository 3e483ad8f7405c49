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
    """Mooncake's metadata server, such as `http://host:8080/metadata`. P2PHANDSHAKE: no server is needed."""

    hostname: str = "127.0.0.1"
    """This machine's address, as the others reach it."""

    protocol: Literal["tcp", "rdma"] = "tcp"
    """Protocol for blocks."""

    devices: str = ""
    """For rdma: network devices, separated by commas."""

    segment_bytes: int = Field(default=1 << 30, ge=0)
    """Memory that this server lends to the store, in bytes. Its contents are lost when the server ends. 0: this server
    lends none, and blocks are in the memory of others."""

    prefix: str = Field(default="pegboard", pattern=r"^[A-Za-z0-9_-]+$")
    """Prefix of the store's keys: `prefix:identity:key in hexadecimal`."""

    timeout: float = Field(default=2.0, gt=0)
    """Seconds that a call waits for the connection to the store. A whole call may take 5, so set less."""

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        """Return what it has: blocks in memory of its own do not outlive it."""
        return declared - {"persistent"} if self.segment_bytes else declared
