"""What the halves tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

# msgspec reads the types of `Rows`.
import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.sampling import LogprobRequest
from pegboard.plugins.row_outputs.api import PoolSpan

if TYPE_CHECKING:
    from pegboard.core.interfaces.stage import StageContext
    from pegboard.plugins.row_outputs.api import Pooler

NAME = "row_outputs"

Entry = tuple[float | None, int, list[tuple[float, int]]]
"""A token of a prompt: (logprob, token id, top list of (logprob, id))."""


class Asked(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request wants: logprobs of its prompt from a position on, hidden states, or its embedding and no token."""

    logprob_start: int | None = None
    hidden_states: bool = False
    embed: bool = False


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """What goes with an output: logprobs of the prompt, and its vector float32 little-endian [hidden]."""

    prompt: list[Entry] | None = None
    vector: bytes = b""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a step computes, by packed tokens (int64 arrays).

    `logprob_rows` [p] and `logprob_targets` [p]: see ForwardBatch; `logprob_requests` has (count, request) for rows
    that stand together. `pool_rows` [h] are those that the pooler reads for `pool_spans`. `hidden_rows` [s] are those
    whose hidden states go to a client.
    """

    logprob_rows: NDArray[np.int64]
    logprob_targets: NDArray[np.int64]
    logprob_requests: tuple[tuple[int, LogprobRequest], ...]
    pool_rows: NDArray[np.int64]
    pool_spans: tuple[PoolSpan, ...]
    hidden_rows: NDArray[np.int64]


def pooler_of(ctx: StageContext) -> Pooler | None:
    """Return the chosen pooler; None where the runner gives no hidden states to pool."""
    from pegboard.plugins.row_outputs import POOLER
    from pegboard.plugins.row_outputs.api import PoolerContext

    if "hidden_states" not in ctx.runner:
        return None
    return ctx.provider(POOLER, PoolerContext(ctx.directory, ctx.spec.hidden_size))
