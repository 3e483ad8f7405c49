"""Broken routers, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.testing.api_router import ApiRouterContract
from pegboard.core.testing.mutants import Mutant, assert_caught
from pegboard.core.toolkit import http
from pegboard.core.toolkit.generation import Answers
from pegboard.core.toolkit.http import EventStream, json_response, parse_body
from pegboard.plugins.api_native.requests import GenerateBody, engine_requests
from pegboard.plugins.api_native.responses import Responder
from pegboard.plugins.api_native.router import NativeRouter, _events
from pegboard.plugins.api_openai.requests import ChatBody
from pegboard.plugins.api_openai.router import OpenAIRouter


class LeavesARouteUndocumented(NativeRouter):
    def routes(self) -> APIRouter:
        router = super().routes()
        router.get("/secret")(self.health)
        return router


class SaysNothingOfKeys(NativeRouter):
    def routes(self) -> APIRouter:
        router = super().routes()
        router.dependencies.clear()
        router.get("/secret", summary="For whom?")(self.health)
        return router


class ClaimsAPathTwice(NativeRouter):
    def routes(self) -> APIRouter:
        router = super().routes()
        router.get("/health", summary="Again")(self.health)
        return router


class DocumentsAnExampleThatFails(NativeRouter):
    def routes(self) -> APIRouter:
        router = super().routes()
        for route in router.routes:
            if isinstance(route, APIRoute) and route.path == "/generate" and route.openapi_extra:
                content = route.openapi_extra["requestBody"]["content"]["application/json"]
                content["example"] = {"text": ""}
        return router


class ParsesLikeFastAPI(NativeRouter):
    """Validation errors with 422, as the framework has them."""

    async def generate(self, request: Request) -> Response:
        try:
            return await super().generate(request)
        except InvalidRequest as error:
            if error.code == "malformed_json":
                error.status = 422
            raise


class TakesAnyType(NativeRouter):
    async def generate(self, request: Request) -> Response:
        try:
            return await super().generate(request)
        except InvalidRequest as error:
            if error.code == "invalid_type":
                return json_response({"text": ""})
            raise


class WritesErrorsItsOwnWay(NativeRouter):
    """And does not say so: what the server itself refuses looks different."""

    async def generate(self, request: Request) -> Response:
        try:
            return await super().generate(request)
        except InvalidRequest as error:
            return json_response({"detail": error.message, "field": error.param}, error.status)


class HidesTheField(NativeRouter):
    async def generate(self, request: Request) -> Response:
        try:
            return await super().generate(request)
        except InvalidRequest as error:
            if error.code == "invalid_type":
                raise InvalidRequest("bad request") from None
            raise


class RefusesUnknownFields(NativeRouter):
    async def generate(self, request: Request) -> Response:
        if unknown := (await request.json()).keys() - GenerateBody.model_fields.keys():
            raise InvalidRequest(f"unknown fields: {unknown}")
        return await super().generate(request)


class DropsTheLastPiece(NativeRouter):
    async def generate(self, request: Request) -> Response:
        requests, _ = engine_requests(await parse_body(request, GenerateBody))
        answers = await Answers.submit(self.client, requests)
        done = await http.until_disconnect(request, answers.collect())
        done[0].text = done[0].text.rpartition(" ")[0]
        return json_response(Responder(self.client.tokenizer, text_in_logprobs=False).answer(requests[0], done[0], 0))


class AnswersRefusalsWith400(NativeRouter):
    async def generate(self, request: Request) -> Response:
        try:
            return await super().generate(request)
        except InvalidRequest as error:
            raise InvalidRequest(error.message) from None


class _Unwatched(NativeRouter):
    """The native route without its care; subclasses leave out one thing each."""

    submit_first = True
    watch: Callable[..., Coroutine[Any, Any, Any]] | None = staticmethod(http.until_disconnect)
    stream: type[EventStream] = EventStream

    async def generate(self, request: Request) -> Response:
        body = await parse_body(request, GenerateBody)
        requests, batch = engine_requests(body)
        responder = Responder(self.client.tokenizer, text_in_logprobs=False)
        answers = await Answers.submit(self.client, requests)
        if body.stream:
            return self.stream(_events(requests, answers, responder, 0.0, batch), close=answers.aclose)
        watch = type(self).watch
        done = await (answers.collect() if watch is None else watch(request, answers.collect()))
        return json_response(responder.answer(requests[0], done[0], 0.0))


class IgnoresLeavers(_Unwatched):
    watch = None


class _Deaf(EventStream):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._send(send)


class StreamsToNobody(_Unwatched):
    stream = _Deaf


class _Brittle(EventStream):
    async def _guarded(self) -> Any:
        async for frame in self._events:
            yield frame


class StreamsBreakOff(_Unwatched):
    stream = _Brittle


class StreamsBeforeAcceptance(NativeRouter):
    async def generate(self, request: Request) -> Response:
        body = await parse_body(request, GenerateBody)
        if not body.stream:
            return await super().generate(request)
        requests, batch = engine_requests(body)
        responder = Responder(self.client.tokenizer, text_in_logprobs=False)

        async def events() -> Any:
            answers = await Answers.submit(self.client, requests)
            async for frame in _events(requests, answers, responder, 0.0, batch):
                yield frame

        return EventStream(events(), close=_nothing)


class AbortsEverybody(NativeRouter):
    async def generate(self, request: Request) -> Response:
        requests, _ = engine_requests(await parse_body(request, GenerateBody))
        answers = await Answers.submit(self.client, requests)
        async for _, chunk in answers.chunks():
            if chunk.text:
                break
        await answers.aclose()
        return json_response({"text": ""})


class OneAtATime(NativeRouter):
    def routes(self) -> APIRouter:
        self.lock = asyncio.Lock()
        return super().routes()

    async def generate(self, request: Request) -> Response:
        async with self.lock:
            return await super().generate(request)


class RendersOnTheLoop(OpenAIRouter):
    async def _render(self, body: ChatBody) -> str:
        return self.client.tokenizer.apply_chat_template(body.template_messages())


class RunsUnready(NativeRouter):
    async def generate(self, request: Request) -> Response:
        try:
            return await super().generate(request)
        except InvalidRequest as error:
            return json_response({"text": error.message})


async def _nothing() -> None: ...


def _mutant(factory: type[Any], caught_by: str) -> Mutant:
    base = OpenAIRouter if issubclass(factory, OpenAIRouter) else NativeRouter
    return Mutant(factory, suite=ApiRouterContract, caught_by=caught_by, base=base)


MUTANTS = [
    _mutant(LeavesARouteUndocumented, "test_routes_exist_and_are_documented"),
    _mutant(SaysNothingOfKeys, "test_every_route_declares_who_may_use_it"),
    _mutant(ClaimsAPathTwice, "test_no_path_is_claimed_twice"),
    _mutant(DocumentsAnExampleThatFails, "test_documented_examples_work"),
    _mutant(ParsesLikeFastAPI, "test_malformed_bodies_are_refused"),
    _mutant(TakesAnyType, "test_wrong_types_are_refused_by_name"),
    _mutant(HidesTheField, "test_wrong_types_are_refused_by_name"),
    _mutant(WritesErrorsItsOwnWay, "test_errors_have_one_format"),
    _mutant(RefusesUnknownFields, "test_unknown_and_null_fields_are_tolerated"),
    _mutant(DropsTheLastPiece, "test_answer_holds_the_text"),
    _mutant(AnswersRefusalsWith400, "test_refusals_keep_their_status"),
    _mutant(AnswersRefusalsWith400, "test_failure_is_an_error"),
    _mutant(IgnoresLeavers, "test_leaving_aborts"),
    _mutant(StreamsToNobody, "test_leaving_a_stream_aborts"),
    _mutant(StreamsBreakOff, "test_failure_ends_a_stream_cleanly"),
    _mutant(StreamsBeforeAcceptance, "test_stream_begins_after_acceptance"),
    _mutant(AbortsEverybody, "test_finished_requests_are_not_aborted"),
    _mutant(OneAtATime, "test_requests_run_side_by_side"),
    _mutant(RendersOnTheLoop, "test_templates_do_not_block_the_loop"),
    _mutant(RunsUnready, "test_not_ready_is_503"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
