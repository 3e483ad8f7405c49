"""The routes of responses: create, fetch, tell again, delete, cancel; their input; counting tokens."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response
from starlette.convertors import StringConvertor, register_url_convertor

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.api_openai.contents import RESPONSE_PARTS, Contents
from pegboard.plugins.api_openai.options import OpenAIOptions
from pegboard.plugins.api_openai.responses.body import (
    GRAMMARS,
    NAMES,
    CountBody,
    MediaCountBody,
    MediaResponseBody,
    ResponseBody,
)
from pegboard.plugins.api_openai.responses.custom import as_choice, as_functions
from pegboard.plugins.api_openai.responses.items import input_items, messages_of
from pegboard.plugins.api_openai.responses.references import listed, resolved
from pegboard.plugins.api_openai.responses.replay import frames, replay
from pegboard.plugins.api_openai.responses.run import Run
from pegboard.plugins.api_openai.responses.shapes import DeletedResponse, InputItems, InputTokens, ResponseAnswer
from pegboard.plugins.api_openai.responses.store import Item, ResponseStore, Shelf, Stored
from pegboard.plugins.api_openai.surface import Surface, documented, grammar_names
from pegboard.plugins.api_openai.tools import response_tools
from pegboard.toolkit.chat.thinking import budget_params, effort_hints
from pegboard.toolkit.chat.turn import Turn, take_turn
from pegboard.toolkit.http.answer_stream import AnswerStream
from pegboard.toolkit.http.answers import built_response, json_response
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.events import EventStream, until_disconnect
from pegboard.toolkit.http.generation import are_large
from pegboard.toolkit.http.levels import principal_of
from pegboard.toolkit.http.openapi import error_responses, json_answer
from pegboard.toolkit.http.request_fields import with_declared
from pegboard.toolkit.media.service import reader_of

Items = list[Item]


class _ResponseId(StringConvertor):
    """The place of a response's id in a path, which is not where the routes beside them are."""

    regex = "(?!(?:input_tokens|compact)(?:/|$))[^/]+"


register_url_convertor("response_id", _ResponseId())


class Responses:
    """The routes, and the responses that are kept or under way."""

    def __init__(self, surface: Surface, options: OpenAIOptions) -> None:
        self._surface = surface
        self._store = ResponseStore(options.stored_responses, options.stored_bytes)
        self._running: dict[str, Run] = {}
        media = reader_of(surface.client) is not None
        body = MediaResponseBody if media else ResponseBody
        self._body: type[ResponseBody] = with_declared(body, surface.ctx.body_fields)
        self._count_body: type[ResponseBody] = MediaCountBody if media else CountBody

    def add_to(self, router: APIRouter) -> None:
        path, one = "/v1/responses", "/v1/responses/{response_id:response_id}"
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
        docs = documented(self._body, ResponseAnswer, example, 504, events=events)
        found = {**json_answer(ResponseAnswer), **error_responses(404)}
        again = {**json_answer(ResponseAnswer, events=events), **error_responses(404)}
        router.post(path, summary="Answer a conversation made of items", **docs)(self.create)
        count = documented(self._count_body, InputTokens, {"model": self._surface.model, "input": example["input"]})
        router.post(f"{path}/input_tokens", summary="How many tokens an input has", **count)(self.count)
        router.post(f"{path}/compact", summary="Not supported", include_in_schema=False)(self.compact)
        router.get(one, summary="A response that was kept, or its events once more", responses=again)(self.fetch)
        listing = {**json_answer(InputItems), **error_responses(404)}
        router.get(f"{one}/input_items", summary="The input of a response", responses=listing)(self.input_items)
        gone = {**json_answer(DeletedResponse), **error_responses(404)}
        router.delete(one, summary="Forget a response", responses=gone)(self.delete)
        router.post(f"{one}/cancel", summary="Stop a response that is being generated", responses=found)(self.cancel)

    async def create(self, request: Request) -> Response:
        body = await parse_body(request, self._body)
        self._surface.check_model(body.model)
        body.check()
        owner = principal_of(request)
        shelf = self._store.of(owner)
        before, own = self._conversation(shelf, body)
        grammar = body.grammar()
        turn = await self._turn(request, body, grammar, before, own)
        identity = f"resp_{uuid.uuid4().hex}"
        names = {**NAMES, **grammar_names(grammar, turn.grammar, GRAMMARS)}
        answers = await self._surface.submit(request, [self._engine_request(body, turn, identity)], names)
        # The body stays until the answer has ended, and pictures are large. The items are still there, to be kept.
        body.input = ""
        if not body.store:
            own.clear()

        def over() -> None:
            if self._running.pop(identity, None) is not None and run.over and body.store:
                shelf.put(run.response, before, own, run.tape)

        async def close() -> None:
            over()
            run.leave()
            await answers.aclose()

        run = self._running[identity] = Run(self._surface, identity, body, turn, answers, over)
        run.owner = owner

        if body.stream:
            return AnswerStream(answers, run, close=close, error=run.failed, done=b"")
        try:
            done = await self._surface.collect(request, answers, names)
            return await built_response(lambda: run.collect(done[0]), large=are_large(done))
        finally:
            await close()

    async def count(self, request: Request) -> Response:
        body = await parse_body(request, self._count_body)
        self._surface.check_model(body.model)
        body.check()
        before, own = self._conversation(self._store.of(principal_of(request)), body)
        turn = await self._turn(request, body, body.grammar(), before, own)
        counting = self._surface.client.count_tokens(turn.prompt, add_special_tokens=False)
        count = await until_disconnect(request, counting)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def compact(self) -> Response:
        raise InvalidRequest(
            "this server compacts no conversations; send a shorter one, such as a summary that the model has written",
            code="unsupported",
            status=404,
        )

    async def fetch(
        self, request: Request, response_id: str, stream: bool = False, starting_after: int = -1
    ) -> Response:
        found = self._known(request, response_id)
        if not stream:
            return json_response(found.response)
        if isinstance(found, Run):
            return EventStream(frames(found.replay(), starting_after, found.news), close=_nothing, done=b"")
        events = replay(found.response, found.response["output"], found.tape, lambda: False)
        return EventStream(frames(events, starting_after, _nothing), close=_nothing, done=b"")

    async def input_items(
        self, request: Request, response_id: str, after: str = "", limit: int = 20, order: str = "desc"
    ) -> Response:
        found = self._known(request, response_id)
        if isinstance(found, Run):
            raise InvalidRequest(
                f"the response {response_id[:64]!r} is being generated; its input is listed when it has ended",
                param="response_id",
            )
        return json_response(listed(found.input, after=after, limit=limit, order=order))

    async def delete(self, request: Request, response_id: str) -> Response:
        found = self._known(request, response_id)
        if isinstance(found, Run):
            raise InvalidRequest(
                f"the response {response_id[:64]!r} is being generated; cancel it first", param="response_id"
            )
        self._store.of(principal_of(request)).drop(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request, response_id: str) -> Response:
        found = self._known(request, response_id)
        response = found.response
        if not isinstance(found, Run):
            raise InvalidRequest(
                f"the response {response_id[:64]!r} has ended ({response['status']})", param="response_id"
            )
        await self._surface.client.abort(response_id)
        return json_response({**response, "status": "cancelled"})

    def _known(self, request: Request, response_id: str) -> Run | Stored:
        """Return a response that is under way or kept, and the asker's own. Raises InvalidRequest (404) for any
        other.
        """
        owner = principal_of(request)
        run = self._running.get(response_id)
        if run is not None and run.owner == owner:
            return run
        stored = self._store.of(owner).get(response_id)
        if stored is None:
            raise InvalidRequest(
                f"there is no response {response_id[:64]!r}, or it is no longer kept",
                param="response_id",
                code="response_not_found",
                status=404,
            )
        return stored

    def _conversation(self, shelf: Shelf, body: ResponseBody) -> tuple[Items, Items]:
        """Return the items of the conversation so far, and those of the request."""
        before = self._before(shelf, body)
        most = self._surface.ctx.max_body_bytes
        return before, resolved(shelf, input_items(body.input), before, most)

    def _before(self, shelf: Shelf, body: ResponseBody) -> Items:
        if not body.previous_response_id:
            return []
        stored = shelf.get(body.previous_response_id)
        if stored is None:
            raise InvalidRequest(
                f"previous_response_id: there is no response {body.previous_response_id[:64]!r} to follow on: it was "
                "not stored, or is no longer kept; send the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.items

    async def _turn(
        self, request: Request, body: ResponseBody, grammar: Grammar | None, before: Items, own: Items
    ) -> Turn:
        items = [one.value for one in (*before, *own)]
        contents = Contents(RESPONSE_PARTS, reader_of(self._surface.client), body.media_settings)
        functions, choice = as_functions(body.tools), as_choice(body.tool_choice)
        return await take_turn(
            self._surface.ctx,
            request,
            messages_of(items, body.instructions, contents, given=len(own)),
            tools=response_tools(functions, choice, body.parallel_tool_calls),
            grammar=grammar,
            skip_special=body.skip_special_tokens,
            kwargs=body.chat_template_kwargs,
            hints=effort_hints(body.reasoning.effort),
        )

    def _engine_request(self, body: ResponseBody, turn: Turn, identity: str) -> GenerateRequest:
        budget = budget_params(self._surface.ctx, turn, body.thinking_token_budget, "thinking_token_budget")
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
            cache_salt=body.salt,
            logprobs=body.logprobs,
            add_special_tokens=False,
            params={**body.params_of((1,))[0], **budget},
            model=body.model,
        )


async def _nothing() -> None:
    """Of a stream that is told again there is nothing to close, nor to wait for."""
