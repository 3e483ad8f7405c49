"""What brings the stage, where the config wants prefills in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.prefill_in_parts.options import PartFields

if TYPE_CHECKING:
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.stage import Stage, StageContext


class PartHooks:
    """Brings the stage `prefill_in_parts`."""

    def __init__(self, options: Options) -> None:
        self._layers = options.section(PartFields).split_prefill_layers

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        """Bring it, if it has something to do. Raises ConfigError where the runner cannot pause."""
        if not self._layers:
            return []
        if "split_prefill" not in ctx.runner:
            text = f"the runner {ctx.runner_name!r} cannot pause between layers (it lacks the capability split_prefill)"
            remedy = "set it to 0, or choose another runner.use"
            raise ConfigError(Problem("scheduler.split_prefill_layers", f"{text}; {remedy}"))
        from pegboard.plugins.prefill_in_parts.stage import PrefillInParts

        num_layers = len(ctx.spec.layers)
        return [PrefillInParts(self._layers, num_layers)] if self._layers < num_layers else []
