"""/pooling, as vLLM has it: texts or conversations as vectors."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.embeddings import EmbeddingBody, EmbeddingUsage, embedding_usage, written_vector
from pegboard.plugins.api_openai.surface import Surface, documented, new_id
from pegboard.plugins.api_openai.unsupported import EMBEDDINGS
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import parse_body


class PoolingBody(EmbeddingBody):
    """Body of `/pooling`: that of `/v1/embeddings`, and what is to be made of the model's hidden states."""

    refused = {name: said for name, said in EMBEDDINGS.items() if name != "use_activation"}

    task: str = "embed"
    """`embed`, one vector for each input; this server does no other."""
    use_activation: bool = True
    """vLLM's other name for `normalize`."""


class Pooling:
    """The routes."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    def add_to(self, router: APIRouter) -> None:
        example = {"model": self._surface.model, "input": ["The capital of France is Paris.", "Cats purr."]}
        docs = documented(PoolingBody, PoolingAnswer, example, 504)
        for prefix in ("/v1", ""):
            router.post(f"{prefix}/pooling", summary="Texts as vectors, in vLLM's words", **docs)(self.create)

    async def create(self, request: Request) -> Response:
        body = await parse_body(request, PoolingBody)
        self._surface.check_model(body.model)
        if body.task != "embed":
            message = f"task: this server does embed only, not {body.task[:64]!r}"
            raise InvalidRequest(message, param="task", code="unsupported")
        rid = new_id("pool", body.rid)
        requests = body.requests(rid, normalize=body.normalize and body.use_activation)
        found = await self._surface.embed(request, requests, {"prompt": "input"})
        data = [
            {"index": i, "object": "pooling", "data": written_vector(one.vector, body.encoding_format)}
            for i, one in enumerate(found)
        ]
        head: dict[str, Any] = {"id": rid, "object": "list", "created": int(time.time()), "model": self._surface.model}
        return json_response({**head, "data": data, "usage": embedding_usage(found)})


class PoolingEntry(BaseModel):
    """One vector: numbers, or little-endian float32 in base64."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PoolingAnswer(BaseModel):
    """The answer of `/pooling`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingEntry]
    usage: EmbeddingUsage
