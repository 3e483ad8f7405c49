"""The stage in the suite of stages. It takes part in all requests, whatever they ask for."""

from __future__ import annotations

from typing import Any

from pegboard.conformance.stage import StageContract
from pegboard.conformance.stage.rig import StageRig
from pegboard.core.interfaces.stage import Stage
from pegboard.plugins.recurrent_states.slots import StateSlots
from pegboard.plugins.recurrent_states.stage import States

SLOTS = 12


class TestStates(StageContract):
    def make_stage(self) -> Stage:
        return States(lambda count: StateSlots(count, 1, 8, 3))

    def feature(self) -> object:
        return True

    def rig(self, stage: Stage | None, **more: Any) -> StageRig:
        return StageRig([] if stage is None else [stage], self.compute, work=lambda payload: SLOTS, **more)
