"""What clients ask about models: which there are, what they can do, and what is loaded."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from pegboard.plugins.api_ollama.answers import ERRORS, stamp
from pegboard.plugins.api_ollama.bodies import ModelBody
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.generation import check_model
from pegboard.toolkit.http.levels import PUBLIC
from pegboard.toolkit.http.openapi import body_docs, json_answer
from pegboard.toolkit.media.service import reader_of
from pegboard.toolkit.parsing.output_parser import reasoning_parser_of, tool_parser_of

if TYPE_CHECKING:
    from pegboard.core.interfaces.api_router import ApiContext
    from pegboard.core.interfaces.client import ModelInfo

LATEST = ":latest"
_NEVER = "9999-12-31T23:59:59Z"


class ModelCards(BaseModel):
    """The answer of `/api/tags` and `/api/ps`: each model with `name`, `model`, `digest`, `size`, `modified_at` or
    `expires_at`, and `details`.
    """

    models: list[dict[str, object]]


class ModelDescription(BaseModel):
    """The answer of `/api/show`."""

    modelfile: str
    parameters: str
    template: str
    details: dict[str, object]
    model_info: dict[str, object]
    capabilities: list[str]
    modified_at: str


class Version(BaseModel):
    """The answer of `/api/version`."""

    version: str


def checked_name(info: ModelInfo, name: str) -> str:
    """Return the served name by which a client calls the model, or an adapter. Raises InvalidRequest (404) for any
    other.
    """
    plain = name.removesuffix(LATEST)
    if name not in info.names and plain in info.names:
        name = plain
    check_model(info, name)
    return info.named(name)


class Models:
    """The routes."""

    def __init__(self, ctx: ApiContext, version: str) -> None:
        self._ctx, self._client, self._version = ctx, ctx.client, version

    def add_to(self, router: APIRouter) -> None:
        cards = {**json_answer(ModelCards), **ERRORS}
        router.get("/api/tags", summary="The models that are served", responses=cards)(self.tags)
        router.get("/api/ps", summary="The models that are loaded", responses=cards)(self.running)
        router.get(
            "/api/version",
            summary="The version of Ollama that this API follows",
            responses={**json_answer(Version), **ERRORS},
            dependencies=[PUBLIC],
        )(self.version)
        router.post(
            "/api/show",
            summary="What a model is and can do",
            openapi_extra=body_docs(ModelBody, {"model": self._client.info.served_name}),
            responses={**json_answer(ModelDescription), **ERRORS},
        )(self.show)

    async def version(self) -> Response:
        return json_response({"version": self._version})

    async def tags(self) -> Response:
        modified = {"modified_at": stamp(self._client.info.created)}
        return json_response({"models": [{**self._card(name), **modified} for name in self._client.info.names]})

    async def running(self) -> Response:
        info = self._client.info
        loaded = {"expires_at": _NEVER, "size_vram": 0, "context_length": info.max_context_len}
        return json_response({"models": [{**self._card(name), **loaded} for name in info.names]})

    async def show(self, request: Request) -> Response:
        body = await parse_body(request, ModelBody)
        info = self._client.info
        checked_name(info, body.model or body.name)
        kind = info.model_type or info.architecture
        return json_response(
            {
                "modelfile": "",
                "parameters": "\n".join(f"{name} {value}" for name, value in info.sampling_defaults.items()),
                "template": next(iter(self._client.tokenizer.chat_templates.values()), ""),
                "details": self._details(),
                "model_info": {
                    "general.architecture": kind,
                    "general.basename": info.served_name,
                    f"{kind}.context_length": info.max_context_len,
                    f"{kind}.embedding_length": info.hidden_size,
                    f"{kind}.vocab_size": info.vocab_size,
                },
                "capabilities": self._capabilities(),
                "modified_at": stamp(info.created),
            }
        )

    def _card(self, name: str) -> dict[str, object]:
        digest = hashlib.sha256(f"{self._client.info.path}\0{name}".encode()).hexdigest()
        named = name if ":" in name else f"{name}{LATEST}"
        return {"name": named, "model": named, "size": 0, "digest": digest, "details": self._details()}

    def _details(self) -> dict[str, object]:
        info = self._client.info
        kind = info.model_type or info.architecture
        return {
            "parent_model": "",
            "format": "safetensors",
            "family": kind,
            "families": [kind],
            "parameter_size": "",
            "quantization_level": info.dtype,
        }

    def _capabilities(self) -> list[str]:
        reasoning = reasoning_parser_of(self._ctx)
        chats = self._client.tokenizer.has_chat_template
        found = {
            "completion": True,
            "tools": chats and tool_parser_of(self._ctx) is not None,
            "thinking": chats and reasoning is not None and reasoning.thought_form() is not None,
            "vision": reader_of(self._client) is not None,
            "embedding": "embeddings" in self._client.info.features,
        }
        return [name for name, there in found.items() if there]
