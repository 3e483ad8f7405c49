"""What modules that keep states compute together: the runs of a round of `ForwardBatch.states` of one length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import BatchStates, StateRound


@dataclass(frozen=True, slots=True)
class Segment:
    """Runs of `length` tokens that are computed together. `rows` int64 [runs * length] are their places among the
    packed tokens, None where they are all of these in order; the others are as in `StateRound`.
    """

    rows: torch.Tensor | None
    length: int
    sources: torch.Tensor
    targets: torch.Tensor
    fresh: torch.Tensor | None
    memory: Mapping[str, torch.Tensor]


def segments_of(states: BatchStates, tokens: int) -> tuple[Segment, ...]:
    """Return what a batch of so many tokens computes together, in the order in which it must be computed."""
    return tuple(segment for one in states.rounds for segment in _segments(one, states.memory, tokens))


def _segments(one: StateRound, memory: Mapping[str, torch.Tensor], tokens: int) -> list[Segment]:
    found = []
    for length in np.unique(one.lengths).tolist():
        runs = np.flatnonzero(one.lengths == length)
        places = (one.firsts[runs, None] + np.arange(length)).reshape(-1)
        whole = len(places) == tokens and bool((np.diff(places) == 1).all())
        slots = one.sources, one.targets, one.fresh
        if len(runs) < len(one.lengths):
            which = torch.from_numpy(runs).to(one.sources.device)
            slots = one.sources[which], one.targets[which], None if one.fresh is None else one.fresh[which]
        rows = None if whole else torch.from_numpy(places).to(one.sources.device)
        found.append(Segment(rows, length, *slots, memory))
    return found
