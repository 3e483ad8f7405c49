"""What brings the speculator that the config names, and the stage around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.speculation import SPECULATOR

if TYPE_CHECKING:
    from pegboard.core.interfaces.ahead import KVLayers, KVLayersContext
    from pegboard.core.interfaces.frontend import FrontendStage
    from pegboard.core.interfaces.stage import DevicePart, Stage, StageContext
    from pegboard.plugins.speculation.api import Speculator


class SpeculationHooks:
    """Brings the stage `speculation`. The speculator is built before weights are read, from configs alone."""

    _made: Speculator

    @hookimpl
    def kv_layers(self, ctx: KVLayersContext) -> KVLayers:
        from pegboard.core.interfaces.ahead import KVLayers
        from pegboard.plugins.speculation.api import SpeculatorContext
        from pegboard.plugins.speculation.checks import on_device

        max_nodes, most = ctx.config.speculation.max_nodes, ctx.config.scheduler.max_running_requests
        self._made = ctx.provider(SPECULATOR, SpeculatorContext(ctx.spec, max_nodes, ctx.model, most))
        device = on_device(self._made)
        return KVLayers(() if device is None else device.layers)

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        """Bring the stage. Raises ConfigError for a speculator whose drafts cannot be made or verified here."""
        from pegboard.plugins.speculation.checks import check, on_device
        from pegboard.plugins.speculation.figures import Figures
        from pegboard.plugins.speculation.stage import Speculation

        if self._made.max_nodes < 2:
            return [Figures()]
        check(self._made, ctx.choices, ctx.spec)
        (choice,) = ctx.choices[SPECULATOR.name]
        return [
            Speculation(
                self._made, ctx.config.speculation, ctx.spec.vocab_size, ctx.failed, name=choice.name,
                device=on_device(self._made), judges="judges" in choice.provides,
            )
        ]  # fmt: skip

    @hookimpl
    def device_parts(self, ctx: StageContext) -> list[DevicePart]:
        from pegboard.plugins.speculation.checks import on_device
        from pegboard.plugins.speculation.part import SpeculationPart

        (choice,) = ctx.choices[SPECULATOR.name]
        judges = "judges" in choice.provides and self._made.max_nodes > 1
        if not judges and on_device(self._made) is None:
            return []
        return [SpeculationPart(self._made, ctx.failed, name=choice.name, judges=judges)]

    @hookimpl
    def frontend_stages(self) -> list[FrontendStage]:
        from pegboard.plugins.speculation.frontend import SpeculationFrontend

        return [SpeculationFrontend()]
