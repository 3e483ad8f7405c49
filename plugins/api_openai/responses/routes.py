"""The routes of responses: create, fetch, delete, cancel."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.grammar import Grammar
from pegboard.core.toolkit.answer_stream import AnswerStream
from pegboard.core.toolkit.generation import are_large, salt_of
from pegboard.core.toolkit.http import (
    built_response,
    error_responses,
    json_answer,
    json_response,
    parse_body,
)
from pegboard.core.toolkit.tool_calls import Tools
from pegboard.core.toolkit.turn import Turn, effort_hints, take_turn
from pegboard.plugins.api_openai.options import OpenAIOptions
from pegboard.plugins.api_openai.responses.body import GRAMMARS, NAMES, ResponseBody
from pegboard.plugins.api_openai.responses.items import input_items, messages_of
from pegboard.plugins.api_openai.responses.run import Run
from pegboard.plugins.api_openai.responses.shapes import DeletedResponse, ResponseAnswer
from pegboard.plugins.api_openai.responses.store import ResponseStore
from pegboard.plugins.api_openai.surface import TOOL_GRAMMARS, Surface, documented

Items = list[dict[str, Any]]


class Responses:
    """The routes, and the responses that are kept or under way."""

    def __init__(self, surface: Surface, options: OpenAIOptions) -> None:
        self._surface = surface
        self._store = ResponseStore(most=options.stored_responses, most_bytes=options.stored_bytes)
        self._running: dict[str, Run] = {}

    def add_to(self, router: APIRouter) -> None:
        path, one = "/v1/responses", "/v1/responses/{response_id}"
        if not self._surface.client.tokenizer.has_chat_template:
            summary = "Answer a conversation: this model has no chat template"
            router.post(path, summary=summary, responses=error_responses(404))(self.create)
            return
        example = {
            "model": self._surface.model,
            "input": "What is the capital of France?",
            "max_output_tokens": 32,
            "temperature": 0,
        }
        events = "Events from response.created to response.completed, each with its name."
        docs = documented(ResponseBody, ResponseAnswer, example, 504, events=events)
        found = {**json_answer(ResponseAnswer), **error_responses(404)}
        router.post(path, summary="Answer a conversation made of items", **docs)(self.create)
        router.get(one, summary="A response that was kept", responses=found)(self.fetch)
        gone = {**json_answer(DeletedResponse), **error_responses(404)}
        router.delete(one, summary="Forget a response", responses=gone)(self.delete)
        router.post(f"{one}/cancel", summary="Stop a response that is being generated", responses=found)(self.cancel)

    async def create(self, request: Request) -> Response:
        body = await parse_body(request, ResponseBody)
        self._surface.check_model(body.model)
        body.check()
        before = self._before(body)
        own = input_items(body.input)
        grammar = body.grammar()
        turn = await self._turn(request, body, grammar, before + own, len(own))
        identity = f"resp_{uuid.uuid4().hex}"
        names = {**NAMES, **(GRAMMARS if turn.grammar is grammar else TOOL_GRAMMARS)}
        answers = await self._surface.submit(request, [_engine_request(body, turn, identity)], names)
        run = self._running[identity] = Run(self._surface, identity, body, turn, answers)

        async def close() -> None:
            self._running.pop(identity, None)
            await answers.aclose()
            if body.store and run.over:
                self._store.put(run.response, before, own + run.items)

        if body.stream:
            return AnswerStream(answers, run, close=close, error=run.failed, done=b"")
        try:
            done = await self._surface.collect(request, answers, names)
            return await built_response(lambda: run.collect(done[0]), large=are_large(done))
        finally:
            await close()

    async def fetch(self, response_id: str) -> Response:
        return json_response(self._known(response_id))

    async def delete(self, response_id: str) -> Response:
        self._known(response_id)
        if response_id in self._running:
            raise InvalidRequest(
                f"the response {response_id[:64]!r} is being generated; cancel it first", param="response_id"
            )
        self._store.drop(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str) -> Response:
        response = self._known(response_id)
        if response_id not in self._running:
            raise InvalidRequest(
                f"the response {response_id[:64]!r} has ended ({response['status']})", param="response_id"
            )
        await self._surface.client.abort(response_id)
        return json_response({**response, "status": "cancelled"})

    def _known(self, response_id: str) -> dict[str, Any]:
        """A response that is under way or kept. Raises InvalidRequest (404) for any other."""
        if response_id in self._running:
            return self._running[response_id].response
        stored = self._store.get(response_id)
        if stored is None:
            raise InvalidRequest(
                f"there is no response {response_id[:64]!r}, or it is no longer kept",
                param="response_id",
                code="response_not_found",
                status=404,
            )
        return stored.response

    def _before(self, body: ResponseBody) -> Items:
        """The items of the conversation so far."""
        if not body.previous_response_id:
            return []
        stored = self._store.get(body.previous_response_id)
        if stored is None:
            raise InvalidRequest(
                f"previous_response_id: there is no response {body.previous_response_id[:64]!r} to follow on: it was "
                "not stored, or is no longer kept; send the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.items

    async def _turn(
        self, request: Request, body: ResponseBody, grammar: Grammar | None, items: Items, given: int
    ) -> Turn:
        return await take_turn(
            self._surface.ctx,
            request,
            messages_of(items, body.instructions, given=given),
            tools=Tools.of_responses(body.tools, body.tool_choice, body.parallel_tool_calls),
            grammar=grammar,
            skip_special=body.skip_special_tokens,
            kwargs=body.chat_template_kwargs,
            hints=effort_hints(body.reasoning.effort),
        )


def _engine_request(body: ResponseBody, turn: Turn, identity: str) -> GenerateRequest:
    return GenerateRequest(
        prompt=turn.prompt,
        sampling=body.sampling_params(
            max_new_tokens=body.max_output_tokens,
            min_new_tokens=0,
            grammar=turn.grammar,
            skip_special_tokens=turn.skip_special_tokens,
        ),
        rid=identity,
        stream=body.stream,
        priority=body.priority,
        cache_salt=salt_of(body.cache_salt, body.extra_key),
        logprobs=body.logprobs,
        add_special_tokens=False,
        params=body.params,
    )
