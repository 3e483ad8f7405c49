"""How KV travels through NIXL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.plugins.kv_handoff.api.staging import StagingOptions


class NixlOptions(StagingOptions):
    """Options of the engine `nixl`."""

    devices: str = ""
    """Network devices, separated by commas, such as `mlx5_0`; "": all that UCX finds."""
    ucx: dict[str, Annotated[str, Field(pattern="^[^,]*$")]] = {"TLS": "^cma"}
    """Settings of UCX by name, without commas, such as `{TLS: tcp}` for `UCX_TLS=tcp`. Those of the environment come
    first, and take commas. By default one process does not read another's memory behind its back (`cma`): that goes on
    when the other one has closed its engine."""
    parts: Annotated[int, Field(ge=1, le=64)] = 16
    """Parts of 4 MiB that are under way at once, for each peer."""
    timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds without a part's end after which reads of a peer are given up. What is under way by then ends only when
    UCX says so, and its memory is not used before."""
