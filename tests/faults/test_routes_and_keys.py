"""Missing keys on admin routes (sglang 26789), keys that an information route tells (sglang 30166), and servers that
listen to everybody (CVE-2025-30202).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from pegboard.conformance.asgi import Exchange
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.cli.main import app as command_line
from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.config.sections import EngineConfig, ServerSection
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.core.server.client import AsyncEngineClient
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.listening import exposure, listen
from pegboard.toolkit.http.route_table import levels
from pegboard.toolkit.system.logs import configure_logging
from tests.faults.whole_api import ADMIN_KEY, API_KEY, ask, bearer, questions, whole_app

LEVELS = {
    "public": {
        # A constant of the config, which Ollama's clients ask for before anything else.
        "GET /api/version",
        "GET /docs",
        "GET /health",
        "GET /ping",
        "GET /ready",
    },
    "user": {
        "DELETE /v1/responses/{response_id:response_id}",
        "GET /api/ps",
        "GET /api/tags",
        "GET /get_load",
        "GET /get_model_info",
        "GET /get_server_info",
        "GET /get_weight_version",
        "GET /health_generate",
        "GET /load",
        "GET /metrics",
        "GET /model_info",
        "GET /openapi.json",
        "GET /server_info",
        "GET /tokenizer_info",
        "GET /v1/loads",
        "GET /v1/models",
        "GET /v1/models/{model:path}",
        "GET /v1/responses/{response_id:response_id}",
        "GET /v1/responses/{response_id:response_id}/input_items",
        "GET /version",
        "POST /api/chat",
        "POST /api/embed",
        "POST /api/embeddings",
        "POST /api/generate",
        "POST /api/show",
        "POST /classify",
        "POST /close_session",
        "POST /detokenize",
        "POST /encode",
        "POST /generate",
        "POST /invocations",
        "POST /open_session",
        "POST /parse_function_call",
        "POST /pooling",
        "POST /rerank",
        "POST /score",
        "POST /separate_reasoning",
        "POST /tokenize",
        "POST /v1/chat/completions",
        "POST /v1/chat/completions/render",
        "POST /v1/classify",
        "POST /v1/completions",
        "POST /v1/detokenize",
        "POST /v1/embeddings",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "POST /v1/pooling",
        "POST /v1/rerank",
        "POST /v1/responses",
        "POST /v1/responses/compact",
        "POST /v1/responses/input_tokens",
        "POST /v1/responses/{response_id:response_id}/cancel",
        "POST /v1/score",
        "POST /v1/tokenize",
    },
    "admin": {
        "POST /abort_request",
        "POST /configure_logging",
        "POST /continue_generation",
        "POST /flush_cache",
        "POST /freeze_gc",
        "POST /pause_generation",
        "POST /reset_prefix_cache",
        "POST /start_profile",
        "POST /stop_profile",
    },
}
"""Every route of every built-in API. A new one belongs here once somebody has thought about who may use it: what shows
or changes the server, or other people's requests, is for admins.
"""
STRICTNESS = ("public", "user", "admin")
ORDER = [f"{level} {route}" for level in STRICTNESS for route in sorted(LEVELS[level])]


def found_levels(**server: Any) -> dict[str, str]:
    async def scene() -> dict[str, str]:
        return {f"{method} {path}": level for (method, path), level in levels(whole_app(**server).routes).items()}

    return asyncio.run(scene())


def test_26789_every_route_is_in_the_table() -> None:
    found = found_levels()
    assert sorted(f"{level} {route}" for route, level in found.items()) == sorted(ORDER)


def answers(headers: dict[str, str], **server: Any) -> dict[str, Exchange]:
    """What each route answers to its own example, or to nothing, by `LEVEL METHOD PATH`."""

    async def scene() -> dict[str, Exchange]:
        app = whole_app(**server)
        found = {(method, path): level for (method, path), level in levels(app.routes).items()}
        out = {}
        for (method, path), (_, concrete, body) in zip(found, questions(app), strict=True):
            out[f"{found[method, path]} {method} {path}"] = await ask(app, method, concrete, body, **headers)
        return out

    return asyncio.run(scene())


BOTH = {"api_key": API_KEY, "admin_key": ADMIN_KEY}


@pytest.mark.parametrize(
    ("server", "headers", "opens", "otherwise"),
    [
        (BOTH, {}, "public", 401),
        (BOTH, bearer("wrong"), "public", 401),
        (BOTH, {"x_api_key": "wrong"}, "public", 401),
        (BOTH, {"authorization": API_KEY}, "public", 401),
        (BOTH, bearer(API_KEY), "user", 403),
        (BOTH, {"x_api_key": API_KEY}, "user", 403),
        (BOTH, bearer(ADMIN_KEY), "admin", None),
        (BOTH, {"x_api_key": ADMIN_KEY}, "admin", None),
        ({"api_key": API_KEY}, {}, "public", 401),
        ({"api_key": API_KEY}, bearer(API_KEY), "user", 403),
        ({"admin_key": ADMIN_KEY}, {}, "public", 401),
        ({"admin_key": ADMIN_KEY}, bearer(ADMIN_KEY), "admin", None),
        ({}, {}, "admin", None),
    ],
)
def test_26789_a_key_opens_its_routes_and_no_other(
    server: dict[str, Any], headers: dict[str, str], opens: str, otherwise: int | None
) -> None:
    open_levels = STRICTNESS[: STRICTNESS.index(opens) + 1]
    for route, done in answers(headers, **server).items():
        if route.split()[0] in open_levels:
            assert done.status not in (401, 403), (route, done.body)
        else:
            assert done.status == otherwise, (route, done.status, done.body)
            assert ("www-authenticate" in done.headers) == (otherwise == 401)
            assert done.json()


@pytest.fixture(scope="module")
def keyed() -> Iterator[tuple[asyncio.Runner, FastAPI]]:
    """One application with both keys, and the loop that it was made in, for requests that reach no route of it."""

    async def make() -> FastAPI:
        return whole_app(**BOTH)  # type: ignore[arg-type]

    with asyncio.Runner() as runner:
        yield runner, runner.run(make())


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS", "HEAD", "BREW"])
@pytest.mark.parametrize(
    "path", ["/", "/nowhere", "/admin", "//flush_cache", "/flush_cache/", "/v1", "/static/../flush_cache"]
)
def test_26789_unknown_paths_are_told_to_keys_only(
    keyed: tuple[asyncio.Runner, FastAPI], method: str, path: str
) -> None:
    runner, app = keyed

    async def scene() -> list[int | None]:
        return [
            (await ask(app, method, path, **headers)).status  # type: ignore[arg-type]
            for headers in ({}, bearer(API_KEY), bearer(ADMIN_KEY))
        ]

    assert runner.run(scene()) == [401, 404, 404]


def test_26789_nothing_reaches_the_engine_without_a_key() -> None:
    async def scene() -> FakeEngineClient:
        client = FakeEngineClient()
        app = whole_app(client, **BOTH)
        for method, path, body in questions(app):
            await ask(app, method, path, body)
        return client

    client = asyncio.run(scene())
    assert (client.requests, client.embedded, client.controls) == ([], [], [])
    assert (client.flushes, client.abort_calls) == (0, [])


class Hook:
    """A plugin that adds routes to the application, and says nothing of keys."""

    @hookimpl
    def register_routes(self, app: Any) -> None:
        app.get("/from-a-hook")(self.answer)

    async def answer(self) -> str:
        return "it"


def test_26789_routes_of_hooks_are_for_admins_unless_they_say_otherwise() -> None:
    async def scene() -> list[int | None]:
        app = whole_app(**BOTH)  # type: ignore[arg-type]
        Hook().register_routes(app)
        keys = ({}, bearer(API_KEY), bearer(ADMIN_KEY))  # type: ignore[var-annotated]
        return [(await ask(app, "GET", "/from-a-hook", **headers)).status for headers in keys]

    assert asyncio.run(scene()) == [401, 403, 200]


# ---- keys that are told ---------------------------------------------------------------------------------------------


SECRETS = ("first-secret", "second-secret", "third-secret")
WITH_SECRETS = {"model": {"path": "x/y"}, "server": {"api_key": list(SECRETS[:2]), "admin_key": SECRETS[2]}}


def without_secrets(text: str) -> None:
    assert text
    assert not [secret for secret in SECRETS if secret in text]


@pytest.fixture
def resolved() -> ResolvedConfig:
    return compose(data=WITH_SECRETS, env={})


def test_30166_server_info_tells_no_key(resolved: ResolvedConfig) -> None:
    async def scene() -> str:
        client = AsyncEngineClient(
            FakeEngineClient().info, FakeEngineClient().tokenizer, resolved.engine.model_dump(mode="json")
        )
        return str(client._settings)

    text = asyncio.run(scene())
    without_secrets(text)
    assert "api_key" in text, "it is redacted, and not left out"


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_30166_config_show_tells_no_key(more: list[str]) -> None:
    overrides = ["--set", "model.path=x/y", "--set", f"server.api_key=[{SECRETS[0]},{SECRETS[1]}]"]
    done = CliRunner().invoke(
        command_line, ["config", "show", *overrides, *more], env={"PEGBOARD__SERVER__ADMIN_KEY": SECRETS[2]}
    )
    assert done.exit_code == 0
    without_secrets(done.output)
    assert done.output.count("***") == 3


@pytest.mark.parametrize(
    "wrong", [{"api_key": [SECRETS[0], 5]}, {"api_key": f"{SECRETS[0]} {SECRETS[1]}"}, {"admin_key": {SECRETS[0]: 1}}]
)
def test_30166_errors_tell_no_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(data={"model": {"path": "x/y"}, "server": wrong}, env={})
    without_secrets(str(caught.value))


def test_30166_objects_tell_no_key(resolved: ResolvedConfig) -> None:
    """What a log line or a traceback might show."""
    without_secrets(repr(resolved.engine.server))
    without_secrets(str(resolved.engine))


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_30166_logs_tell_no_key(log_format: Any, resolved: ResolvedConfig, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        configure_logging("api", "info", log_format)
        fields = {"config": resolved.engine.model_dump(mode="json"), "api_key": SECRETS[0]}
        logging.getLogger("x").warning("it starts with %s", resolved.engine.server, extra=fields)
    finally:
        root.handlers = handlers
    without_secrets(capsys.readouterr().err)


def test_30166_no_field_of_the_config_that_is_secret_is_called_otherwise() -> None:
    """Redaction goes by names, so whoever adds a secret must name it so. These are all that there are; what is not a
    text is shown, as `cache_salt_by_key` is.
    """
    from pegboard.toolkit.system.redact import HIDDEN, is_secret, redact
    from pegboard.tools.config.describe import core_keys_of

    secret = {key.path for key in core_keys_of() if is_secret(key.path)}
    assert secret == {"server.api_key", "server.admin_key", "server.cache_salt_by_key"}
    assert redact({"cache_salt_by_key": True, "api_key": "x"}) == {"cache_salt_by_key": True, "api_key": HIDDEN}


# ---- who can connect ------------------------------------------------------------------------------------------------


def test_cve_2025_30202_it_listens_on_loopback_unless_told_otherwise() -> None:
    assert EngineConfig.model_fields["server"].default.host == "127.0.0.1"
    assert compose(data={"model": {"path": "x/y"}}, env={}).engine.server.host == "127.0.0.1"
    with listen(ServerSection(port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.fixture(params=["127.0.0.1", "127.0.0.2", "localhost", "::1", "::ffff:127.0.0.1"])
def private(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    try:
        listener = listen(ServerSection(host=request.param, port=0))
    except Exception as error:
        pytest.skip(f"this machine has no {request.param}: {error}")
    with listener:
        yield listener


def test_cve_2025_30202_private_addresses_need_no_key(private: socket.socket) -> None:
    assert exposure(ServerSection(), private, keyed=bool(Keys())) is None


@pytest.mark.parametrize("keyed", [False, True])
def test_cve_2025_30202_public_addresses_without_a_key_are_pointed_out(keyed: bool) -> None:
    server = ServerSection(host="0.0.0.0", port=0, api_key="k" if keyed else ())  # type: ignore[arg-type]
    with listen(server) as listener:
        warning = exposure(server, listener, keyed=bool(Keys.of(server)))
    if keyed:
        assert warning is None
    else:
        assert warning is not None
        assert "0.0.0.0" in warning
        assert "server.api_key" in warning
