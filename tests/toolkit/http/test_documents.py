"""The OpenAPI document and the page that shows it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from typing import Any

import fastapi
import pytest
from pydantic import BaseModel

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core import __version__
from pegboard.core.interfaces.api_router import ApiContext, ApiRouter
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.levels import ADMIN, PUBLIC, USER
from pegboard.toolkit.http.openapi import error_responses, json_answer
from pegboard.toolkit.http.routing import api_router


class Oops(BaseModel):
    oops: str


class Thing(BaseModel):
    name: str
    parts: list[Oops] = []


class Documented(ApiRouter):
    def routes(self) -> fastapi.APIRouter:
        router = api_router(tags=["things"])
        own = error_responses(404, 409, model=Oops)
        answers = {**json_answer(Thing), **own}
        router.get("/things/{name}", summary="A thing", dependencies=[USER], responses=answers)(self.thing)
        router.post("/flush", summary="Flush", dependencies=[ADMIN], responses=json_answer({"type": "object"}))(
            self.thing
        )
        router.get("/alive", summary="Alive", dependencies=[PUBLIC])(self.thing)
        return router

    async def thing(self) -> fastapi.Response:
        return fastapi.Response()


async def application() -> fastapi.FastAPI:
    return build_app([("x", Documented(None, ApiContext(FakeEngineClient(), 100)))], max_body_bytes=100)


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    async def scene() -> dict[str, Any]:
        return dict((await call(await application(), "GET", "/openapi.json")).json())

    return asyncio.run(scene())


def test_it_is_about_this_server(spec: dict[str, Any]) -> None:
    assert spec["openapi"].startswith("3.1")
    assert (spec["info"]["title"], spec["info"]["version"]) == ("Pegboard", __version__)
    assert list(spec["paths"]) == ["/things/{name}", "/flush", "/alive"], "it is about APIs, and not about itself"
    assert spec["paths"]["/alive"]["get"]["tags"] == ["things"]


@pytest.mark.parametrize(
    ("path", "method", "level"),
    [("/things/{name}", "get", "user"), ("/flush", "post", "admin"), ("/alive", "get", "public")],
)
def test_it_says_which_key_is_needed(spec: dict[str, Any], path: str, method: str, level: str) -> None:
    operation = spec["paths"][path][method]
    assert operation["x-pegboard-level"] == level
    schemes = [name for one in operation["security"] for name in one]
    assert schemes == ([] if level == "public" else ["bearer", "x-api-key"])
    assert set(schemes) <= set(spec["components"]["securitySchemes"])
    assert ({"401", "403"} <= operation["responses"].keys()) == (level != "public")


def test_every_route_has_the_errors_of_the_server(spec: dict[str, Any]) -> None:
    for operations in spec["paths"].values():
        for operation in operations.values():
            assert {"200", "400", "413", "500", "503"} <= operation["responses"].keys()
            assert "422" not in operation["responses"], "nothing answers with that"
    assert not [name for name in spec["components"]["schemas"] if "Validation" in name]


def test_errors_have_the_format_of_their_api(spec: dict[str, Any]) -> None:
    def schema(path: str, method: str, status: str) -> Any:
        answer = spec["paths"][path][method]["responses"][status]
        found = answer["content"]["application/json"]["schema"]
        return found["title"] if "title" in found else found["$ref"].rpartition("/")[2]

    assert {schema("/things/{name}", "get", status) for status in ("400", "401", "404", "409", "503")} == {"Oops"}
    assert {schema("/flush", "post", status) for status in ("400", "401", "403", "500")} == {"ErrorAnswer"}
    assert schema("/alive", "get", "503") == "ErrorAnswer"
    assert spec["components"]["schemas"]["ErrorAnswer"]["required"] == ["error"]


def test_every_reference_leads_somewhere(spec: dict[str, Any]) -> None:
    for name in re.findall(r"'\$ref': '#/components/schemas/([^']*)'", str(spec)):
        assert name in spec["components"]["schemas"]


def test_answers_are_described(spec: dict[str, Any]) -> None:
    content = spec["paths"]["/things/{name}"]["get"]["responses"]["200"]["content"]["application/json"]
    assert content["schema"]["properties"]["parts"]["items"]["properties"] == {
        "oops": {"title": "Oops", "type": "string"}
    }


def test_the_page_fetches_nothing_from_elsewhere() -> None:
    async def scene() -> Any:
        return await call(await application(), "GET", "/docs")

    done = asyncio.run(scene())
    html = done.body.decode()
    assert done.headers["content-type"].startswith("text/html")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!openapi\.json)""", html)
    assert "//" not in re.sub(r"location\.origin", "", html).replace("<!doctype", "")
    assert "innerHTML" not in html
    policy = dict(part.strip().split(" ", 1) for part in done.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    for tag in ("script", "style"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'", "the browser would not take it"
    assert not re.findall(r"\son\w+=", html), "the policy forbids handlers in attributes"
