"""SchedulerView: the scheduler as a life-cycle hook sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.engine_view import EngineView
from pegboard.core.interfaces.errors import PluginError

if TYPE_CHECKING:
    from pegboard.core.interfaces.engine_view import Control
    from pegboard.core.pipeline.scheduler import Scheduler
    from pegboard.core.registry.hooks import Hooks


class SchedulerView(EngineView):
    """Lets plugins read figures and add control actions; everything else of the scheduler stays its own."""

    def __init__(self, scheduler: Scheduler, hooks: Hooks) -> None:
        self._scheduler = scheduler
        self._hooks = hooks

    def stats(self) -> dict[str, object]:
        return self._scheduler.info()

    def add_control(self, action: str, run: Control) -> None:
        if action in self._scheduler.controls:
            raise PluginError(f"the control action {action!r} is there already")
        self._scheduler.controls[action] = run

    def call_hook(self, name: str, **arguments: object) -> list[object]:
        found: list[object] = getattr(self._hooks.call, name)(**arguments)
        return found
