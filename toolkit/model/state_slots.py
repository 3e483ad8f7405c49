"""Slots for the states of some requests where no scheduler gives them: probes and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.forward import BatchStates
from pegboard.toolkit.model.states import state_memory, state_round

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.layers import StateSpec

_EACH = 3


class AlternatingSlots:
    """Each request, numbered from 0, has two slots and alternates: a step reads one and writes the other. A third one
    takes the state at a cut. All slots of `memory` begin as NaN, so that what reads a free one shows.
    """

    def __init__(self, states: Sequence[StateSpec], requests: int, device: torch.device) -> None:
        self.memory = state_memory(states, _EACH * requests, device)
        for tensor in self.memory.values():
            tensor.fill_(float("nan"))
        self.current = np.arange(requests, dtype=np.int64) * _EACH + 1
        """The slot [requests] that each request's next step reads, or would read were it not the first."""
        self._device = device

    def cut_slot(self, request: int) -> int:
        """Return the slot that takes the state of a request at a cut."""
        return _EACH * request + 3

    def step(
        self,
        requests: NDArray[np.int64],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
        cuts: Mapping[int, int] = MappingProxyType({}),
    ) -> BatchStates:
        """Return the states of a batch that computes the tokens [start, stop) of each of `requests`, packed in this
        order. `cuts` are positions inside a request's tokens, by request: the state there is kept as well, and the
        tokens behind it are a second round.
        """
        ends = np.array(
            [cuts.get(request, stop) for request, stop in zip(requests.tolist(), stops.tolist(), strict=True)],
            dtype=np.int64,
        )
        firsts, again = np.cumsum(stops - starts) - (stops - starts), np.flatnonzero(ends < stops)
        sources = self.current[requests]
        # 1 and 2, 4 and 5, ... are pairs.
        others = np.where(sources % _EACH == 1, sources + 1, sources - 1)
        kept = _EACH * requests + 3
        targets = np.where(ends < stops, kept, others)
        rounds = [state_round(firsts, ends - starts, sources, targets, starts == 0, self._put)]
        if again.size:
            rest = (firsts + ends - starts)[again], (stops - ends)[again]
            going_on = np.zeros(again.size, np.bool_)
            rounds.append(state_round(*rest, kept[again], others[again], going_on, self._put))
        self.current[requests] = others
        return BatchStates(tuple(rounds), self.memory)

    def _put(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
