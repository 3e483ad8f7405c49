"""/encode and /classify."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import RootModel

from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.client import EmbedRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_native.bodies import Described, PromptBody, adapter_fields, answers, takes, taking
from pegboard.plugins.api_native.unsupported import ENCODE, HARMLESS_TO_ENCODE
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.events import until_disconnect
from pegboard.toolkit.http.generation import MAX_REQUESTS
from pegboard.toolkit.http.levels import LARGE
from pegboard.toolkit.http.request_fields import RequestFields
from pegboard.toolkit.http.weight_version import served_weights


class EncodeBody(RequestFields, PromptBody):
    """Body of `/encode` and `/classify`: one prompt, or a batch where `text` or `input_ids` is a list of prompts."""

    unsupported = ("is_cross_encoder_request",)
    refused = ENCODE
    harmless = HARMLESS_TO_ENCODE

    dimensions: int | None = None
    """How many numbers of the vector to keep, from its beginning; all by default."""
    normalize: bool = True
    """Whether the vector has length 1."""
    is_cross_encoder_request: bool = False

    def requests(self) -> list[EmbedRequest]:
        """Return what to ask of the engine. Raises InvalidRequest for what no engine could do."""
        self.check_supported()
        prompts = self.prompts()
        if len(prompts) > MAX_REQUESTS:
            raise InvalidRequest(f"at most {MAX_REQUESTS} prompts, got {len(prompts)}", param=self.prompt_field)
        rids = self.rids([1] * len(prompts))
        return [
            EmbedRequest(
                prompt=prompt,
                rid=rid or uuid.uuid4().hex,
                priority=self.priority,
                cache_salt=self.salt,
                normalize=self.normalize,
                dimensions=self.dimensions,
                params={**self.params, **adapter},
            )
            for prompt, rid, adapter in zip(prompts, rids, self.adapters(len(prompts)), strict=True)
        ]


class EncodedFinish(Described):
    """A prompt that was read to its end."""

    type: Literal["length"]
    length: int


class EncodedMeta(Described):
    """What is told of a vector."""

    id: str
    finish_reason: EncodedFinish
    prompt_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float


class Encoded(Described):
    """One prompt's vector."""

    embedding: list[float]
    meta_info: EncodedMeta


class EncodedAnswer(RootModel[Encoded | list[Encoded]]):
    """One vector, or a list of them for a batch."""


class Embedding:
    """The routes."""

    def __init__(self, ctx: ApiContext) -> None:
        self._client = ctx.client
        self._body = taking(EncodeBody, *adapter_fields(ctx.client.info))

    def add_to(self, router: APIRouter) -> None:
        large: dict[str, Any] = {"dependencies": [LARGE]}
        docs = {**takes(self._body, {"text": "The capital of France"}), **answers(EncodedAnswer, 429, 504), **large}
        router.post("/encode", summary="Vectors of texts or token ids", **docs)(self.encode)
        docs = {**takes(self._body), **answers(EncodedAnswer), **large}
        router.post("/classify", summary="Classes of texts, by models with a head for it", **docs)(self.classify)

    async def encode(self, request: Request) -> Response:
        started = time.monotonic()
        body = await parse_body(request, self._body)
        requests = body.requests()
        try:
            found = await until_disconnect(request, self._client.embed(requests))
        except InvalidRequest as error:
            raise error.called({"prompt": body.prompt_field}) from None
        latency = time.monotonic() - started
        bodies = [
            {
                "embedding": one.vector,
                "meta_info": {
                    "id": asked.rid,
                    "finish_reason": {"type": "length", "length": 0},
                    "prompt_tokens": one.prompt_tokens,
                    "cached_tokens": one.cached_tokens,
                    "weight_version": served_weights(self._client).version,
                    "e2e_latency": latency,
                },
            }
            for asked, one in zip(requests, found, strict=True)
        ]
        return json_response(bodies if body.batch else bodies[0])

    async def classify(self, request: Request) -> Response:
        (await parse_body(request, self._body)).requests()
        raise InvalidRequest(
            f"{self._client.info.served_name} is a language model without a classification head; /encode gives vectors",
            code="no_classifier",
        )
