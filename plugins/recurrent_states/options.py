"""The section ``plugins.recurrent_states``."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class StateOptions(Options):
    """Memory for the states of models that keep some, such as Mamba and Qwen3-Next; others take none of it."""

    slots: int | None = Field(
        default=None,
        ge=4,
        description="how many states there is memory for: three for each request that runs (two with scheduler.loop "
        "normal), the others for snapshots of prefixes; null: one more than that for each of "
        "scheduler.max_running_requests, as far as memory allows",
    )
    snapshot_every: int = Field(
        default=256,
        ge=1,
        description="a snapshot is kept no nearer than so many tokens behind the one before it; smaller: prefixes are "
        "reused to within fewer tokens, and fewer of them are kept",
    )
    tokens_ahead: int = Field(
        default=7,
        ge=0,
        le=63,
        description="with speculation: how many drafts of a request are verified in a step at most. Each takes a slot "
        "while it is; drafts have no more than half of the slots that requests leave",
    )
