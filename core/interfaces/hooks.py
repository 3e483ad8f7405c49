"""Hooks: places where any number of plugins may watch or add something optional. Declared with pluggy.

Life-cycle hooks are called through pluggy. Step hooks are frozen into tuples when the engine is built and called behind
``if hooks:``; they take whole batches. What implements a contract is a provider, chosen in the config, and not a hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import fastapi

    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.core.interfaces.client import EngineClient, ModelInfo
    from pegboard.core.interfaces.engine_view import EngineView
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import DevicePart, FrontendStage, Stage, StageContext

hookspec = pluggy.HookspecMarker("pegboard")
hookimpl = pluggy.HookimplMarker("pegboard")
"""Marks a method as an implementation of the hook of the same name."""

LIFECYCLE_HOOKS = (
    "configure", "register_metrics", "register_routes", "model_names", "engine_started", "idle", "shutdown"
)  # fmt: skip
STAGE_HOOKS = ("pipeline_stages", "device_parts", "frontend_stages")
STEP_HOOKS = ("batch_scheduled", "before_forward", "after_forward", "batch_committed", "requests_finished")


class HookSpecs:
    """Specifications. An implementation may leave out arguments that it does not need."""

    @hookspec
    def configure(self, config: Any) -> None:
        """Once per process, with the frozen EngineConfig, before anything is built. Raise ConfigError to stop the
        start.
        """

    @hookspec
    def register_metrics(self, registry: Any) -> None:
        """Once in the scheduler process of an engine with a metrics plugin, by that plugin, with its registry."""

    @hookspec
    def register_routes(self, app: fastapi.FastAPI, client: EngineClient) -> None:
        """Once in the API process, with the FastAPI application and the engine's client, after the routers of the
        config have been added.
        """

    @hookspec
    def model_names(self) -> Sequence[str] | None:
        """In the API process, whenever names are listed or looked up, so it must be short: further names of the model.
        They stand in `/v1/models`, and requests may ask for them, which `Req.model` tells.
        """

    @hookspec
    def engine_started(self, info: ModelInfo, engine: EngineView) -> None:
        """Once in the scheduler, when the model is loaded and requests are about to be accepted; `info` is
        ModelInfo.
        """

    @hookspec
    def idle(self) -> None:
        """In the scheduler, each time it runs out of work (not repeatedly while it stays idle)."""

    @hookspec
    def shutdown(self) -> None:
        """Once per process, before it ends."""

    @hookspec
    def pipeline_stages(self, ctx: StageContext) -> Iterable[Stage]:
        """Once in the scheduler process, when the model is loaded: what takes part in steps (see `Stage`)."""
        return ()

    @hookspec
    def device_parts(self, ctx: StageContext) -> Iterable[DevicePart]:
        """Once where batches run, when the model is loaded: what stages compute there (see `DevicePart`)."""
        return ()

    @hookspec
    def frontend_stages(self) -> Iterable[FrontendStage]:
        """Once in the process that takes requests, before the first: what stages do there (see `FrontendStage`)."""
        return ()

    @hookspec
    def batch_scheduled(self, batch: ScheduleBatch) -> None:
        """Each step, when the batch has been decided and its memory allocated."""

    @hookspec
    def before_forward(self, batch: ForwardBatch) -> None:
        """Each step, right before the model runs."""

    @hookspec
    def after_forward(self, batch: ForwardBatch, output: ForwardOutput) -> None:
        """Each step, right after; the output's tensors may not be ready yet on an asynchronous device."""

    @hookspec
    def batch_committed(self, batch: ScheduleBatch) -> None:
        """Each step, when tokens have been appended and finish checks are done."""

    @hookspec
    def requests_finished(self, reqs: Sequence[Req]) -> None:
        """In a step in which requests finished, with all of them, before their memory is released."""
