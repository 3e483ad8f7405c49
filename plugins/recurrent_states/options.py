"""The section ``plugins.recurrent_states``."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class StateOptions(Options):
    """Memory for the states of models that keep some, such as Mamba and Qwen3-Next; others take none of it."""

    slots: int | None = Field(default=None, ge=4)
    """Number of states that there is memory for. Each running request needs three (two with `scheduler.loop: normal`);
    the others are for snapshots of prefixes. Unset: one more than that for each of `scheduler.max_running_requests`, if
    memory allows."""
    snapshot_every: int = Field(default=256, ge=1)
    """Minimum number of tokens between two snapshots of a prefix. With a smaller number later requests reuse more of a
    prefix, and snapshots of fewer prefixes are kept."""
    tokens_ahead: int = Field(default=7, ge=0, le=63)
    """With speculation: maximum number of drafted tokens of a request that a step verifies. Each of them takes a slot
    during the step. Drafts take at most half of the slots that requests leave."""
