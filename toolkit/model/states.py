"""Memory for what layers keep beside keys and values: a tensor per state of the model, with a slot per kept state.

Slot 0 is for padding, as page 0 of a KV pool is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.forward import BatchStates, StateRound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from pegboard.core.interfaces.layers import StateSpec


def bytes_per_slot(states: Sequence[StateSpec]) -> int:
    """Return the bytes of one request's states."""
    return sum(prod(state.shape) * _dtype(state).itemsize for state in states)


def state_memory(states: Sequence[StateSpec], slots: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a tensor [slots + 1, *shape] for each state, by its name. What is in them is undefined."""
    return {state.name: torch.empty((slots + 1, *state.shape), dtype=_dtype(state), device=device) for state in states}


def state_round(
    firsts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    fresh: NDArray[np.bool_],
    put: Callable[[NDArray[np.generic]], torch.Tensor],
) -> StateRound:
    """Return a round whose arrays `put` brings to the device."""
    return StateRound(firsts, lengths, put(sources), put(targets), put(fresh) if fresh.any() else None)


def decode_states(memory: Mapping[str, torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> BatchStates:
    """Return the states of a batch of one token per row, which reads and writes these slots int64 [rows]."""
    rows = len(sources)
    one_each = StateRound(np.arange(rows), np.ones(rows, np.int64), sources, targets, None)
    return BatchStates((one_each,), memory)


def _dtype(state: StateSpec) -> torch.dtype:
    dtype = getattr(torch, state.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"state {state.name!r}: {state.dtype!r} is not a floating type of torch")
    return dtype
