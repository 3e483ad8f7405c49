"""What the stages read of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pegboard.core.interfaces.options import PositiveInt, SectionFields


class SchedulerSettings(SectionFields):
    """Keys of the config's section `scheduler` that the scheduler and its planner read."""

    loop: Literal["auto", "normal", "overlap"] = "auto"
    """`overlap`: plan and launch the next step while the device computes the previous one. `normal`: one after the
    other. `auto`: `overlap` on a GPU and with `parallel.pipeline`, otherwise `normal`. The tokens are the same."""
    max_running_requests: PositiveInt = 256
    """Maximum number of requests that run at once."""
    max_queued_requests: PositiveInt | None = None
    """Maximum number of requests that wait because `max_running_requests` are running. One more gets 503; an HTTP
    request that has more by itself gets 400. Unset: 2048 in a server, no limit for an engine in your own process."""
    max_queued_tokens: PositiveInt | None = None
    """Maximum number of prompt tokens that wait because KV memory is full. A request beyond it gets 503; an HTTP
    request that has more by itself gets 400. Unset: 16 times what KV memory holds in a server, no limit for an engine
    in your own process."""
    max_prefill_tokens: PositiveInt = 16384
    """Maximum number of prompt tokens in one prefill batch. A longer prompt still runs, alone."""
    max_load_tokens: PositiveInt = 8192
    """Maximum number of tokens of cached prefixes that are loaded from the host for one prefill. A longer prefix is
    still loaded, alone."""
    prefill_first: bool = False
    """Start prompts before continuing running requests. Off: prefill chunks and decode steps alternate while requests
    run."""
    mixed_chunk: bool | None = None
    """Compute a prompt's chunk and the running requests' next tokens in one batch. Unset: on a GPU, and if the runner
    prefers it, unless a plugin splits prefills."""
    new_token_ratio: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Share of a running request's remaining output for which admission reserves memory, at the start."""
    new_token_ratio_floor: Annotated[float, Field(ge=0, le=1)] = 0.14
    """The value to which `new_token_ratio` decays, as a fraction of it."""
    new_token_ratio_decay_steps: PositiveInt = 600
    """Number of decode steps in which it decays."""
    retract_lookahead: Annotated[int, Field(ge=0)] = 20
    """Number of decode steps for which there must be memory after requests were retracted."""
    estimate_max_new_tokens: PositiveInt = 4096
    """Longest output for which admission plans, whatever a request asks for."""
    conservativeness: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the reserved share: above 1 admits less and retracts less often."""
    seed: int = 0
    """Seed of everything random: policies, and requests without a seed."""
