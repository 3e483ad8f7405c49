"""Where batches run: the memory of states, and which of it a batch reads and writes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import ConfigError, OutOfMemory, Problem
from pegboard.core.interfaces.forward import BatchStates
from pegboard.core.interfaces.stage import DevicePart
from pegboard.plugins.recurrent_states.messages import NAME, HowMany, StateWork
from pegboard.toolkit.model.states import bytes_per_slot, state_memory, state_round
from pegboard.toolkit.system.memory import free_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.ahead import DeviceServices, LoadedModel
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import StateSpec
    from pegboard.plugins.recurrent_states.options import StateOptions

logger = logging.getLogger(__name__)

_BESIDE = 1
"""Slots for snapshots, for each request that may run, beside those that the request takes."""
_SHARE_CPU, _MOST_CPU = 0.125, 4 * 2**30
_SHARE_GPU = 0.3
"""What states take of the memory that is free at the start, where `plugins.recurrent_states.slots` does not say."""


class StatePart(DevicePart):
    """Has the memory. At most `running` requests run at once, with `each` slots."""

    name = NAME
    states = True

    def __init__(self, states: Sequence[StateSpec], options: StateOptions, running: int, each: int) -> None:
        self._states = tuple(states)
        self._options = options
        self._running = running
        self._each = each
        self._least = each + 2
        """Slots with which one request runs: its own, that of a snapshot to begin from, and of one that it passes."""

    def attach(self, model: LoadedModel) -> None:
        """Take the memory. Raises OutOfMemory and ConfigError where it does not suffice."""
        each = bytes_per_slot(self._states)
        free = free_bytes(model.device)
        if self._options.slots is not None and self._options.slots < self._least:
            raise ConfigError(Problem("plugins.recurrent_states.slots", f"must be at least {self._least}"))
        self.count = self._options.slots or self._automatic(each, free, model.device)
        if (self.count + 1) * each > free:
            text = f"{self.count} states take {_gib(self.count * each)}, but only {_gib(free)} are free"
            raise ConfigError(
                Problem("plugins.recurrent_states.slots", f"{text}; lower it to at most {free // each - 1}")
            )
        self.state_memory = state_memory(self._states, self.count, model.device)
        if model.device.type == "cpu":
            self.device_bytes = (self.count + 1) * each  # a GPU's are taken already
        logger.info(
            "states: %d slots of %.1f MiB each; at most %d requests run at once, the other slots are for snapshots",
            self.count, each / 2**20, min(self._running, self.count // self._each),
        )  # fmt: skip

    def unpack(self, payload: object, batch: ForwardBatch, put: Callable[[NDArray[np.generic]], torch.Tensor]) -> None:
        assert isinstance(payload, StateWork)
        rounds = tuple(
            state_round(one.firsts, one.lengths, one.sources, one.targets, one.fresh, put) for one in payload.rounds
        )
        assert self.state_memory is not None
        batch.states = BatchStates(rounds, self.state_memory)

    def run(self, payload: object, services: DeviceServices) -> object:
        assert isinstance(payload, HowMany)
        return self.count

    def _automatic(self, each: int, free: int, device: torch.device) -> int:
        most = free * _SHARE_GPU if device.type == "cuda" else min(free * _SHARE_CPU, _MOST_CPU)
        found = min(int(most // each) - 1, (self._each + _BESIDE) * self._running)
        if found < self._least:
            raise OutOfMemory(
                f"{_gib(free)} are free, and the states of one request take {_gib(each)}: they may have "
                f"{_gib(int(most))}, and need room for {self._least}; set plugins.recurrent_states.slots"
            )
        return found


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
