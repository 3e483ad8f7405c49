"""Fields of bodies that providers declare: each API reads them, on every route that generates, and documents them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.conformance.rig.fake_media import fake_processor
from pegboard.core.interfaces.api_router import ApiContext, ApiRouter
from pegboard.core.interfaces.plugin import BodyField
from pegboard.plugins.api_anthropic.options import AnthropicOptions
from pegboard.plugins.api_anthropic.requests import MessagesBody
from pegboard.plugins.api_anthropic.router import AnthropicRouter
from pegboard.plugins.api_native.options import NativeOptions
from pegboard.plugins.api_native.requests import GenerateBody
from pegboard.plugins.api_native.router import NativeRouter
from pegboard.plugins.api_openai.chat_body import ChatBody
from pegboard.plugins.api_openai.completions import CompletionBody
from pegboard.plugins.api_openai.options import OpenAIOptions
from pegboard.plugins.api_openai.responses.body import ResponseBody
from pegboard.plugins.api_openai.router import OpenAIRouter
from pegboard.toolkit.http.app import build_app

FIELDS = {
    "far": (
        BodyField("bootstrap_host", str),
        BodyField("bootstrap_room", int, meaning="Which one."),
        BodyField("patience", float, each=False),
    )
}
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = ("/v1/chat/completions", {"messages": MESSAGES})
COMPLETION = ("/v1/completions", {"prompt": "a"})
RESPONSE = ("/v1/responses", {"input": "a"})
MESSAGE = ("/v1/messages", {"model": "fake-model", "max_tokens": 9, "messages": MESSAGES})
GENERATE = ("/generate", {"text": "a"})
ROUTES = pytest.mark.parametrize(
    ("path", "body"),
    [CHAT, COMPLETION, RESPONSE, MESSAGE, GENERATE, ("/invocations", CHAT[1])],
    ids=lambda one: one if isinstance(one, str) else "",
)
TWO: dict[str, Any] = {"sampling_params": {"n": 2}}


def app_of(client: FakeEngineClient, fields: Any) -> Any:
    ctx = ApiContext(client=client, max_body_bytes=10**6, body_fields=fields)
    routers: list[tuple[str, ApiRouter]] = [
        ("openai", OpenAIRouter(OpenAIOptions.model_validate({}), ctx)),
        ("anthropic", AnthropicRouter(AnthropicOptions(), ctx)),
        ("native", NativeRouter(NativeOptions(health_timeout=1.0), ctx)),
    ]
    return build_app(routers, max_body_bytes=10**6)


def post(path: str, body: Any, fields: Any = FIELDS, **settings: Any) -> tuple[int | None, Any, list[dict[str, Any]]]:
    """Status and error of an answer, and the `params` of what the engine was asked."""
    client = FakeEngineClient(**settings)

    async def scene() -> tuple[int | None, Any, list[dict[str, Any]]]:
        done = await call(app_of(client, fields), "POST", path, body)
        error = done.json().get("error") if done.status != 200 else None
        return done.status, error, [request.params for request in client.requests]

    return asyncio.run(scene())


def param_of(error: dict[str, Any]) -> object:
    return error.get("param") or error.get("details", {}).get("param")


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_reaches_its_provider(path: str, body: dict[str, Any], stream: bool) -> None:
    said = {"bootstrap_host": "h", "bootstrap_room": 2**62, "patience": 2, "params": {"other": 1}}
    status, error, params = post(path, {**body, **said, "stream": stream})
    assert (status, error) == (200, None)
    assert params == [{"other": 1, "far": {"bootstrap_host": "h", "bootstrap_room": 2**62, "patience": 2.0}}]


@ROUTES
def test_nothing_is_there_of_what_is_not_said(path: str, body: dict[str, Any]) -> None:
    status, error, params = post(path, {**body, "bootstrap_room": None, "patience": None})
    assert (status, error, params) == (200, None, [{}])


@ROUTES
def test_what_is_wrong_is_named(path: str, body: dict[str, Any]) -> None:
    for name, wrong in (("bootstrap_room", "5"), ("bootstrap_room", [1, 2, 3]), ("patience", [1.0])):
        status, error, params = post(path, {**body, name: wrong})
        assert (status, param_of(error), params) == (400, name, [])


@ROUTES
def test_what_is_not_declared_is_refused_as_before(path: str, body: dict[str, Any]) -> None:
    status, error, params = post(path, {**body, "bootstrap_room": 5}, fields={})
    assert (status, param_of(error), params) == (400, "bootstrap_room", [])
    assert "not supported" in error["message"]
    status, _, params = post(path, {**body, "patience": 5}, fields={})
    assert (status, params) == (200, [{}]), "an unknown field is ignored"
    status, error, _ = post(path, {**body, "bootstrap_port": 5})
    assert (status, param_of(error)) == (400, "bootstrap_port"), "neither does one field allow another"


@pytest.mark.parametrize(
    ("path", "body", "rooms", "expected"),
    [
        (CHAT[0], {**CHAT[1], "n": 2}, 5, [5, 5]),
        (CHAT[0], {**CHAT[1], "n": 2, "stream": True}, [5, 6], [5, 6]),
        ("/v1/completions", {"prompt": ["a", "b"]}, [5, 6], [5, 6]),
        ("/v1/completions", {"prompt": [[65, 66], [67]], "n": 2}, [5, 6], [5, 5, 6, 6]),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, [5, 6, 7, 8], [5, 6, 7, 8]),
        ("/v1/completions", {"prompt": "a", "best_of": 3, "n": 1}, [5, 6, 7], [5, 6, 7]),
        ("/generate", {"text": "a", **TWO}, 5, [5, 5]),
        ("/generate", {"text": "a", **TWO, "stream": True}, 5, [5, 5]),
        ("/generate", {"text": ["a", "b"]}, [5, 6], [5, 6]),
        ("/generate", {"input_ids": [[65], [66]], "stream": True}, [5, 6], [5, 6]),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 1}]}, [5, 6], [5, 5, 6]),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 1}]}, [5, 6, 7], [5, 6, 7]),
    ],
)
def test_several_requests_of_a_body(path: str, body: dict[str, Any], rooms: object, expected: list[int]) -> None:
    status, error, params = post(path, {**body, "bootstrap_room": rooms})
    assert (status, error) == (200, None)
    assert params == [{"far": {"bootstrap_room": room, "index": i}} for i, room in enumerate(expected)]


def test_a_model_with_pictures_has_the_fields_too() -> None:
    for path, body in (CHAT, RESPONSE, GENERATE):
        status, _, params = post(path, {**body, "bootstrap_room": 5}, media=fake_processor())
        assert (status, params) == (200, [{"far": {"bootstrap_room": 5}}]), path


@pytest.mark.parametrize("router", [OpenAIRouter, AnthropicRouter, NativeRouter])
def test_an_api_knows_its_own_fields(router: type[ApiRouter]) -> None:
    own = router.own_fields()
    assert {"params", "priority", "stream"} <= own
    assert not own & {"bootstrap_room", "bootstrap_host", "bootstrap_port"}
    bodies = {OpenAIRouter: (ChatBody, CompletionBody, ResponseBody), AnthropicRouter: (MessagesBody,)}
    for body in bodies.get(router, ()):
        assert body.model_fields.keys() <= own
    if router is NativeRouter:
        assert {"text", "sampling_params", "image_data", "return_logprob"} <= own
        assert GenerateBody.model_fields.keys() - own == {*GenerateBody.not_taken()} - {"image_data", "video_data"}


def test_the_document_lists_declared_fields() -> None:
    app = app_of(FakeEngineClient(), FIELDS)
    plain = app_of(FakeEngineClient(), {})
    for path, _ in (CHAT, COMPLETION, RESPONSE, MESSAGE, GENERATE):
        schema, before = (
            one.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
            for one in (app, plain)
        )
        assert schema["bootstrap_room"]["description"].startswith("Which one. (For far;"), path
        assert "patience" in schema, path
        assert "patience" not in before, path
