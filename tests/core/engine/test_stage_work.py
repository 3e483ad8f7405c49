"""Work of stages reaches the `run` of their device parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from pegboard.core.engine.device import executor_of, stage_parts
from pegboard.core.interfaces.stage import DevicePart, DeviceServices


class Adds(DevicePart):
    name = "adds"

    def run(self, payload: Any, services: DeviceServices) -> object:
        assert torch.is_inference_mode_enabled()
        return (sum(payload), services.pool)


class Packs(DevicePart):
    name = "packs"


def test_only_parts_that_run_something_take_work() -> None:
    parts = {part.name: part for part in (Adds(), Packs())}
    worker: Any = SimpleNamespace(parts=parts, drafts=None, launch=None, again=None, healthy=None)
    chosen: Any = SimpleNamespace(processors=(), spec=SimpleNamespace(vocab_size=5))
    pool: Any = object()
    found = stage_parts(chosen, worker, pool)
    assert {"adds", "packs"} & found.keys() == {"adds"}
    executor = executor_of("normal", worker, found, torch.device("cpu"))
    assert executor.ask("adds", [1, 2]) == (3, pool)
