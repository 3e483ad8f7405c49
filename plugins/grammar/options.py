"""The section `grammar` of the config, beside the backend's own options."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import PositiveInt, SectionFields


class GrammarSection(SectionFields):
    """Constrained decoding: outputs that follow a grammar."""

    workers: PositiveInt = 2
    """Most helper processes that compile grammars. They start with the first grammar."""
    compile_timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that one grammar may take to compile; its request fails with 400 then."""
    first_slice: Annotated[float, Field(gt=0)] = 1.0
    """Seconds after which a grammar that is not compiled yet gives way to new ones that wait for a helper. It
    starts again after them, and then has all of `compile_timeout`."""
    queue_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that a grammar may wait for a helper, the time before it gave way included; its request fails with 503
    then."""
    max_queued: PositiveInt = 256
    """Most grammars that wait to be compiled; one more fails with 503, or the newest one of the API key that has more
    of them waiting than the others."""
    max_source_bytes: PositiveInt = 256 * 1024
    """Longest grammar that is taken, in bytes."""
    worker_memory_bytes: PositiveInt = 1024 * 1024 * 1024
    """Memory that compiling a grammar may take, beyond what a helper has anyway."""
    cache_entries: PositiveInt = 256
    """Most compiled grammars that are kept."""
    cache_bytes: PositiveInt = 256 * 1024 * 1024
    """Memory that kept grammars may take."""
    step_seconds: Annotated[float, Field(gt=0)] = 0.01
    """Computing time that following grammars may take between two steps, in seconds. A request that would take more
    sits out some steps, until a thread beside the loop has done its work; the others go on."""
    work_seconds: Annotated[float, Field(gt=0)] = 2.0
    """Computing time that the running requests with one grammar (and one API key) may take to follow it, in seconds,
    beyond what their tokens earn; they fail with 400 then."""
    work_seconds_earned: Annotated[float, Field(ge=0)] = 0.01
    """Computing time that each of their tokens earns, in seconds."""
    jump_ahead: Annotated[int, Field(ge=0)] = 2
    """Least tokens that a grammar must force for them to be taken without asking the model, all in one step. 0: never.
    Requests that want logprobs or hidden states never skip a token."""
