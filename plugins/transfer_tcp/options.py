"""How KV travels over TCP."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import Options


class TcpOptions(Options):
    """Options of the engine `tcp`."""

    listen_host: str = "127.0.0.1"
    """Address at which peers read from this server; `0.0.0.0` is any. What is sent is not encrypted."""
    listen_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of that address; 0 picks a free one, which peers are told."""
    connections: Annotated[int, Field(ge=1, le=16)] = 2
    """Connections to each peer that is read from."""
    connect_timeout: Annotated[float, Field(gt=0)] = 5.0
    """Seconds that connecting to a peer may take, and a peer that connects to say who it is."""
    timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds without a byte after which a connection is given up, and the reads on it fail."""
