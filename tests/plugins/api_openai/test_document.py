"""What the OpenAPI document says of answers is so."""

from __future__ import annotations

import asyncio
from typing import Any

import jsonschema
import pytest

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import FakeEngineClient
from tests.plugins.api_anthropic.parsers import fake_parsers
from tests.plugins.api_openai.asking import CHAT, COMPLETIONS, MESSAGES, make_app

TOOL = {"type": "function", "function": {"name": "add"}}
EVERYTHING = {"n": 2, "prompt_logprobs": 2, "return_hidden_states": True}
CALLS = ("((add it up))Well", ' [[add|{"a": 1}]]')


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "logprobs": True, "top_logprobs": 2, **EVERYTHING}),
        (COMPLETIONS, {"prompt": "abc"}),
        (COMPLETIONS, {"prompt": ["abc", "d"], "echo": True, "logprobs": 2, **EVERYTHING}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", "name": "add"}], "top_logprobs": 1}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [1, 2]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v1/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/v1/tokenize", {"prompt": ["a", "b"]}),
        ("/v1/detokenize", {"tokens": [1, 2]}),
        ("/v1/models", None),
        ("/v1/models/{model}", None),
        ("/v1/classify", {"input": "a"}),
    ],
)
def test_answers_are_as_documented(path: str, body: Any) -> None:
    async def scene() -> tuple[Any, Any]:
        app = make_app(FakeEngineClient(script=CALLS), **fake_parsers())
        method = "GET" if body is None else "POST"
        done = await call(app, method, path.replace("{model}", "fake-model"), body)
        document = app.openapi()
        answer = document["paths"][path][method.lower()]["responses"][str(done.status)]
        schema = answer["content"]["application/json"]["schema"]
        return {**schema, "components": document["components"]}, done.json()

    schema, answer = asyncio.run(scene())
    jsonschema.Draft202012Validator(schema).validate(answer)
    _all_is_said(answer, schema, schema)


def _all_is_said(value: Any, schema: Any, root: Any) -> None:
    """Raise AssertionError for a field that the document does not mention."""
    while "$ref" in schema:
        schema = root["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for one in schema.get("anyOf", []):
        if jsonschema.Draft202012Validator({**one, "components": root["components"]}).is_valid(value):
            return _all_is_said(value, one, root)
    if isinstance(value, dict) and "properties" in schema:
        for name, inner in value.items():
            assert name in schema["properties"], f"{name} of {schema.get('title')} is not documented"
            _all_is_said(inner, schema["properties"][name], root)
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for inner in value:
            _all_is_said(inner, schema["items"], root)
    return None


def test_streams_are_documented() -> None:
    document = asyncio.run(_document())
    for path in (CHAT, COMPLETIONS, "/v1/responses"):
        assert "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]


def test_every_route_has_a_body_an_answer_and_errors() -> None:
    document = asyncio.run(_document())
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            if path != "/v1/classify":
                assert responses["200"]["content"]["application/json"]["schema"], path
            if method == "post" and not path.endswith("/cancel"):
                content = operation["requestBody"]["content"]["application/json"]
                assert content["schema"]["properties"], path
                assert path == "/v1/classify" or "example" in content, path
            for status in ("400", "401", "413", "503"):
                schema = responses[status]["content"]["application/json"]["schema"]
                assert schema["$ref"].endswith("/ErrorAnswer"), path


async def _document() -> Any:
    return make_app(FakeEngineClient()).openapi()
