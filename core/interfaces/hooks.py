"""Where can I take part? Every point at which any number of plugins may, in the order in which they are called.

A plugin's hook class marks methods with `hookimpl`; `HookSpecs` says what each gets, with an example. `POINTS` is the
list: process, moment and cost of each. Life-cycle hooks are called through pluggy. Step hooks are frozen into tuples
when the engine is built, take whole batches, and are called after ``if hooks:``, so that a point without listeners
costs one truth test per step, and nothing per request or token.

At one point plugins are called in the order of the plugin lock: built-in ones first, then by name; within a plugin, in
the order of its record. `hookimpl(tryfirst=True)` and `trylast=True` change that, as pluggy has them. `pegboard plugins
pipeline CONFIG` prints who takes part where. Each process has hook objects of its own. What implements a contract is a
provider, chosen in the config, and not a hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import fastapi

    from pegboard.core.interfaces.ahead import KVLayers, KVLayersContext
    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.core.interfaces.choosing import Chooser, MemoryContext
    from pegboard.core.interfaces.client import EngineClient, ModelInfo
    from pegboard.core.interfaces.engine_view import EngineView
    from pegboard.core.interfaces.followers import Followers, FollowersContext
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput
    from pegboard.core.interfaces.frontend import FrontendContext, FrontendStage
    from pegboard.core.interfaces.http_front import HttpFront, HttpGuard
    from pegboard.core.interfaces.model_family import ModelContext
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import DevicePart, Stage, StageContext

hookspec = pluggy.HookspecMarker("pegboard")
hookimpl = pluggy.HookimplMarker("pegboard")
"""Marks a method as an implementation of the hook of the same name."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point in the life of an engine: its hook's name, the process that calls it, when, and whether in each step."""

    name: str
    process: str
    when: str
    step: bool = False

    @property
    def cost(self) -> str:
        """What it costs where no plugin listens."""
        return "one truth test per step" if self.step else "nothing per step"


BOTH, API, SCHEDULER, DEVICE = "both", "API", "scheduler", "where batches run"
POINTS = (
    Point("configure", BOTH, "first of all, before anything is built"),
    Point("guard_http", API, "when the server's socket listens, before the model is loaded"),
    Point("model_services", SCHEDULER, "when the model's config is read, before its family is chosen"),
    Point("kv_layers", SCHEDULER, "before attention, runner and KV memory are chosen: layers that plugins add to it"),
    Point("pipeline_stages", SCHEDULER, "when providers are chosen, before weights are read: what takes part in steps"),
    Point("device_parts", DEVICE, "when providers are chosen, before weights are read: what stages compute there"),
    Point("followers", SCHEDULER, "before weights are read: what starts processes that compute batches, too"),
    Point("frontend_stages", API, "before the first request: what stages do with requests and answers"),
    Point("memory_services", SCHEDULER, "when KV memory is sized, before the prefix cache and the gates are built"),
    Point("engine_started", SCHEDULER, "when the model is loaded, before the first request"),
    Point("register_metrics", SCHEDULER, "within engine_started, if the engine keeps metrics"),
    Point("api_services", API, "before the routers of the config are built"),
    Point("register_routes", API, "after the routers of the config were added"),
    Point("model_names", API, "whenever names of models are listed or looked up"),
    Point("batch_scheduled", SCHEDULER, "a batch is decided, and its memory allocated", step=True),
    Point("before_forward", DEVICE, "right before the model runs", step=True),
    Point("after_forward", DEVICE, "right after the model has run", step=True),
    Point("batch_committed", SCHEDULER, "a batch's tokens were appended to its requests", step=True),
    Point("requests_finished", SCHEDULER, "requests ended; what memory they have is not released yet", step=True),
    Point("idle", SCHEDULER, "work has run out"),
    Point("shutdown", BOTH, "last of all"),
)
"""All points, in the order in which they are called. The scheduler starts before the routers are built."""


class HookSpecs:
    """Specifications, in the order of POINTS. An implementation may leave out arguments that it does not need."""

    @hookspec
    def configure(self, config: Any, origins: Mapping[str, str]) -> None:
        """Once per process, with the frozen EngineConfig, before anything is built. `origins` cites what set each key,
        by its path; keys that have their default are not in it. Raise ConfigError to stop the start.

        Example::

            @hookimpl
            def configure(self, config):
                if config.server.port < 1024:
                    raise ConfigError(Problem("server.port", "only root may listen there"))
        """

    @hookspec
    def guard_http(self, front: HttpFront) -> HttpGuard | None:
        """Once in the API process of a server, when its socket listens and before the model is loaded: what protects
        its connections and its routes. Without a guard the server has keys, TLS and `server.max_body_bytes`.

        Example::

            @hookimpl
            def guard_http(self, front):
                return None if front.keyed else OnePerSecond()
        """

    @hookspec
    def model_services(self, model: ModelContext, chooser: Chooser) -> Mapping[str, object] | None:
        """Once in the scheduler process, when the model's config is read and before its family is chosen: objects for
        the family and the runner by name, which they find in `ModelContext.services`. `chooser` builds providers of
        contracts that the plugin declares. Raise ModelError or ConfigError to stop the start. `pegboard config check`
        calls it as well, with a model in float32.

        Example::

            @hookimpl
            def model_services(self, model, chooser):
                return {"acme": chooser.choose(ACME_FORMAT, model)}
        """

    @hookspec
    def kv_layers(self, ctx: KVLayersContext) -> KVLayers | None:
        """Once in the scheduler process, before attention, runner and KV memory are chosen, and before weights are
        read: layers that KV memory is to have beside the model's.

        Example::

            @hookimpl
            def kv_layers(self, ctx):
                layer = replace(ctx.spec.layers[-1], layer_id=len(ctx.spec.layers))
                return KVLayers(layers=(layer,))
        """

    @hookspec
    def pipeline_stages(self, ctx: StageContext) -> Iterable[Stage]:
        """Once in the scheduler process, before weights are read: what takes part in steps (see `Stage`).

        Example::

            @hookimpl
            def pipeline_stages(self, ctx):
                return [Notes(ctx)]
        """
        return ()

    @hookspec
    def device_parts(self, ctx: StageContext) -> Iterable[DevicePart]:
        """Once where batches run, before weights are read: what stages compute there (see `DevicePart`).

        Example::

            @hookimpl
            def device_parts(self, ctx):
                return [NotesPart()]
        """
        return ()

    @hookspec
    def followers(self, ctx: FollowersContext) -> Followers | None:
        """Once in the scheduler process, before weights are read: bring processes that compute each batch along with
        it, to be started by `Followers.start`. One plugin may. Raise ConfigError for what of the config does not work
        with them.

        Example::

            @hookimpl
            def followers(self, ctx):
                return Second(ctx.order) if self.second else None
        """

    @hookspec
    def frontend_stages(self, ctx: FrontendContext) -> Iterable[FrontendStage]:
        """Once in the process that takes requests, before the first: what stages do there (see `FrontendStage`).

        Example::

            @hookimpl
            def frontend_stages(self, ctx):
                return [NotesFrontend()]
        """
        return ()

    @hookspec
    def memory_services(self, ctx: MemoryContext) -> Mapping[str, object] | None:
        """Once in the scheduler process, when memory for KV has been sized and before the prefix cache is built:
        objects for it by name, which it finds in `PrefixCacheContext.services`. Raise ConfigError to stop the start.

        Example::

            @hookimpl
            def memory_services(self, ctx):
                return {"acme": FarMemory(ctx.pool, ctx.num_pages)}
        """

    @hookspec
    def engine_started(self, info: ModelInfo, engine: EngineView) -> None:
        """Once in the scheduler, when the model is loaded and requests are about to be accepted.

        Example::

            @hookimpl
            def engine_started(self, info, engine):
                engine.add_control("acme.steps", lambda args: {"steps": self.steps})
        """

    @hookspec
    def register_metrics(self, registry: Any) -> None:
        """Once in the scheduler process of an engine with a metrics plugin, by that plugin, with its registry.

        Example::

            @hookimpl
            def register_metrics(self, registry):
                self.steps = prometheus_client.Counter("acme_steps", "Steps.", registry=registry)
        """

    @hookspec
    def api_services(self, chooser: Chooser, client: EngineClient) -> Mapping[str, object] | None:
        """Once in the API process, before the routers of the config are built: objects for them by name, which they
        find in `ApiContext.services`. `chooser` builds providers of contracts that the plugin declares; `client` tells
        of the model.

        Example::

            @hookimpl
            def api_services(self, chooser):
                return {"session_store": chooser.choose(SESSION_STORE, SessionStoreContext())}
        """

    @hookspec
    def register_routes(self, app: fastapi.FastAPI, client: EngineClient) -> None:
        """Once in the API process, with the FastAPI application and the engine's client, after the routers of the
        config have been added.

        Example::

            @hookimpl
            def register_routes(self, app, client):
                app.get("/steps", dependencies=[USER])(lambda: client.control("acme.steps", {}))
        """

    @hookspec
    def model_names(self) -> Sequence[str] | None:
        """In the API process, whenever names are listed or looked up, so it must be short: further names of the model.
        They stand in `/v1/models`, and requests may ask for them, which `Req.model` tells.

        Example::

            @hookimpl
            def model_names(self):
                return ["fast"]
        """

    @hookspec
    def batch_scheduled(self, batch: ScheduleBatch) -> None:
        """Each step, when the batch has been decided and its memory allocated.

        Example::

            @hookimpl
            def batch_scheduled(self, batch):
                self.largest = max(self.largest, len(batch))
        """

    @hookspec
    def before_forward(self, batch: ForwardBatch) -> None:
        """Each step, right before the model runs.

        Example::

            @hookimpl
            def before_forward(self, batch):
                self.begun = time.monotonic()
        """

    @hookspec
    def after_forward(self, batch: ForwardBatch, output: ForwardOutput) -> None:
        """Right after, unless it raised; on an asynchronous device the output's tensors may not be ready yet.

        Example::

            @hookimpl
            def after_forward(self, batch, output):
                self.seconds += time.monotonic() - self.begun
        """

    @hookspec
    def batch_committed(self, batch: ScheduleBatch) -> None:
        """When tokens have been appended and finish checks are done; of a batch that failed, for each half that passes.

        Example::

            @hookimpl
            def batch_committed(self, batch):
                self.steps += 1
        """

    @hookspec
    def requests_finished(self, reqs: Sequence[Req]) -> None:
        """With all requests that one step has ended, or one that ended otherwise, before their memory is released.

        Example::

            @hookimpl
            def requests_finished(self, reqs):
                self.tokens += sum(req.output_len for req in reqs)
        """

    @hookspec
    def idle(self) -> None:
        """In the scheduler, each time it runs out of work (not repeatedly while it stays idle).

        Example::

            @hookimpl
            def idle(self):
                self.file.flush()
        """

    @hookspec
    def shutdown(self) -> None:
        """Once per process, before it ends.

        Example::

            @hookimpl
            def shutdown(self):
                self.file.close()
        """
