"""Work of stages reaches the `run` of their device parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pegboard.core.engine.device import executor_of, stage_parts
from pegboard.core.interfaces.ahead import DeviceServices
from pegboard.core.interfaces.batch import TableChanges
from pegboard.core.interfaces.stage import DevicePart
from pegboard.core.worker.device_parts import DeviceParts


class Adds(DevicePart):
    name = "adds"

    def run(self, payload: Any, services: DeviceServices) -> object:
        assert torch.is_inference_mode_enabled()
        return (sum(payload), services.pool, services.row_table)


class Packs(DevicePart):
    name = "packs"


def test_only_parts_that_run_something_take_work() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    sent: list[object] = []
    batches = SimpleNamespace(tables=(table,), send_table=sent.append)
    parts = DeviceParts((Adds(), Packs()))
    worker: Any = SimpleNamespace(parts=parts, batches=batches, launch=None, rerun=None, healthy=None)
    chosen: Any = SimpleNamespace(processors=(), spec=SimpleNamespace(vocab_size=5))
    pool: Any = object()
    found = stage_parts(chosen, worker, pool)
    assert {"adds", "packs"} & found.keys() == {"adds"}
    executor = executor_of("normal", worker, found, torch.device("cpu"))
    assert executor.ask("adds", [1, 2]) == (3, pool, table)
    assert sent == []
    changes = TableChanges(np.array([3]), np.array([7], np.int32))
    executor.ask("adds", [1], changes)
    assert sent == [changes]
