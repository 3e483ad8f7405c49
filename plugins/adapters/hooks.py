"""What brings the halves of the stage, if the config has adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.adapters import ADAPTERS
from pegboard.plugins.adapters.options import AdapterSection

if TYPE_CHECKING:
    import fastapi
    from prometheus_client import CollectorRegistry

    from pegboard.core.interfaces.client import EngineClient
    from pegboard.core.interfaces.engine_view import EngineView
    from pegboard.core.interfaces.frontend import FrontendContext, FrontendStage
    from pegboard.core.interfaces.model_family import ModelContext
    from pegboard.core.interfaces.stage import DevicePart, Stage, StageContext
    from pegboard.plugins.adapters.frontend import KnownAdapters
    from pegboard.plugins.adapters.stage import Adapters
    from pegboard.toolkit.model.linear import NetworkSites


class _Config(Protocol):
    """The config with the contract's section."""

    adapters: AdapterSection


class AdapterHooks:
    """Brings the stage `adapters`, and its routes."""

    _section = AdapterSection()
    """What the config says. `config check` does not tell it, and looks at no adapter."""
    _sites: NetworkSites
    _stage: Adapters | None = None
    _known: KnownAdapters | None = None

    @hookimpl
    def configure(self, config: _Config) -> None:
        self._section = config.adapters

    @hookimpl
    def model_services(self, model: ModelContext) -> Mapping[str, object]:
        if not self._section.on:
            return {}
        from pegboard.toolkit.model.linear import SITES, NetworkSites

        self._sites = NetworkSites()
        return {SITES: self._sites}

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        """Bring the stage. Raises ConfigError where adapters cannot be computed."""
        if not self._section.on:
            return []
        from pegboard.plugins.adapters.stage import Adapters

        if (who := ctx.lacking("additions")) is not None:
            key = "runner.use" if who.startswith("runner") else "model.use"
            raise ConfigError(Problem(key, f"the {who} does not compute adapters; choose another one"))
        if ctx.spec.states:
            # What its layers pass to their products is a part of the batch, and no adapter knows of which requests.
            raise ConfigError(Problem("adapters", f"{ctx.spec.architecture} keeps states, and takes no adapters yet"))
        model = ctx.config.model
        for name in self._section.preload:
            if name in (model.path, *model.served_name):
                text = f"{name!r} is a name of the model itself; give the adapter another one"
                raise ConfigError(Problem(f"adapters.preload.{name}", text))
        self._stage = Adapters(self._section)
        return [self._stage]

    @hookimpl
    def device_parts(self, ctx: StageContext) -> list[DevicePart]:
        if not self._section.on:
            return []
        from pegboard.plugins.adapters.part import AdapterPart

        return [AdapterPart(self._section, self._sites, ctx.model.dtype, lambda made: ctx.provider(ADAPTERS, made))]

    @hookimpl
    def engine_started(self, engine: EngineView) -> None:
        if self._stage is not None:
            from pegboard.plugins.adapters.controls import Controls

            Controls(self._stage).add_to(engine)

    @hookimpl
    def register_metrics(self, registry: CollectorRegistry) -> None:
        if self._stage is not None:
            from pegboard.plugins.adapters.metrics import AdapterMetrics

            registry.register(AdapterMetrics(self._stage.store))

    @hookimpl
    def frontend_stages(self, ctx: FrontendContext) -> list[FrontendStage]:
        if not self._section.on:
            return []
        from pegboard.plugins.adapters.frontend import AdapterFrontend, KnownAdapters

        self._known = KnownAdapters(self._section.preload)
        return [AdapterFrontend(self._known)]

    @hookimpl
    def model_names(self) -> Sequence[str]:
        return [] if self._known is None else list(self._known.names)

    @hookimpl
    def register_routes(self, app: fastapi.FastAPI, client: EngineClient) -> None:
        if self._known is not None:
            from pegboard.plugins.adapters.routes import Routes

            self._known.checked = True
            app.router.routes.extend(Routes(client, self._known).router().routes)
