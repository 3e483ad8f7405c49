"""The stage in the suite of stages. It takes part in all requests, whatever they ask for."""

from __future__ import annotations

from typing import Any

from pegboard.conformance.stage import StageContract
from pegboard.conformance.stage.rig import StageRig
from pegboard.core.interfaces.stage import Stage
from pegboard.plugins.windows.messages import Memory
from pegboard.plugins.windows.pages import WindowPages
from pegboard.plugins.windows.stage import Windows

MEMORY = Memory((12,), 17, 1024)


class TestWindows(StageContract):
    def make_stage(self) -> Stage:
        return Windows(lambda memory: WindowPages([5], memory, 1, 8))

    def feature(self) -> object:
        return True

    def rig(self, stage: Stage | None, **more: Any) -> StageRig:
        return StageRig([] if stage is None else [stage], self.compute, work=lambda payload: MEMORY, **more)
