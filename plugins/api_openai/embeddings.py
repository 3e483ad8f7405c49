"""/v1/embeddings: texts as vectors."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from pegboard.core.interfaces.client import EmbedRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.surface import Surface, documented, new_id
from pegboard.plugins.api_openai.unsupported import EMBEDDINGS
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.refusals import RefusingModel
from pegboard.toolkit.http.request_fields import RequestFields

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import Embedding
    from pegboard.toolkit.http.generation import Answer

MAX_INPUTS = 2048
"""OpenAI's bound."""


class EmbeddingFields(RequestFields, RefusingModel):
    """What all bodies have that ask for embeddings, whatever is made of them."""

    model: str = ""
    user: str = ""
    rid: str = ""
    add_special_tokens: bool = True

    def embed_requests(
        self, prompts: Sequence[str | list[int]], *, rid: str, normalize: bool = True, dimensions: int | None = None
    ) -> list[EmbedRequest]:
        """Return one request per prompt; those of several are called ``<rid>_<number>``."""
        return [
            EmbedRequest(
                prompt=prompt,
                rid=rid if len(prompts) == 1 else f"{rid}_{i}",
                priority=self.priority,
                cache_salt=self.salt,
                add_special_tokens=self.add_special_tokens,
                normalize=normalize,
                dimensions=dimensions,
                params=self.params,
                model=self.model,
            )
            for i, prompt in enumerate(prompts)
        ]


class EmbeddingBody(EmbeddingFields):
    """Body of `/v1/embeddings`."""

    refused = EMBEDDINGS

    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    """How many of each vector's numbers to give."""
    normalize: bool = True
    """Whether vectors have length 1."""

    def prompts(self) -> list[str | list[int]]:
        """Return the inputs, one unless `input` is a list of texts or of lists."""
        given: Any = self.input
        found = list(given) if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
        if len(found) > MAX_INPUTS:
            raise InvalidRequest(f"input may have at most {MAX_INPUTS} entries, got {len(found)}", param="input")
        if not all(found):
            raise InvalidRequest("input is empty", param="input")
        return found

    def requests(self, rid: str, *, normalize: bool) -> list[EmbedRequest]:
        """Return one request per input. Raises InvalidRequest."""
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequest(f"dimensions must be at least 1, got {self.dimensions}", param="dimensions")
        return self.embed_requests(self.prompts(), rid=rid, normalize=normalize, dimensions=self.dimensions)


class Embeddings:
    """The route."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    def add_to(self, router: APIRouter) -> None:
        example = {"model": self._surface.model, "input": ["The capital of France is Paris.", "Cats purr."]}
        docs = documented(EmbeddingBody, EmbeddingList, example, 504)
        router.post("/v1/embeddings", summary="Texts as vectors", **docs)(self.create)

    async def create(self, request: Request) -> Response:
        body = await parse_body(request, EmbeddingBody)
        self._surface.check_model(body.model)
        requests = body.requests(new_id("embd", body.rid), normalize=body.normalize)
        found = await self._surface.embed(request, requests, {"prompt": "input"})
        data = [
            {"object": "embedding", "index": i, "embedding": written_vector(one.vector, body.encoding_format)}
            for i, one in enumerate(found)
        ]
        return json_response(
            {"object": "list", "data": data, "model": self._surface.model, "usage": embedding_usage(found)}
        )


def written_vector(vector: Sequence[float], encoding_format: str) -> list[float] | str:
    """Return a vector as answers have it."""
    if encoding_format == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def embedding_usage(found: Sequence[Embedding | Answer]) -> dict[str, int]:
    """`usage` where it is prompts that count."""
    total = sum(one.prompt_tokens for one in found)
    return {"prompt_tokens": total, "total_tokens": total}


class EmbeddingUsage(BaseModel):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingEntry(BaseModel):
    """One vector: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage
