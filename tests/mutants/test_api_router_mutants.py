"""Broken routers, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from pegboard.conformance import asgi
from pegboard.conformance.api_router import ApiRouterContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http import events as http_events
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.events import EventStream
from pegboard.toolkit.http.generation import Answers
from tests.mutants.small_api import SmallApi, TextBody, events


class LeavesARouteUndocumented(SmallApi):
    def routes(self) -> APIRouter:
        router = super().routes()
        router.get("/secret")(self.alive)
        return router


class SaysNothingOfKeys(SmallApi):
    def routes(self) -> APIRouter:
        router = super().routes()
        router.dependencies.clear()
        router.get("/secret", summary="For whom?")(self.alive)
        return router


class ClaimsAPathTwice(SmallApi):
    def routes(self) -> APIRouter:
        router = super().routes()
        router.get("/alive", summary="Again")(self.alive)
        return router


class DocumentsAnExampleThatFails(SmallApi):
    def routes(self) -> APIRouter:
        router = super().routes()
        for route in router.routes:
            if isinstance(route, APIRoute) and route.path == "/text" and route.openapi_extra:
                content = route.openapi_extra["requestBody"]["content"]["application/json"]
                content["example"] = {"text": 5}
        return router


class ParsesLikeFastAPI(SmallApi):
    """Validation errors with 422, as the framework has them."""

    async def text(self, request: Request) -> Response:
        try:
            return await super().text(request)
        except InvalidRequest as error:
            if error.code == "malformed_json":
                error.status = 422
            raise


class TakesAnyType(SmallApi):
    async def text(self, request: Request) -> Response:
        try:
            return await super().text(request)
        except InvalidRequest as error:
            if error.code == "invalid_type":
                return json_response({"text": ""})
            raise


class WritesErrorsItsOwnWay(SmallApi):
    """And does not say so: what the server itself refuses looks different."""

    async def text(self, request: Request) -> Response:
        try:
            return await super().text(request)
        except InvalidRequest as error:
            return json_response({"detail": error.message, "field": error.param}, error.status)


class WalksInRecursion(SmallApi):
    """Looks for something in whatever a client sent."""

    async def text(self, request: Request) -> Response:
        body = await parse_body(request, TextBody)

        def depth(value: Any) -> int:
            if isinstance(value, dict):
                return 1 + max([depth(one) for one in value.values()], default=0)
            return 1 + max([depth(one) for one in value], default=0) if isinstance(value, list) else 0

        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(len(inspect.stack()) + 200)
        try:
            depth(body.notes)
        finally:
            sys.setrecursionlimit(limit)
        return await super().text(request)


class HidesTheField(SmallApi):
    async def text(self, request: Request) -> Response:
        try:
            return await super().text(request)
        except InvalidRequest as error:
            if error.code == "invalid_type":
                raise InvalidRequest("bad request") from None
            raise


class RefusesUnknownFields(SmallApi):
    async def text(self, request: Request) -> Response:
        if unknown := (await request.json()).keys() - TextBody.model_fields.keys():
            raise InvalidRequest(f"unknown fields: {unknown}")
        return await super().text(request)


class DropsTheLastPiece(SmallApi):
    async def text(self, request: Request) -> Response:
        body = await parse_body(request, TextBody)
        answers = await Answers.submit(self.client, [body.request()])
        [done] = await http_events.until_disconnect(request, answers.collect())
        return json_response({"text": done.text.rpartition(" ")[0]})


class AnswersRefusalsWith400(SmallApi):
    async def text(self, request: Request) -> Response:
        try:
            return await super().text(request)
        except InvalidRequest as error:
            raise InvalidRequest(error.message) from None


class _Unwatched(SmallApi):
    """The route without its care; subclasses leave out one thing each."""

    watch: Callable[..., Coroutine[Any, Any, Any]] | None = staticmethod(http_events.until_disconnect)
    stream: type[EventStream] = EventStream

    async def text(self, request: Request) -> Response:
        body = await parse_body(request, TextBody)
        answers = await Answers.submit(self.client, [body.request()])
        if body.stream:
            return self.stream(events(answers), close=answers.aclose)
        watch = type(self).watch
        [done] = await (answers.collect() if watch is None else watch(request, answers.collect()))
        return json_response({"text": done.text})


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


class StreamsBeforeAcceptance(SmallApi):
    async def text(self, request: Request) -> Response:
        body = await parse_body(request, TextBody)
        if not body.stream:
            return await super().text(request)

        async def late() -> Any:
            answers = await Answers.submit(self.client, [body.request()])
            async for frame in events(answers):
                yield frame

        return EventStream(late(), close=_nothing)


class AbortsEverybody(SmallApi):
    async def text(self, request: Request) -> Response:
        answers = await Answers.submit(self.client, [(await parse_body(request, TextBody)).request()])
        async for _, chunk in answers.chunks():
            if chunk.text:
                break
        await answers.aclose()
        return json_response({"text": ""})


class OneAtATime(SmallApi):
    def routes(self) -> APIRouter:
        self.lock = asyncio.Lock()
        return super().routes()

    async def text(self, request: Request) -> Response:
        async with self.lock:
            return await super().text(request)


class RendersOnTheLoop(SmallApi):
    async def text(self, request: Request) -> Response:
        self.client.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
        return await super().text(request)


class RunsUnready(SmallApi):
    async def text(self, request: Request) -> Response:
        try:
            return await super().text(request)
        except InvalidRequest as error:
            return json_response({"text": error.message})


async def _nothing() -> None: ...


def _mutant(factory: type[Any], caught_by: str) -> Mutant:
    return Mutant(factory, suite=ApiRouterContract, caught_by=caught_by, base=SmallApi)


MUTANTS = [
    _mutant(LeavesARouteUndocumented, "test_routes_exist_and_are_documented"),
    _mutant(SaysNothingOfKeys, "test_every_route_declares_who_may_use_it"),
    _mutant(ClaimsAPathTwice, "test_no_path_is_claimed_twice"),
    _mutant(DocumentsAnExampleThatFails, "test_documented_examples_work"),
    _mutant(ParsesLikeFastAPI, "test_malformed_bodies_are_refused"),
    _mutant(TakesAnyType, "test_wrong_types_are_refused_by_name"),
    _mutant(WalksInRecursion, "test_odd_values_are_no_bugs"),
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
def test_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some never answer, and a test gives up on them.
    monkeypatch.setattr(asgi, "PATIENCE", 4.0)
    assert_caught(mutant)
