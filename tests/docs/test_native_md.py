"""The page on the native API: its routes and their keys, its fields and their defaults are all there are."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pegboard.core.config.compose import compose
from pegboard.plugins.api_native.administration import AbortBody, LoggingBody, PauseBody
from pegboard.plugins.api_native.bodies import PromptBody
from pegboard.plugins.api_native.conversations import CloseSessionBody, OpenSessionBody
from pegboard.plugins.api_native.embedding import EncodeBody, EncodedMeta
from pegboard.plugins.api_native.information import ModelAnswer, ServerAnswer
from pegboard.plugins.api_native.load import Load, Loads, ServerLoad
from pegboard.plugins.api_native.media import MediaGenerateBody
from pegboard.plugins.api_native.parsing import FunctionCallBody, FunctionCalls, ReasoningBody, Separated
from pegboard.plugins.api_native.profiling import ProfileBody
from pegboard.plugins.api_native.requests import GenerateBody, SamplingBody
from pegboard.plugins.api_native.responses import MetaInfo
from pegboard.toolkit.http.levels import level_of
from tests.docs.test_docs import blocks
from tests.docs.test_face import cells, code
from tests.plugins.api_native.asking import Server, played

PAGE = (Path(__file__).parents[2] / "docs" / "native.md").read_text("utf-8")
TAKEN: dict[str, tuple[type[BaseModel], ...]] = {
    "## Generate": (MediaGenerateBody, GenerateBody),
    "### Sampling parameters": (SamplingBody,),
    "## Vectors": (EncodeBody,),
    "## Sessions": (OpenSessionBody, CloseSessionBody),
    "## Output parsers": (FunctionCallBody, ReasoningBody),
    "## Abort": (AbortBody,),
    "## Pause": (PauseBody,),
    "## Logging": (LoggingBody,),
    "## Profiles": (ProfileBody,),
}
"""Sections, with the bodies that they describe."""


def section(heading: str) -> str:
    """Return a section of the page, without what is below headings of its own."""
    return re.split(r"\n#+ ", PAGE.partition(f"\n{heading}\n")[2])[0]


def shown(info: FieldInfo) -> str:
    """Return a default as the page has it: in JSON, nothing for none."""
    default = info.get_default(call_default_factory=True)
    return "" if info.is_required() or default is None else f"`{json.dumps(default)}`"


def test_the_routes_are_all_there_are_with_their_keys() -> None:
    async def found() -> dict[str, str]:
        routes = (one for one in Server.of().app.routes if isinstance(one, APIRoute) and "native" in one.tags)
        return {f"{method} {one.path}": level_of(one) or "" for one in routes for method in one.methods or ()}

    there = asyncio.run(found())
    told = {route: row[1] for row in cells(PAGE.partition("\n## ")[0]) for route in code(row[0])}
    assert {route: levels.partition(",")[0] for route, levels in told.items()} == there
    assert [route for route, levels in told.items() if levels == "user, admin"] == [
        "GET /server_info",
        "GET /get_server_info",
    ]


@pytest.mark.parametrize("heading", TAKEN)
def test_fields_are_all_there_are_with_their_defaults(heading: str) -> None:
    text, models = section(heading), TAKEN[heading]
    known = {name: info for model in reversed(models) for name, info in model.model_fields.items()}
    tables = "".join(re.findall(r"^\| field \| default \|.*?(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL))
    wrong = []
    for row in cells(tables):
        for name in code(row[0].partition(" (")[0]):
            if name not in known or row[1] != shown(known[name]):
                wrong.append(f"{name}: {row[1]}")
    assert wrong == []
    said = set(code(text)) | (set(PromptBody.model_fields) if heading == "## Vectors" else set())
    assert set(known) - said == set(), "fields that the page does not name"


@pytest.mark.parametrize(
    "model", [MetaInfo, EncodedMeta, ModelAnswer, ServerAnswer, ServerLoad, Load, Loads, FunctionCalls, Separated]
)
def test_fields_of_answers_are_on_the_page(model: type[BaseModel]) -> None:
    beyond = {"config", "scheduler", "providers", "sessions"} if model is ServerAnswer else set()
    assert set(model.model_fields) - set(code(PAGE)) == beyond, "docs/operation.md has the figures of admins"


def test_fields_that_it_calls_refused_are_refused() -> None:
    table = PAGE.partition("| field | refused |")[2].partition("\n\n")[0]
    named = {name for row in cells("| field | refused |" + table) for name in code(row[0])}
    assert named == {*GenerateBody.not_taken(), *GenerateBody.refused}
    values = {"int | None": 1, "str | None": "x", "bool": True, "list[str] | None": ["x"]}

    async def scene(server: Server) -> None:
        for heading, model, path in (
            ("## Logging", LoggingBody, "/configure_logging"),
            ("## Profiles", ProfileBody, "/start_profile"),
        ):
            refused = code(section(heading).partition("SGLang's")[2].partition("are refused")[0])
            assert len(refused) > 3
            for name in refused:
                body = {name: values[model.__annotations__[name]]}
                assert await server.refused(path, body) == (400, name)

    played(scene)


def test_a_pause_without_a_body_aborts_as_it_says() -> None:
    async def scene(server: Server) -> None:
        await server.post("/pause_generation")
        assert server.client.controls[-1] == ("pause_generation", {"mode": "abort"})

    played(scene)
    assert "**`/pause_generation` without a body aborts all requests**" in PAGE


def test_the_example_and_the_config_work() -> None:
    body = json.loads(re.findall(r"-d '(.*)'", blocks(PAGE, "console")[0])[0])

    async def scene(server: Server) -> None:
        assert set(await server.told("/generate", body)) == {"text", "output_ids", "meta_info"}

    played(scene)
    config = yaml.safe_load(blocks(PAGE, "yaml")[0])
    resolved = compose(data={"model": {"path": "demo:smollm2-135m-instruct"}, **config}, env={})
    assert [one.use for one in resolved.engine.apis] == ["openai", "native"]
