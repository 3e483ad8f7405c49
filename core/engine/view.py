"""SchedulerView: the scheduler as a life-cycle hook sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard.core.interfaces.engine_view import EngineView
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.hooks import SCHEDULER
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.stage import Stage
from pegboard.toolkit.system.taking_part import hook_points, stage_points

if TYPE_CHECKING:
    from pegboard.core.interfaces.engine_view import Control, PauseMode, ShownPoint
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.prefix_cache import PrefixCache
    from pegboard.core.pipeline.scheduler import Scheduler
    from pegboard.core.registry.hooks import Hooks


class SchedulerView(EngineView):
    """Lets plugins read figures, add control actions and pause; everything else of the scheduler stays its own."""

    def __init__(self, scheduler: Scheduler, hooks: Hooks) -> None:
        self._scheduler = scheduler
        self._hooks = hooks

    def stats(self) -> dict[str, object]:
        return self._scheduler.info()

    @property
    def prefix_cache(self) -> PrefixCache[Options]:
        return self._scheduler.components.memory.cache

    def points(self) -> list[ShownPoint]:
        stages = self._scheduler.components.points.stages
        return [*hook_points(self._hooks.listeners), *stage_points(Stage, stages, SCHEDULER)]

    def add_control(self, action: str, run: Control) -> None:
        if action in self._scheduler.controls:
            raise PluginError(f"the control action {action!r} is there already")
        self._scheduler.controls[action] = run

    def call_hook(self, name: str, **arguments: object) -> list[object]:
        found: list[object] = getattr(self._hooks.call, name)(**arguments)
        return found

    def pause(self, mode: PauseMode, by: str = "") -> None:
        self._scheduler.paused.add(by)
        if mode == "abort":
            self._scheduler.reception.abort(AbortRequest(all_requests=True))
        elif mode == "retract":
            self._retract_all()

    def resume(self, by: str = "") -> bool:
        paused = by in self._scheduler.paused
        self._scheduler.paused.discard(by)
        return paused

    def settle(self) -> None:
        scheduler = self._scheduler
        in_flight, scheduler.loop.in_flight = scheduler.loop.in_flight, None
        if in_flight is not None:
            scheduler.settle(in_flight)
        scheduler.planner.abandon()

    def drop_prefixes(self) -> None:
        cache = self._scheduler.components.memory.cache
        if cache.locked_tokens:
            cache.evict(cache.evictable_tokens)
        else:
            cache.reset()

    def set_on_step(self, call: Callable[[], None] | None) -> None:
        self._scheduler.on_step = call

    def _retract_all(self) -> None:
        self.settle()
        planner = self._scheduler.planner
        chunked = [] if planner.chunked is None else [planner.chunked]
        # Each goes to the head of the queue, so the first to run is the last to go.
        for req in [*chunked, *reversed([*planner.running.reqs, *planner.holding])]:
            planner.retract(req)
