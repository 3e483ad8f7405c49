"""The native routes: generation with token ids, state of the server, and what an operator may ask of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.api_router import ApiRouter
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.toolkit.generation import Answers
from pegboard.core.toolkit.http import (
    ADMIN,
    PUBLIC,
    USER,
    EventStream,
    api_router,
    body_docs,
    error_responses,
    event,
    json_response,
    parse_body,
    until_disconnect,
)
from pegboard.plugins.api_native.profiling import profile_arguments, profile_docs
from pegboard.plugins.api_native.requests import AbortBody, GenerateBody, engine_requests
from pegboard.plugins.api_native.responses import WEIGHT_VERSION, Responder, load, model_info

_EXAMPLE = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}


class NativeRouter(ApiRouter):
    """/generate, /health, /model_info, /server_info, /flush_cache, /abort_request, /start_profile, /stop_profile
    and older names of some.
    """

    def routes(self) -> APIRouter:
        router = api_router(tags=["native"], dependencies=[USER])
        public: dict[str, Any] = {"dependencies": [PUBLIC], "response_class": Response}
        admin: dict[str, Any] = {"dependencies": [ADMIN]}
        generate_docs = body_docs(GenerateBody, _EXAMPLE)
        router.post("/generate", summary="Generate from text or token ids", openapi_extra=generate_docs)(self.generate)
        for path in ("/health", "/ping"):
            router.get(path, summary="Whether the server process is alive", **public)(self.health)
        router.get("/ready", summary="Whether requests are taken: 503 while starting or stopping", **public)(self.ready)
        probe = "Whether the engine answers: generates one token"
        router.get("/health_generate", summary=probe, response_class=Response)(self.health_generate)
        for path in ("/model_info", "/get_model_info"):
            router.get(path, summary="The served model")(self.model_info)
        for path in ("/server_info", "/get_server_info"):
            router.get(path, summary="Configuration and counters", **admin)(self.server_info)
        router.get("/get_weight_version", summary="Version of the weights")(self.weight_version)
        router.get("/v1/loads", summary="Requests and tokens per engine")(self.loads)
        router.get("/get_load", summary="Requests and tokens per engine, as a bare list")(self.get_load)
        router.post("/flush_cache", summary="Drop all cached prefixes; 400 while requests run", **admin)(
            self.flush_cache
        )
        abort_docs = body_docs(AbortBody, {"rid": "my-request"})
        router.post("/abort_request", summary="Abort a request, or all", openapi_extra=abort_docs, **admin)(
            self.abort_request
        )
        trace: dict[str, Any] = {**admin, "responses": error_responses(404, 409)}
        start, stop = "Begin a trace of the scheduler process", "End the trace and write it"
        router.post("/start_profile", summary=start, openapi_extra=profile_docs(), **trace)(self.start_profile)
        router.post("/stop_profile", summary=stop, **trace)(self.stop_profile)
        return router

    async def generate(self, request: Request) -> Response:
        started = time.monotonic()
        body = await parse_body(request, GenerateBody)
        requests, batch = engine_requests(body)
        answers = await until_disconnect(request, Answers.submit(self.client, requests))
        responder = Responder(self.client.tokenizer, text_in_logprobs=body.return_text_in_logprobs)
        if body.stream:
            return EventStream(_events(requests, answers, responder, started, batch), close=answers.aclose)
        done = await until_disconnect(request, answers.collect())
        latency = time.monotonic() - started
        bodies = [responder.answer(one, answer, latency) for one, answer in zip(requests, done, strict=True)]
        return json_response(bodies if batch else bodies[0])

    async def health(self) -> Response:
        return Response()

    async def ready(self) -> Response:
        if not self.client.ready:
            raise InvalidRequest("the engine is starting, or the server is stopping", code="not_ready", status=503)
        return Response()

    async def health_generate(self, request: Request) -> Response:
        probe = GenerateRequest(
            prompt=[0],
            rid=f"health-{uuid.uuid4().hex}",
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        )
        answers = await until_disconnect(request, Answers.submit(self.client, [probe]))
        await until_disconnect(request, answers.collect())
        return Response()

    async def model_info(self) -> Response:
        return json_response(model_info(self.client.info, self.client.tokenizer))

    async def server_info(self) -> Response:
        info = await self.client.server_info()
        model = model_info(self.client.info, self.client.tokenizer)
        return json_response({**info, "model": model, "providers": self.client.info.providers})

    async def weight_version(self) -> Response:
        return json_response({"weight_version": WEIGHT_VERSION})

    async def loads(self) -> Response:
        return json_response({"loads": [await self._load()]})

    async def get_load(self) -> Response:
        return json_response([await self._load()])

    async def _load(self) -> dict[str, Any]:
        info = await self.client.server_info()
        return load(info.get("scheduler", {}))

    async def flush_cache(self) -> Response:
        if await self.client.flush_cache():
            return json_response({"success": True, "message": "the cache is empty"})
        raise InvalidRequest("the cache is in use: requests are waiting or running", code="busy")

    async def abort_request(self, request: Request) -> Response:
        body = await parse_body(request, AbortBody)
        if not body.rid and not body.abort_all:
            raise InvalidRequest("rid or abort_all is needed", param="rid")
        await self.client.abort(body.rid, all_requests=body.abort_all)
        return json_response({"success": True})

    async def start_profile(self, request: Request) -> Response:
        answer = await self.client.control("start_profile", await profile_arguments(request))
        return json_response({"success": True, **answer})

    async def stop_profile(self) -> Response:
        return json_response({"success": True, **await self.client.control("stop_profile")})


async def _events(
    requests: Sequence[GenerateRequest], answers: Answers, responder: Responder, started: float, batch: bool
) -> AsyncGenerator[bytes, None]:
    async for index, _ in answers.chunks():
        body = responder.answer(requests[index], answers.answers[index], time.monotonic() - started)
        yield event({**body, "index": index} if batch else body)
