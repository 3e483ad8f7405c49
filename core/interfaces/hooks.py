"""Hooks: places where any number of plugins may watch or add something optional. Declared with pluggy.

Life-cycle hooks are called through pluggy. Step hooks are frozen into tuples when the engine is built and called behind
``if hooks:``; they take whole batches. What implements a contract is a provider, chosen in the config, and not a hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import fastapi

    from pegboard.core.interfaces.batch import BatchExtras, ScheduleBatch
    from pegboard.core.interfaces.choosing import Chooser
    from pegboard.core.interfaces.client import EngineClient, ModelInfo
    from pegboard.core.interfaces.engine_view import EngineView
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput
    from pegboard.core.interfaces.http_front import HttpFront, HttpGuard
    from pegboard.core.interfaces.req import Req

hookspec = pluggy.HookspecMarker("pegboard")
hookimpl = pluggy.HookimplMarker("pegboard")
"""Marks a method as an implementation of the hook of the same name."""

LIFECYCLE_HOOKS = (
    "configure",
    "guard_http",
    "register_metrics",
    "api_services",
    "register_routes",
    "model_names",
    "engine_started",
    "idle",
    "shutdown",
)
STEP_HOOKS = (
    "batch_scheduled",
    "pack_batch",
    "before_forward",
    "after_forward",
    "batch_committed",
    "requests_finished",
)


class HookSpecs:
    """Specifications. An implementation may leave out arguments that it does not need."""

    @hookspec
    def configure(self, config: Any) -> None:
        """Once per process, with the frozen EngineConfig, before anything is built. Raise ConfigError to stop the
        start.
        """

    @hookspec
    def guard_http(self, front: HttpFront) -> HttpGuard | None:
        """Once in the API process of a server, when its socket listens and before the model is loaded: what protects
        its connections and its routes. Without a guard the server has keys, TLS and `server.max_body_bytes`.
        """

    @hookspec
    def register_metrics(self, registry: Any) -> None:
        """Once in the scheduler process of an engine with a metrics plugin, by that plugin, with its registry."""

    @hookspec
    def api_services(self, chooser: Chooser) -> Mapping[str, object] | None:
        """Once in the API process, before the routers of the config are built: objects for them by name, which they
        find in `ApiContext.services`. `chooser` builds providers of contracts that the plugin declares.
        """

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
    def batch_scheduled(self, batch: ScheduleBatch) -> None:
        """Each step, when the batch has been decided and its memory allocated."""

    @hookspec
    def pack_batch(self, batch: ScheduleBatch, extras: BatchExtras) -> None:
        """Each time a batch is about to run, after `batch_scheduled`: bring along what the model is to read of it
        beside its tokens. Change neither the batch nor its requests.

        Called again, with the requests that are left and with fresh `extras`, for each half of a batch that failed.
        What it raises fails the batch, so that halves are tried: a request for which it raises fails alone.
        """

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
