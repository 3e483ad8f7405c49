"""Slots that requests alternate between where there is no scheduler."""

from __future__ import annotations

import numpy as np
import torch

from pegboard.core.interfaces.layers import StateSpec
from pegboard.toolkit.model.state_slots import AlternatingSlots

STATES = (StateSpec("layers.0.conv.0", (3, 2), "bfloat16"), StateSpec("layers.0.recurrent.0", (4,), "float32"))


def array(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def test_memory_is_full_of_nan() -> None:
    slots = AlternatingSlots(STATES, 2, torch.device("cpu"))
    assert {name: (tuple(x.shape), x.dtype) for name, x in slots.memory.items()} == {
        "layers.0.conv.0": ((7, 3, 2), torch.bfloat16),
        "layers.0.recurrent.0": ((7, 4), torch.float32),
    }
    assert all(bool(x.isnan().all()) for x in slots.memory.values())


def test_requests_alternate() -> None:
    slots = AlternatingSlots(STATES, 2, torch.device("cpu"))
    (first,) = slots.step(array(1, 0), array(0, 0), array(5, 2)).rounds
    assert (first.firsts.tolist(), first.lengths.tolist()) == ([0, 5], [5, 2])
    assert first.fresh is not None
    assert first.fresh.tolist() == [True, True]
    (second,) = slots.step(array(0), array(2), array(3)).rounds
    assert second.fresh is None
    assert second.sources.tolist() == first.targets.tolist()[1:] == [2]
    assert second.targets.tolist() == first.sources.tolist()[1:] == [1]


def test_what_is_behind_a_cut_is_a_second_round() -> None:
    slots = AlternatingSlots(STATES, 2, torch.device("cpu"))
    first, second = slots.step(array(0, 1), array(0, 0), array(3, 9), {1: 4}).rounds
    assert (first.firsts.tolist(), first.lengths.tolist()) == ([0, 3], [3, 4])
    assert (second.firsts.tolist(), second.lengths.tolist()) == ([7], [5])
    assert first.targets.tolist()[1] == second.sources.tolist()[0] == slots.cut_slot(1)
    assert second.targets.tolist() == [slots.current[1]]
    assert second.fresh is None
