"""What brings the halves of the stage, if the config has weight updates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.weight_updates.options import WeightUpdateFields

if TYPE_CHECKING:
    import fastapi

    from pegboard.core.interfaces.client import EngineClient
    from pegboard.core.interfaces.engine_view import EngineView
    from pegboard.core.interfaces.frontend import FrontendContext, FrontendStage
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.stage import DevicePart, Stage, StageContext
    from pegboard.plugins.weight_updates.controls import Controls
    from pegboard.plugins.weight_updates.uploads import Uploads
    from pegboard.toolkit.http.weight_version import ServedWeights


class WeightUpdateHooks:
    """Brings the stage `weight_updates`, and its routes."""

    def __init__(self, options: Options) -> None:
        self._section = options.section(WeightUpdateFields).weight_updates
        self._controls: Controls | None = None
        self._known: ServedWeights | None = None
        self._uploads: Uploads | None = None

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        """Bring the stage. Raises ConfigError where weights cannot be replaced."""
        if not self._section.enabled:
            return []
        from pegboard.plugins.weight_updates.controls import Controls
        from pegboard.plugins.weight_updates.stage import WeightUpdates

        if (who := ctx.lacking("updates")) is not None:
            key = "runner.use" if who.startswith("runner") else "model.use"
            raise ConfigError(Problem(key, f"the {who} does not replace weights (weight_updates); choose another one"))
        stage = WeightUpdates(ctx.end)
        self._controls = Controls(stage, str(ctx.directory), groups=self._section.process_groups)
        return [stage]

    @hookimpl
    def device_parts(self, ctx: StageContext) -> list[DevicePart]:
        if not self._section.enabled:
            return []
        from pegboard.plugins.weight_updates.part import WeightPart

        roots = [ctx.directory, *map(Path, self._section.directories)]
        return [WeightPart(roots, ctx.scratch, ctx.model.hf_config, self._section.group_timeout)]

    @hookimpl
    def engine_started(self, engine: EngineView) -> None:
        if self._controls is not None:
            self._controls.add_to(engine)

    @hookimpl
    def frontend_stages(self, ctx: FrontendContext) -> list[FrontendStage]:
        if not self._section.enabled:
            return []
        from pegboard.plugins.weight_updates.frontend import WeightFrontend
        from pegboard.plugins.weight_updates.uploads import Uploads
        from pegboard.toolkit.http.weight_version import ServedWeights

        self._known, self._uploads = ServedWeights(), Uploads(ctx.scratch)
        return [WeightFrontend(self._known, self._uploads)]

    @hookimpl
    def register_routes(self, app: fastapi.FastAPI, client: EngineClient) -> None:
        if self._known is not None and self._uploads is not None:
            from pegboard.plugins.weight_updates.routes import Routes

            app.router.routes.extend(Routes(client, self._known, self._uploads).router().routes)
