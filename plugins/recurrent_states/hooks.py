"""What brings the halves of the stage, for models that keep states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl

if TYPE_CHECKING:
    from pegboard.core.interfaces.stage import DevicePart, Stage, StageContext
    from pegboard.plugins.recurrent_states.options import StateOptions


class StateHooks:
    """Brings the stage."""

    def __init__(self, options: StateOptions) -> None:
        self._options = options

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        if not ctx.spec.states:
            return []
        from pegboard.plugins.recurrent_states.slots import StateSlots, slots_each
        from pegboard.plugins.recurrent_states.stage import States

        page_size, each = ctx.config.memory.page_size, slots_each(ctx.config.scheduler.loop)
        every, ahead = self._options.snapshot_every, self._options.tokens_ahead
        return [States(lambda count: StateSlots(count, page_size, every, each, ahead))]

    @hookimpl
    def device_parts(self, ctx: StageContext) -> list[DevicePart]:
        if not ctx.spec.states:
            return []
        from pegboard.plugins.recurrent_states.part import StatePart
        from pegboard.plugins.recurrent_states.slots import slots_each

        scheduler = ctx.config.scheduler
        return [StatePart(ctx.spec.states, self._options, scheduler.max_running_requests, slots_each(scheduler.loop))]
