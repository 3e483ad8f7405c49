"""How KV travels over TCP."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import Options


class TcpOptions(Options):
    """Options of the engine `tcp`."""

    listen_host: str = "127.0.0.1"
    """Address at which peers read from this server; `0.0.0.0`: all. Data is not encrypted."""
    listen_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of that address; 0: a free port, which peers are told."""
    connections: Annotated[int, Field(ge=1, le=16)] = 2
    """Number of connections to each peer from which this server reads."""
    connect_timeout: Annotated[float, Field(gt=0)] = 5.0
    """Time limit for connecting to a peer, and for the first message of a peer that connects, in seconds."""
    timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds without a byte after which a connection is closed and its reads fail."""
