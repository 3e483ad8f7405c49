"""What can be known of the server: whether it lives, and what it serves."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.client import GenerateRequest, ModelInfo
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.tokenizer import Tokenizer
from pegboard.plugins.api_native.bodies import Described, answers
from pegboard.plugins.sessions_in_memory.api import sessions_of
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.events import until_disconnect
from pegboard.toolkit.http.generation import Answers
from pegboard.toolkit.http.levels import PUBLIC, is_admin
from pegboard.toolkit.http.openapi import error_responses
from pegboard.toolkit.http.weight_version import BROKEN, served_weights

_NOTHING: dict[str, Any] = {
    "responses": {200: {"description": "Yes; there is no body."}, **error_responses()},
    "response_class": Response,
}


_PROGRESS = ("generated_tokens", "prompt_tokens")
"""The scheduler's counters of what has been computed; prompts count chunk by chunk."""
_LOOK_AGAIN = 0.1
"""Seconds between two looks at them."""


class ModelAnswer(Described):
    """The served model."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    served_model_names: list[str]
    """Every name that requests may use, the one that answers have first."""
    is_generation: bool
    architecture: str
    architectures: list[str]
    """As the model's own config has them; the same of `model_type`."""
    model_type: str
    dtype: str
    weight_version: str
    max_context_length: int
    max_total_num_tokens: int
    kv_bytes_per_token: int
    """Bytes of the KV pool that a token takes in all layers; 0 where it is not known."""
    vocab_size: int
    has_chat_template: bool
    sampling_defaults: dict[str, float]
    """What holds for sampling parameters that a request leaves open, beside the defaults of each API."""
    features: list[str]
    """What requests may ask of this engine: `grammar.json_schema`, `input_logprobs`, and so on."""


class ServerAnswer(Described):
    """The server, and what it serves. With the admin key also its configuration without secrets, the scheduler's
    counters and queues, and what was chosen.
    """

    version: str
    ready: bool
    model_path: str
    served_model_name: str
    dp_size: int
    """Engines behind this server."""
    tp_size: int
    """Devices of an engine."""
    max_total_num_tokens: int
    model_info: ModelAnswer
    """The answer of `/model_info`."""
    config: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    providers: dict[str, Any] | None = None
    sessions: dict[str, Any] | None = None


class VersionAnswer(Described):
    """The software."""

    version: str


class WeightAnswer(Described):
    """The weights."""

    weight_version: str


class Information:
    """The routes. `health_timeout` is in seconds."""

    def __init__(self, ctx: ApiContext, health_timeout: float) -> None:
        self._sessions = sessions_of(ctx)
        self._providers = ctx.providers
        self._client = ctx.client
        self._health_timeout = health_timeout

    def add_to(self, router: APIRouter) -> None:
        public: dict[str, Any] = {"dependencies": [PUBLIC], **_NOTHING}
        for path in ("/health", "/ping"):
            router.get(path, summary="Whether the server process is alive, and its weights are whole", **public)(
                self.health
            )
        router.get("/ready", summary="Whether requests are taken: 503 while starting or stopping", **public)(self.ready)
        probed = "Whether the engine answers: generates one token; 503 while starting, stopping or paused"
        router.get("/health_generate", summary=probed, **_NOTHING)(self.health_generate)
        for path in ("/model_info", "/get_model_info"):
            router.get(path, summary="The served model", **answers(ModelAnswer))(self.model_info)
        known = "The server and its model; configuration and counters for admins"
        for path in ("/server_info", "/get_server_info"):
            router.get(path, summary=known, **answers(ServerAnswer))(self.server_info)
        router.get("/get_weight_version", summary="Version of the weights", **answers(WeightAnswer))(
            self.weight_version
        )
        router.get("/version", summary="Version of this software", **answers(VersionAnswer))(self.version)

    async def health(self) -> Response:
        self._check_weights()
        return Response()

    async def ready(self) -> Response:
        self._check_ready()
        return Response()

    async def health_generate(self, request: Request) -> Response:
        """Answer a probe. A busy engine lets it wait for its turn, and is as healthy as one that answers it."""
        self._check_ready()
        before = await until_disconnect(request, self._scheduler())
        if before.get("paused"):
            raise InvalidRequest("generation is paused (/continue_generation)", code="paused", status=503)
        try:
            await until_disconnect(request, asyncio.wait_for(self._answered(before), self._health_timeout))
        except TimeoutError:
            if not _got_on(before, await until_disconnect(request, self._scheduler())):
                text = f"the engine has computed nothing for {self._health_timeout:g} s"
                raise InvalidRequest(text, code="no_progress", status=503) from None
        return Response()

    async def _answered(self, before: Mapping[str, object]) -> None:
        """Return when a probe has been answered or, where the queue is full, when the engine has got on."""
        try:
            await self._probe()
        except InvalidRequest as error:
            if error.code != "queue_full":
                raise
            while not _got_on(before, await self._scheduler()):
                await asyncio.sleep(_LOOK_AGAIN)

    async def _probe(self) -> None:
        probe = GenerateRequest(
            prompt=[0],
            rid=f"health-{uuid.uuid4().hex}",
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        )
        await (await Answers.submit(self._client, [probe])).collect()

    async def model_info(self) -> Response:
        return json_response(
            model_info(self._client.info, self._client.tokenizer, served_weights(self._client).version)
        )

    async def server_info(self, request: Request) -> Response:
        client = self._client
        model = model_info(client.info, client.tokenizer, served_weights(client).version)
        # SGLang has these at the top, where routers look for them; they have no admin key. To its own router a `model`
        # would be one more name, and what is not a text would hide all others.
        known = {name: model[name] for name in ("model_path", "served_model_name", "max_total_num_tokens")}
        about = {**known, "dp_size": 1, "tp_size": 1, "version": client.info.version, "model_info": model}
        if not is_admin(request):
            return json_response({**about, "ready": client.ready})
        chosen = {"providers": {**client.info.providers, **self._providers}, "sessions": self._sessions.stats()}
        return json_response({**await client.server_info(), **about, **chosen})

    async def version(self) -> Response:
        return json_response({"version": self._client.info.version})

    async def weight_version(self) -> Response:
        return json_response({"weight_version": served_weights(self._client).version})

    def _check_weights(self) -> None:
        if fault := served_weights(self._client).fault:
            raise InvalidRequest(fault, code=BROKEN, status=503)

    def _check_ready(self) -> None:
        self._check_weights()
        if not self._client.ready:
            raise InvalidRequest("the engine is starting, or the server is stopping", code="not_ready", status=503)

    async def _scheduler(self) -> Mapping[str, object]:
        info = await self._client.server_info()
        scheduler: Mapping[str, object] = info.get("scheduler", {})
        return scheduler


def _got_on(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    """Return whether an engine has computed anything between two looks at its counters. A prompt may take minutes in
    which nothing is generated. A restart, which begins to count again, is seen as well.
    """
    return any(after.get(name, 0) != before.get(name, 0) for name in _PROGRESS)


def model_info(info: ModelInfo, tokenizer: Tokenizer, version: str) -> dict[str, Any]:
    """Body of `/model_info`; `version` is that of the weights."""
    return {
        "model_path": info.path,
        "tokenizer_path": info.path,
        "served_model_name": info.served_name,
        "served_model_names": list(info.names),
        "is_generation": True,
        "architecture": info.architecture,
        "architectures": list(info.architectures) or [info.architecture],
        "model_type": info.model_type,
        "dtype": info.dtype,
        "weight_version": version,
        "max_context_length": info.max_context_len,
        "max_total_num_tokens": info.max_total_tokens,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "vocab_size": info.vocab_size,
        "has_chat_template": tokenizer.has_chat_template,
        "sampling_defaults": dict(info.sampling_defaults),
        "features": list(info.features),
    }
