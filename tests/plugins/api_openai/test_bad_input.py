"""Whatever is out of range, of the wrong type or in conflict is refused with 400 and the field's name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from fastapi.routing import APIRoute

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.interfaces.errors import InvalidRequest
from tests.plugins.api_anthropic.parsers import fake_parsers
from tests.plugins.api_openai import asking
from tests.plugins.api_openai.asking import CHAT, COMPLETIONS, make_app

RESPONSES, EMBEDDINGS, SCORE, RERANK = "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"
TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"

USER = {"role": "user", "content": "Hi"}
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "a"},
    RESPONSES: {"input": "a"},
    EMBEDDINGS: {"input": "a"},
    SCORE: {"text_1": "a", "text_2": "b"},
    RERANK: {"query": "a", "documents": ["b"]},
    TOKENIZE: {"prompt": "a"},
    DETOKENIZE: {"tokens": [1]},
    "/v1/classify": {"input": "a"},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def with_schema(**form: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def assistant(**more: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", **more}]}


def calls(**call: Any) -> dict[str, Any]:
    return assistant(tool_calls=[{"id": "c", "type": "function", **call}])


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10_000}, "n"),
    ({"n": 2, "session_params": {"id": "s"}}, "n"),
    ({"session_params": {"id": "s"}}, "session_params"),
    ({"session_params": {"id": 5}}, "session_params.id"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"lora_path": "x"}, "lora_path"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"custom_logit_processor": {"code": "x"}}, "custom_logit_processor"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": {}}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema"),
    (with_schema(name="x"), "response_format.json_schema.schema"),
    (with_schema(name="x", schema="no json"), "response_format.json_schema.schema"),
    (with_schema(name="x", schema=False), "response_format.json_schema.schema"),
    (with_schema(name=5, schema={}), "response_format.json_schema.name"),
    (with_schema(name="x", schema={}, strict="yes"), "response_format.json_schema.strict"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.structures"),
    ({"regex": ""}, "regex"),
    ({"ebnf": ""}, "ebnf"),
    ({"regex": "a", "ebnf": "b"}, "ebnf"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ({"regex": "a", **with_schema(name="x", schema={})}, "regex"),
]

CASES: list[tuple[str, dict[str, Any], str]] = [
    *((path, *case) for path in (CHAT, COMPLETIONS) for case in BOTH),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": [5]}, "messages.0"),
    (CHAT, {"messages": [{"content": "Hi"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "", "content": "Hi"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "Hi"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": "", "name": 5}]}, "messages.0.name"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    (CHAT, {"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0"),
    (CHAT, {"messages": [{"role": "tool", "content": "4"}]}, "messages.0.tool_call_id"),
    (CHAT, assistant(tool_calls="x"), "messages.1.tool_calls"),
    (CHAT, assistant(tool_calls=["x"]), "messages.1.tool_calls.0"),
    (CHAT, assistant(content="a", reasoning_content=5), "messages.1.reasoning_content"),
    (CHAT, calls(), "messages.1.tool_calls.0.function"),
    (CHAT, calls(type="custom"), "messages.1.tool_calls.0.type"),
    (CHAT, calls(function={"arguments": "{}"}), "messages.1.tool_calls.0.function.name"),
    (CHAT, calls(function={"name": "f", "arguments": [1]}), "messages.1.tool_calls.0.function.arguments"),
    (CHAT, calls(id=5, function={"name": "f"}), "messages.1.tool_calls.0.id"),
    (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"top_logprobs": 1}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"documents": [{"text": "a"}]}, "documents"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"audio": {"voice": "x"}}, "audio"),
    (CHAT, {"web_search_options": {"a": 1}}, "web_search_options"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"function_call": "auto"}, "function_call"),
    (CHAT, {"reasoning_effort": "immense"}, "reasoning_effort"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function"),
    (CHAT, {"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
        "tools.0.function.parameters",
    ),
    (CHAT, {"tools": [TOOL, TOOL]}, "tools.1.function.name"),
    (CHAT, {"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "tool_choice.function.name",
    ),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "tool_choice"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [""]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}, "n"),
    (COMPLETIONS, {"prompt": ["a", "b"], "session_params": {"id": "s"}}, "prompt"),
    (COMPLETIONS, {"echo": True, "logprobs": 0, "session_params": {"id": "s"}}, "echo"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
    (COMPLETIONS, {"best_of": 129}, "best_of"),
    (COMPLETIONS, {"best_of": 3, "stream": True}, "best_of"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (RESPONSES, {"input": ""}, "input"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": [{"role": "tool", "content": "a"}]}, "input.0.role"),
    (RESPONSES, {"input": [USER, {"role": "user"}]}, "input.1.content"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input.0.type"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input.0.call_id"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input.0.arguments"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input.0.call_id"),
    (RESPONSES, {"input": [{"type": "reasoning", "content": 5}]}, "input.0.content"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"top_logprobs": 21}, "top_logprobs"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0.type"),
    (RESPONSES, {"tools": [{"type": "file_search", "vector_store_ids": ["x"]}]}, "tools.0.type"),
    (RESPONSES, {"tools": [TOOL]}, "tools.0.name"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    (RESPONSES, {"text": {"format": 5}}, "text.format"),
    (RESPONSES, {"reasoning": {"effort": "immense"}}, "reasoning.effort"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"conversation": "c"}, "conversation"),
    (RESPONSES, {"prompt": {"id": "p"}}, "prompt"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"include": ["file_search_call.results"]}, "include"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    (EMBEDDINGS, {"input": ""}, "input"),
    (EMBEDDINGS, {"input": []}, "input"),
    (EMBEDDINGS, {"input": ["a", ""]}, "input"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "input"),
    (EMBEDDINGS, {"encoding_format": "int8"}, "encoding_format"),
    (EMBEDDINGS, {"dimensions": 0}, "dimensions"),
    (SCORE, {"text_1": None}, "text_1"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
    (SCORE, {"text_2": []}, "text_2"),
    (SCORE, {"text_2": ["a", ""]}, "text_2"),
    (SCORE, {"query": "a"}, "documents"),
    (SCORE, {"query": "a", "items": ["b"]}, "label_token_ids"),
    (SCORE, {"query": "a", "label_token_ids": [1]}, "items"),
    (SCORE, {"query": "a", "items": [[1]], "label_token_ids": [1]}, "query"),
    (SCORE, {"query": "a", "items": ["b", ""], "label_token_ids": [1]}, "items"),
    (RERANK, {"query": ""}, "query"),
    (RERANK, {"documents": []}, "documents"),
    (RERANK, {"documents": ["a", {"image": "b"}]}, "documents.1"),
    (RERANK, {"documents": ["a"] * 1025}, "documents"),
    (RERANK, {"top_n": 0}, "top_n"),
    (TOKENIZE, {"prompt": None}, "prompt"),
    (TOKENIZE, {"messages": [USER]}, "prompt"),
    (TOKENIZE, {"prompt": []}, "prompt"),
    (TOKENIZE, {"prompt": None, "messages": []}, "messages"),
    (TOKENIZE, {"prompt": None, "messages": [{"role": "user"}]}, "messages.0.content"),
    (TOKENIZE, {"prompt": None, "messages": [USER], "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
    (DETOKENIZE, {"tokens": [-1]}, "tokens"),
    (DETOKENIZE, {"tokens": [[1], [2**70]]}, "tokens"),
]


@pytest.fixture(scope="module")
def app() -> Any:
    """One for all, because nothing of it is used up."""
    return make_app(FakeEngineClient(refuse=InvalidRequest("this should not have come so far")), **fake_parsers())


@pytest.mark.parametrize(("path", "body", "field"), CASES)
def test_it_is_refused_by_name(app: Any, path: str, body: dict[str, Any], field: str) -> None:
    done = asyncio.run(call(app, "POST", path, {**NEEDED[path], **body}))
    assert done.status == 400, done.body
    error = done.json()["error"]
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert field.rpartition(".")[2].removesuffix("_params") in error["message"], error


def test_tools_need_a_parser() -> None:
    for path, tool in ((CHAT, TOOL), (RESPONSES, FLAT)):
        error = asking.refused(path, {**NEEDED[path], "tools": [tool]})
        assert (error["param"], error["code"]) == ("tools", "unsupported")


@pytest.mark.parametrize(
    ("path", "body", "param", "called"),
    [
        (CHAT, {}, "max_new_tokens", "max_tokens"),
        (CHAT, {"max_completion_tokens": 5}, "max_new_tokens", "max_completion_tokens"),
        (CHAT, {}, "min_new_tokens", "min_tokens"),
        (CHAT, {}, "prompt", "messages"),
        (CHAT, {}, "logprobs", "top_logprobs"),
        (COMPLETIONS, {}, "max_new_tokens", "max_tokens"),
        (COMPLETIONS, {}, "prompt", "prompt"),
        (RESPONSES, {}, "max_new_tokens", "max_output_tokens"),
        (RESPONSES, {}, "prompt", "input"),
        (EMBEDDINGS, {}, "prompt", "input"),
        (SCORE, {}, "prompt", "text_2"),
        (RERANK, {}, "prompt", "documents"),
    ],
)
def test_refusals_of_the_engine_name_the_field_of_the_body(
    path: str, body: dict[str, Any], param: str, called: str
) -> None:
    async def scene() -> dict[str, Any]:
        client = FakeEngineClient(refuse=InvalidRequest(f"{param} is not to my taste", param=param))
        done = await call(make_app(client), "POST", path, {**NEEDED[path], **body})
        assert done.status == 400
        found: dict[str, Any] = done.json()["error"]
        return found

    error = asyncio.run(scene())
    assert error["param"] == called
    assert error["message"].startswith(called if "_" in param else param)


# ---- wrong types, of every field of every body ---------------------------------------------------------------------

STRANGE: list[Any] = [5, 1.5, True, "a string", ["a", 5], [[["a"]]], {"an": "object"}]


def _fields() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, name and schema of every field of every body."""

    async def routes() -> list[Any]:
        return list(make_app(FakeEngineClient()).routes)

    for route in asyncio.run(routes()):
        if isinstance(route, APIRoute) and route.path in NEEDED:
            content = (route.openapi_extra or {})["requestBody"]["content"]["application/json"]
            for name, schema in content["schema"]["properties"].items():
                yield route.path, name, schema


def test_every_body_is_looked_at() -> None:
    assert {path for path, _, _ in _fields()} == NEEDED.keys()


def test_wrong_types_are_refused_by_name() -> None:
    fields = list(_fields())

    async def scene() -> int:
        client = FakeEngineClient()
        app = make_app(client, **fake_parsers())
        tried = 0
        for path, name, schema in fields:
            for value in STRANGE:
                if jsonschema.Draft202012Validator(schema).is_valid(value):
                    continue
                done = await call(app, "POST", path, {**NEEDED[path], name: value})
                assert done.status == 400, (path, name, value, done.body)
                error = done.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert str(error["param"]).partition(".")[0] == name, (path, name, value, error)
                tried += 1
        assert client.requests == []
        assert client.embedded == []
        return tried

    assert asyncio.run(scene()) > 500
