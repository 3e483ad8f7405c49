"""What can be known of the server: whether it lives, what it serves, how busy it is."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import RootModel

from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.client import GenerateRequest, ModelInfo
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.tokenizer import Tokenizer
from pegboard.core.toolkit.generation import Answers
from pegboard.core.toolkit.http import ADMIN, PUBLIC, error_responses, json_response, until_disconnect
from pegboard.plugins.api_native.bodies import Described, answers
from pegboard.plugins.api_native.responses import WEIGHT_VERSION

_NOTHING: dict[str, Any] = {
    "responses": {200: {"description": "Yes; there is no body."}, **error_responses()},
    "response_class": Response,
}


class ModelAnswer(Described):
    """The served model."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    architecture: str
    dtype: str
    weight_version: str
    max_context_length: int
    max_total_num_tokens: int
    vocab_size: int
    has_chat_template: bool
    features: list[str]
    """What requests may ask of this engine: `grammar.json_schema`, `input_logprobs`, and so on."""


class ServerAnswer(Described):
    """The server: its configuration without secrets, the scheduler's counters and queues, and what was chosen."""

    version: str
    ready: bool
    config: dict[str, Any]
    scheduler: dict[str, Any]
    model: ModelAnswer
    providers: dict[str, Any]
    sessions: dict[str, Any]


class WeightAnswer(Described):
    """The weights."""

    weight_version: str


class BriefLoad(Described):
    """How busy an engine is."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class BriefLoads(RootModel[list[BriefLoad]]):
    """How busy the engines are."""


class Load(BriefLoad):
    """How busy an engine is, and how full."""

    timestamp: float
    """Seconds since 1970."""
    num_running_reqs: int
    num_used_tokens: int
    """Tokens of KV that requests hold, or that they keep the cache from dropping."""
    max_total_num_tokens: int
    token_usage: float
    """Used, of all."""


class TotalLoad(Described):
    """All engines together."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float


class Loads(Described):
    """How busy the engines are."""

    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: TotalLoad


class Information:
    """The routes. `health_timeout` is in seconds."""

    def __init__(self, ctx: ApiContext, health_timeout: float) -> None:
        self._sessions = ctx.sessions
        self._providers = ctx.providers
        self._client = ctx.client
        self._health_timeout = health_timeout

    def add_to(self, router: APIRouter) -> None:
        public: dict[str, Any] = {"dependencies": [PUBLIC], **_NOTHING}
        for path in ("/health", "/ping"):
            router.get(path, summary="Whether the server process is alive", **public)(self.health)
        router.get("/ready", summary="Whether requests are taken: 503 while starting or stopping", **public)(self.ready)
        probed = "Whether the engine answers: generates one token; 503 while starting, stopping or paused"
        router.get("/health_generate", summary=probed, **_NOTHING)(self.health_generate)
        for path in ("/model_info", "/get_model_info"):
            router.get(path, summary="The served model", **answers(ModelAnswer))(self.model_info)
        admin: dict[str, Any] = {"dependencies": [ADMIN], **answers(ServerAnswer)}
        for path in ("/server_info", "/get_server_info"):
            router.get(path, summary="Configuration and counters", **admin)(self.server_info)
        router.get("/get_weight_version", summary="Version of the weights", **answers(WeightAnswer))(
            self.weight_version
        )
        router.get("/v1/loads", summary="Requests and tokens per engine", **answers(Loads))(self.loads)
        brief = "Requests and tokens per engine, as a bare list"
        router.get("/get_load", summary=brief, **answers(BriefLoads))(self.get_load)

    async def health(self) -> Response:
        return Response()

    async def ready(self) -> Response:
        self._check_ready()
        return Response()

    async def health_generate(self, request: Request) -> Response:
        """A busy engine lets the probe wait for its turn, and is as healthy as one that answers it."""
        self._check_ready()
        before = await until_disconnect(request, self._scheduler())
        if before.get("paused"):
            raise InvalidRequest("generation is paused (/continue_generation)", code="paused", status=503)
        probing = asyncio.wait_for(self._probe(), self._health_timeout)
        try:
            await until_disconnect(request, probing)
        except TimeoutError:
            after = await until_disconnect(request, self._scheduler())
            if after.get("generated_tokens", 0) == before.get("generated_tokens", 0):
                raise InvalidRequest(
                    f"the engine has generated nothing for {self._health_timeout:g} s", code="no_progress", status=503
                ) from None
        return Response()

    async def _probe(self) -> None:
        probe = GenerateRequest(
            prompt=[0],
            rid=f"health-{uuid.uuid4().hex}",
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        )
        await (await Answers.submit(self._client, [probe])).collect()

    async def model_info(self) -> Response:
        return json_response(model_info(self._client.info, self._client.tokenizer))

    async def server_info(self) -> Response:
        info, client = await self._client.server_info(), self._client
        more = {
            "version": client.info.version,
            "model": model_info(client.info, client.tokenizer),
            "providers": {**client.info.providers, **self._providers},
            "sessions": self._sessions.stats(),
        }
        return json_response({**info, **more})

    async def weight_version(self) -> Response:
        return json_response({"weight_version": WEIGHT_VERSION})

    async def loads(self) -> Response:
        load = full_load(await self._scheduler(), time.time())
        together = {
            "total_running_reqs": load["num_running_reqs"],
            "total_waiting_reqs": load["num_waiting_reqs"],
            "total_reqs": load["num_reqs"],
            "avg_token_usage": load["token_usage"],
        }
        about = {"timestamp": load["timestamp"], "version": self._client.info.version, "dp_rank_count": 1}
        return json_response({**about, "loads": [load], "aggregate": together})

    async def get_load(self) -> Response:
        load = full_load(await self._scheduler(), time.time())
        return json_response([{name: load[name] for name in BriefLoad.model_fields}])

    def _check_ready(self) -> None:
        if not self._client.ready:
            raise InvalidRequest("the engine is starting, or the server is stopping", code="not_ready", status=503)

    async def _scheduler(self) -> Mapping[str, Any]:
        info = await self._client.server_info()
        scheduler: Mapping[str, Any] = info.get("scheduler", {})
        return scheduler


def model_info(info: ModelInfo, tokenizer: Tokenizer) -> dict[str, Any]:
    """Body of `/model_info`."""
    return {
        "model_path": info.path,
        "tokenizer_path": info.path,
        "served_model_name": info.served_name,
        "is_generation": True,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "weight_version": WEIGHT_VERSION,
        "max_context_length": info.max_context_len,
        "max_total_num_tokens": info.max_total_tokens,
        "vocab_size": info.vocab_size,
        "has_chat_template": tokenizer.has_chat_template,
        "features": list(info.features),
    }


def full_load(scheduler: Mapping[str, Any], now: float) -> dict[str, Any]:
    """One engine's load, from its scheduler's counters."""
    running = scheduler.get("running_requests", 0)
    waiting = scheduler.get("waiting_requests", 0) + scheduler.get("blocked_requests", 0)
    used = scheduler.get("held_tokens", 0) + scheduler.get("locked_tokens", 0)
    total = scheduler.get("total_tokens", 0)
    return {
        "dp_rank": 0,
        "timestamp": now,
        "num_reqs": waiting + running,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_tokens": used,
        "num_used_tokens": used,
        "max_total_num_tokens": total,
        "token_usage": used / total if total else 0.0,
    }
