"""A scheduler around a fake model that keeps states, and checks which it is told to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegboard.core.interfaces.stage import Stage
from pegboard.plugins.recurrent_states.slots import USE, StateSlots
from pegboard.plugins.recurrent_states.stage import States
from tests.core.pipeline.group_models import KeepsStates
from tests.core.pipeline.harness import Harness


class StateHarness(Harness):
    """With so many slots in `count`, which the model is built with."""

    def __init__(
        self, *, count: int = 12, every: int = 8, ahead: int = 7, joining: Sequence[Stage] = (), **more: Any
    ) -> None:
        page_size = more.get("page_size", 1)
        each = 3 if more.get("loop") == "overlap" else 2
        self.stage = States(lambda found: StateSlots(found, page_size, every, each, ahead))
        model = type("StateModel", (KeepsStates,), {"count": count})
        super().__init__(model=model, joining=[self.stage, *joining], **more)
        assert isinstance(self.model, KeepsStates)
        self.states = self.group_model = self.model

    @property
    def kept(self) -> int:
        """Snapshots."""
        return len(self.stage.slots.snapshots)

    def step(self) -> Any:
        outputs = super().step()
        slots = self.stage.slots
        free = len(slots.free) + len(slots.snapshots) + slots.pending
        uses = (USE.peek(req) for req in self.scheduler.requests.alive.values())
        own = sum(len(use.own) for use in uses if use is not None)
        assert free + own == slots.count, "slots are lost, or twice there"
        assert not self.states.wrong
        return outputs

    def run(self, limit: int = 5000) -> None:
        super().run(limit)
        assert self.stage.idle_error() is None
