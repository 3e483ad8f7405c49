"""The section `grammar` of the config, beside the backend's own options."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import PositiveInt, SectionFields


class GrammarSection(SectionFields):
    """Constrained decoding: outputs that follow a grammar."""

    workers: PositiveInt = 2
    """Maximum number of helper processes that compile grammars. They start with the first grammar."""
    compile_timeout: Annotated[float, Field(gt=0)] = 10.0
    """Time limit for compiling one grammar, in seconds; beyond it the request gets 400."""
    first_slice: Annotated[float, Field(gt=0)] = 1.0
    """Seconds after which a grammar that is still being compiled is stopped if new grammars wait for a helper. It is
    compiled again after them, with all of `compile_timeout`."""
    queue_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that a grammar may wait for a helper, including earlier attempts; beyond it the request gets 503."""
    max_queued: PositiveInt = 256
    """Maximum number of grammars that wait for compilation. Beyond it the newest grammar of the API key with the most
    waiting gets 503."""
    max_source_bytes: PositiveInt = 256 * 1024
    """Longest accepted grammar, in bytes."""
    worker_memory_bytes: PositiveInt = 1024 * 1024 * 1024
    """Memory limit for compiling a grammar, in bytes, in addition to what a helper takes by itself."""
    cache_entries: PositiveInt = 256
    """Maximum number of compiled grammars in the cache."""
    cache_bytes: PositiveInt = 256 * 1024 * 1024
    """Memory limit of this cache, in bytes."""
    step_seconds: Annotated[float, Field(gt=0)] = 0.01
    """Computing time for following grammars between two steps, in seconds. A request that needs more leaves the batches
    until a thread beside the loop has done the work; the others continue."""
    work_seconds: Annotated[float, Field(gt=0)] = 2.0
    """Computing time for following one grammar, in seconds, for all running requests of one API key together, in
    addition to what their tokens earn; beyond it they get 400."""
    work_seconds_earned: Annotated[float, Field(ge=0)] = 0.01
    """Computing time that each of their tokens adds to this limit, in seconds."""
    jump_ahead: Annotated[int, Field(ge=0)] = 2
    """If a grammar forces at least this many tokens, they are taken without sampling, all in one step. 0: never.
    Requests with logprobs or hidden states always sample every token."""
