"""`pegboard serve`: the API process. Starts the scheduler process, offers the APIs over HTTP, and drains at the end.

Imports neither torch nor transformers. The scheduler process is a child that lives and dies with this one.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pegboard.core.config.body_fields import body_fields
from pegboard.core.config.early import import_chosen, on_api_side
from pegboard.core.config.select import Selection
from pegboard.core.engine.source import prepare_model
from pegboard.core.engine.stages import frontend_context, frontend_features
from pegboard.core.frontend.features import Features
from pegboard.core.interfaces.api_router import ApiContext, ApiRouter
from pegboard.core.interfaces.client import EngineClient, ModelInfo
from pegboard.core.interfaces.contract import Contract, Ctx, T
from pegboard.core.interfaces.contracts import API
from pegboard.core.interfaces.http_front import HttpFront, HttpGuard
from pegboard.core.registry.hooks import Hooks
from pegboard.core.server.client import AsyncEngineClient
from pegboard.core.server.scheduler_process import BUILDER
from pegboard.core.server.supervisor import STOP_TIMEOUT, Supervisor
from pegboard.toolkit.chat import rendering
from pegboard.toolkit.http.app import build_app, sample_request
from pegboard.toolkit.http.budget import BudgetLimits
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.listening import exposure, listen
from pegboard.toolkit.http.loading import Entrance
from pegboard.toolkit.http.model_names import ModelNames
from pegboard.toolkit.http.server import LAST_ANSWERS, HttpServer
from pegboard.toolkit.http.tls import tls_context
from pegboard.toolkit.system.event_loop import ended_before, loop_factory
from pegboard.toolkit.system.logs import configure_logging
from pegboard.toolkit.system.scratch import new_directory
from pegboard.toolkit.system.stop_signals import StopSignals

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pegboard.core.config.compose import ResolvedConfig

logger = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds beyond all time-outs after which a process that was told to stop, and does not, ends hard."""

NamedRouters = list[tuple[str, ApiRouter]]


def serve(resolved: ResolvedConfig, *, builder: str = BUILDER) -> None:
    """Serve until SIGTERM or SIGINT; a second one does not wait for running requests.

    Raises PegboardError where the port is taken, the model cannot be served, or the scheduler does not stay alive.
    `builder` is the lazy name of what builds the scheduler in its process.
    """
    engine = resolved.engine
    configure_logging("api", engine.log_level, engine.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    for conflict in resolved.registry.conflicts:
        logger.warning("%s", conflict)
    resolved.warn()
    keys = Keys.of(engine.server)
    tls = tls_context(engine.server.tls)
    listener = listen(engine.server)
    if (warning := exposure(engine.server, listener, keyed=bool(keys))) is not None:
        logger.warning(warning)
    longest = engine.server.shutdown_timeout + LAST_ANSWERS + STOP_TIMEOUT + PATIENCE
    try:
        with StopSignals(longest) as signals, asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_Server(resolved, HttpFront(listener, bool(keys), tls), builder, keys).run(signals))
    finally:
        listener.close()


class _Server:
    """One run of the server."""

    def __init__(self, resolved: ResolvedConfig, front: HttpFront, builder: str, keys: Keys) -> None:
        self._resolved = resolved
        self._keys = keys
        self._front = front
        self._scratch = new_directory()
        self._features = Features()
        self._supervisor = Supervisor(resolved, builder=builder, scratch=str(self._scratch))
        self._hooks = Hooks.load(resolved.registry, resolved.plugin_options)
        # Those of the engine's side are imported by the scheduler process, before it loads the model.
        import_chosen(resolved, on_api_side)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self, signals: StopSignals) -> None:
        signals.tell(asyncio.get_running_loop(), lambda: self._signalled(signals.last))
        self._hooks.call.configure(config=self._resolved.engine, origins=self._resolved.origins)
        guards: list[HttpGuard] = self._hooks.call.guard_http(front=self._front)
        entrance = Entrance()
        http = HttpServer(entrance, self._front, guards)
        serving = asyncio.ensure_future(http.serve())
        try:
            await http.listening(serving)
            client = await self._start_engine()
            if client is not None:
                entrance.app, routers = self._application(client, guards)
                self._announce(entrance.app, routers)
                await self._serve(client, http, serving)
        finally:
            http.leave()
            await asyncio.wait({serving})
            await self._supervisor.stop()
            self._features.close()
            self._hooks.call.shutdown()
            if self._stop.is_set():
                logger.info("stopped", extra={"event": "stopped", "reason": "signal"})

    def _signalled(self, name: str) -> None:
        how = "stopping at once" if self._stop.is_set() else "stopping"
        (self._hurry if self._stop.is_set() else self._stop).set()
        logger.info("%s: signal %s", how, name, extra={"event": "stopping", "reason": "signal", "signal": name})

    async def _start_engine(self) -> AsyncEngineClient | None:
        """Return the client of a scheduler that is ready; None where the server was told to stop meanwhile."""
        if not self._resolved.engine.apis:
            logger.warning("apis is empty: this server will offer no API (try --set apis='[openai, native]')")
        engine = self._resolved.engine
        _say(f"Loading {engine.model.path} ...")
        starting = asyncio.ensure_future(self._supervisor.start())
        if not await ended_before(starting, self._stop):
            return None
        wire, ready = starting.result()
        info = ModelInfo(**ready.info)
        selection = Selection(self._resolved)
        model = prepare_model(self._resolved, selection)
        about = frontend_context(self._resolved, selection, model, self._scratch)
        self._features = frontend_features(self._hooks, about)
        budget = BudgetLimits(**engine.server.budget.model_dump())
        settings = engine.model_dump(mode="json")
        salts = self._keys.salts() if engine.server.cache_salt_by_key else {}
        names = ModelNames(self._hooks.freeze("model_names"))
        client = AsyncEngineClient(
            info, model.tokenizer, settings, limits=budget, salts=salts, names=names, features=self._features,
        )  # fmt: skip
        client.attach(wire, info)
        return client

    def _application(self, client: AsyncEngineClient, guards: Sequence[HttpGuard]) -> tuple[FastAPI, NamedRouters]:
        app, routers = build_api(self._resolved, client, self._hooks, self._keys, guards)
        if client.tokenizer.has_chat_template:
            rendering.warm_up()
        self._hooks.call.register_routes(app=app, client=client)
        gc.collect()
        gc.freeze()
        return app, routers

    async def _serve(self, client: AsyncEngineClient, http: HttpServer, serving: asyncio.Future[None]) -> None:
        watching = asyncio.ensure_future(self._supervisor.watch(client))
        try:
            await ended_before(asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED), self._stop)
            if not watching.done() and not serving.done():
                await self._drain(client)
        finally:
            http.leave()
            watching.cancel()
            outcome = await asyncio.gather(serving, watching, return_exceptions=True)
        for error in outcome:
            if isinstance(error, Exception):
                logger.error("stopping: %s", error, extra={"event": "stopping", "reason": "error"})
                raise error

    async def _drain(self, client: AsyncEngineClient) -> None:
        timeout = self._resolved.engine.server.shutdown_timeout
        _say(f"Stopping: running requests have {timeout:g} s to finish")
        draining = asyncio.ensure_future(client.drain(timeout))
        if not await ended_before(draining, self._hurry):
            await client.drain(0)
        # Requests whose prompts are still being prepared would be refused after that.
        await asyncio.to_thread(self._features.close)

    @property
    def _scheme(self) -> str:
        return "http" if self._front.tls is None else "https"

    def _announce(self, app: FastAPI, routers: NamedRouters) -> None:
        host, port = self._front.listener.getsockname()[:2]
        base = f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"
        _say(f"Ready on {base}")
        sample = sample_request(routers)
        if sample is not None:
            path, body = sample
            data = json.dumps(body).replace("'", "'\\''")
            key = " -H 'authorization: Bearer KEY'" if self._keys else ""
            _say(f"Try it:\n  curl {base}{path} -H 'content-type: application/json'{key} -d '{data}'")
        if any(getattr(route, "path", None) == "/" for route in app.routes):
            _say(f"Or open {base}/ in a browser")


def build_api(
    resolved: ResolvedConfig,
    client: EngineClient,
    hooks: Hooks,
    keys: Keys | None = None,
    guards: Sequence[HttpGuard] = (),
) -> tuple[FastAPI, NamedRouters]:
    """Return the application with the config's APIs, in order, behind `guards`; `keys` None: the config's."""
    keys = Keys.of(resolved.engine.server) if keys is None else keys
    server = resolved.engine.server
    selection = Selection(resolved)
    longest = client.max_body_bytes(server.max_body_bytes)
    declared = body_fields(resolved.registry, client.info.providers, resolved.candidates["api"])
    ctx = ApiContext(client=client, max_body_bytes=longest, body_fields=declared)
    ctx = with_services(ctx, selection, hooks)
    choices = selection.choose_all(API, ctx)
    routers = [(choice.name, choice.build(ctx)) for choice in choices]
    told = {choice.name: choice.record.told("routes()") for choice in choices}
    app = build_app(
        routers,
        told=told.get,
        max_body_bytes=longest,
        max_text_bytes=server.max_body_bytes,
        keys=keys,
        guards=guards,
        cors=server.cors,
        access_log=server.access_log,
    )
    return app, routers


class _Chooser:
    """What hooks choose providers with. `chosen` are the names of those, by contract."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self.chosen: dict[str, list[str]] = {}

    def choose(self, contract: Contract[T, Ctx], context: Ctx) -> T:
        choice = self._selection.choose(contract, context)
        self.chosen[contract.name] = [choice.name]
        return choice.build(context)


def with_services(ctx: ApiContext, selection: Selection, hooks: Hooks) -> ApiContext:
    """Return the context with what plugins have built for the APIs."""
    chooser = _Chooser(selection)
    services: dict[str, object] = {}
    for found in hooks.call.api_services(chooser=chooser, client=ctx.client):
        services.update(found)
    return replace(ctx, services=services, providers={**ctx.providers, **chooser.chosen})


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Return whether to log this. A request that is cut off at the end deserves no traceback: uvicorn counts them."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
