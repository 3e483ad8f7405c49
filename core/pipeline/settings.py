"""What the stages read of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pegboard.core.interfaces.options import PositiveInt, SectionFields


class SchedulerSettings(SectionFields):
    """Keys of the config's section `scheduler` that the scheduler and its planner read."""

    loop: Literal["auto", "normal", "overlap"] = "auto"
    """`overlap`: plan and launch the next step while the device computes the one before; `normal`: one after the other.
    `auto`: `overlap` on a GPU, `normal` on a CPU. The tokens are the same."""
    max_running_requests: PositiveInt = 256
    """Most requests that run at once."""
    max_queued_requests: PositiveInt | None = None
    """Most requests that wait because all `max_running_requests` places are taken; one more is answered with 503, and
    an HTTP request that has more by itself with 400. Unset: 2048 in a server, and no limit for an engine in your own
    process."""
    max_queued_tokens: PositiveInt | None = None
    """Most prompt tokens that wait because KV memory does not hold them; a request with more is answered with 503, and
    an HTTP request that has more by itself with 400. Unset: 16 times what KV memory holds in a server, and no limit for
    an engine in your own process."""
    max_prefill_tokens: PositiveInt = 16384
    """Most prompt tokens in one prefill batch; a single longer prompt still runs, alone."""
    max_load_tokens: PositiveInt = 8192
    """Most tokens of cached prefixes that are loaded from the host for one prefill; a single longer prefix is still
    loaded, as the only one."""
    prefill_first: bool = False
    """Start prompts before continuing running requests; off, a chunk and a decode step alternate while requests run."""
    mixed_chunk: bool | None = None
    """Compute a prompt's chunk and the running requests' next tokens in one batch. Unset: on a GPU and where the runner
    prefers that, if no plugin splits prefills."""
    new_token_ratio: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Share of a running request's remaining output that admission reserves memory for, at the start."""
    new_token_ratio_floor: Annotated[float, Field(ge=0, le=1)] = 0.14
    """Where that share decays to, as a fraction of `new_token_ratio`."""
    new_token_ratio_decay_steps: PositiveInt = 600
    """Decode steps over which it decays."""
    retract_lookahead: Annotated[int, Field(ge=0)] = 20
    """Decode steps that must be affordable after requests were retracted for want of memory."""
    estimate_max_new_tokens: PositiveInt = 4096
    """Longest output that admission plans for, whatever a request asks for."""
    conservativeness: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the reserved share: above 1 admits less and retracts less often."""
    seed: int = 0
    """Seed of everything random: policies, and requests that bring no seed of their own."""
