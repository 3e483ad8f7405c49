"""How KV travels through NIXL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.plugins.kv_handoff.api.staging import StagingOptions


class NixlOptions(StagingOptions):
    """Options of the engine `nixl`."""

    devices: str = ""
    """Network devices, separated by commas, such as `mlx5_0`. Empty: all that UCX finds."""
    ucx: dict[str, Annotated[str, Field(pattern="^[^,]*$")]] = {"TLS": "^cma"}
    """Settings of UCX by name, without commas, such as `{TLS: tcp}` for `UCX_TLS=tcp`. The environment overrides them,
    and allows commas. By default `cma` (direct reads of another process's memory) is off, because such reads continue
    after the other process has closed its engine."""
    parts: Annotated[int, Field(ge=1, le=64)] = 16
    """Number of parts of 4 MiB that are read at once, per peer."""
    timeout: Annotated[float, Field(gt=0)] = 10.0
    """If no part of a peer's reads completes for this many seconds, they fail. The memory of running reads is not
    reused before UCX reports their end."""
