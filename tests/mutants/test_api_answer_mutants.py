"""Routers with the mistakes that authors make in answers, each caught by its test, which names the mistake."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from time import sleep
from typing import Any

import msgspec
import pytest
from fastapi import Request, Response

from pegboard.conformance import asgi
from pegboard.conformance.api_router import ApiRouterContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.chat_template import ChatTemplate
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.events import EventStream, event
from pegboard.toolkit.http.generation import Answers
from pegboard.toolkit.http.line_stream import LineStream, line
from pegboard.toolkit.media.inputs import MediaPrompt
from tests.mutants.small_api import SmallApi, SmallChat, SmallLines, TextBody


class KeepsTheAnswer(SmallApi):
    """In the router, which all requests share."""

    async def answer(self, request: Request, body: TextBody) -> Response:
        answers = await Answers.submit(self.client, [body.request()])
        if body.stream:
            return self.streamed(answers)
        self.text_so_far = ""
        async for _, chunk in answers.chunks():
            self.text_so_far += chunk.text
        return json_response({"text": self.text_so_far})


class KeepsThePiece(SmallLines):
    """In the router, until it is sent."""

    def streamed(self, answers: Answers) -> Response:
        async def lines() -> AsyncGenerator[bytes, None]:
            async for _, chunk in answers.chunks():
                self.piece = chunk.text
                await asyncio.sleep(0)
                yield line({"piece": self.piece})

        return LineStream(lines(), close=answers.aclose)


def _streams(base: type[SmallApi], name: str, pieces: Callable[[Answers], Any], form: Any = None) -> type[SmallApi]:
    """A router that streams what `pieces` makes of answers."""

    class Router(base):  # type: ignore[misc, valid-type]
        def streamed(self, answers: Answers) -> Response:
            if base is SmallLines:
                return LineStream(frames(answers), close=answers.aclose)
            return EventStream(frames(answers), close=answers.aclose)

    write = form or (line if base is SmallLines else event)

    async def frames(answers: Answers) -> AsyncGenerator[bytes, None]:
        async for text in pieces(answers):
            yield write({"text": text})

    Router.__name__ = name
    return Router


async def _twice(answers: Answers) -> AsyncGenerator[str, None]:
    """A piece again when the next one comes."""
    last = ""
    async for _, chunk in answers.chunks():
        yield last + chunk.text
        last = chunk.text


async def _without_the_last(answers: Answers) -> AsyncGenerator[str, None]:
    async for _, chunk in answers.chunks():
        if chunk.finish_reason is None:
            yield chunk.text


async def _until_nothing(answers: Answers) -> AsyncGenerator[str, None]:
    """Takes a chunk without text for the end."""
    ended = False
    async for _, chunk in answers.chunks():
        ended = ended or not chunk.text
        if not ended:
            yield chunk.text


async def _without_repeats(answers: Answers) -> AsyncGenerator[str, None]:
    last = ""
    async for _, chunk in answers.chunks():
        if chunk.text != last:
            yield chunk.text
        last = chunk.text


async def _cut_at_lines(answers: Answers) -> AsyncGenerator[str, None]:
    """As if every line break were a line feed."""
    async for _, chunk in answers.chunks():
        yield "\n".join(chunk.text.splitlines())


async def _all_at_once(answers: Answers) -> AsyncGenerator[str, None]:
    for text in [chunk.text async for _, chunk in answers.chunks()]:
        yield text


async def _as_they_come(answers: Answers) -> AsyncGenerator[str, None]:
    async for _, chunk in answers.chunks():
        yield chunk.text


def _by_hand(head: str, tail: str) -> Callable[[dict[str, str]], bytes]:
    return lambda data: f'{head}{{"text": "{data["text"]}"}}{tail}'.encode()


class WritesWholeAnswersByHand(SmallApi):
    async def answer(self, request: Request, body: TextBody) -> Response:
        if body.stream:
            return await super().answer(request, body)
        [answer] = await (await Answers.submit(self.client, [body.request()])).collect()
        return Response(f'{{"text": "{answer.text}"}}', media_type="application/json")


class WritesErrorsByHand(SmallLines):
    def streamed(self, answers: Answers) -> Response:
        async def lines() -> AsyncGenerator[bytes, None]:
            async for _, chunk in answers.chunks():
                yield line({"piece": chunk.text})

        return LineStream(
            lines(), close=answers.aclose, error=lambda error: f'{{"error": "{error.message}"}}\n'.encode()
        )


class _Asks(SmallApi):
    """Asks the engine for something else than the body says."""

    def change(self, request: GenerateRequest) -> GenerateRequest:
        raise NotImplementedError

    async def answer(self, request: Request, body: TextBody) -> Response:
        changed = self.change(body.request())

        class Body(TextBody):
            def request(self) -> GenerateRequest:
                return changed

        return await super().answer(request, Body(**body.model_dump()))


def _drops(name: str, value: Any, *, streams_only: bool = False) -> type[SmallApi]:
    class Router(_Asks):
        async def answer(self, request: Request, body: TextBody) -> Response:
            if streams_only and not body.stream:
                return await SmallApi.answer(self, request, body)
            return await super().answer(request, body)

        def change(self, request: GenerateRequest) -> GenerateRequest:
            sampling = msgspec.structs.replace(request.sampling, **{name: value})
            return msgspec.structs.replace(request, sampling=sampling)

    Router.__name__ = f"Drops_{name}"
    return Router


class _Busy(SmallApi):
    def block(self, body: TextBody) -> None:
        raise NotImplementedError

    async def answer(self, request: Request, body: TextBody) -> Response:
        self.block(body)
        return await super().answer(request, body)


class SleepsOnTheLoop(_Busy):
    def block(self, body: TextBody) -> None:
        sleep(0.001)


class TokenizesOnTheLoop(_Busy):
    def block(self, body: TextBody) -> None:
        self.client.tokenizer.encode(body.text)


class RendersOnTheLoop(_Busy):
    def block(self, body: TextBody) -> None:
        self.client.tokenizer.apply_chat_template([{"role": "user", "content": body.text}])


class ConnectsOnTheLoop(_Busy):
    def block(self, body: TextBody) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 1).close()


class CompilesTemplatesOnTheLoop(_Busy):
    def block(self, body: TextBody) -> None:
        ChatTemplate(self.client.tokenizer.chat_templates["default"])


class TakesTheTextAlone(SmallChat):
    """As if a prompt with media were the text that the template made."""

    async def prompt(self, text: str) -> str | MediaPrompt:
        found = await super().prompt(text)
        return str(found.base) if isinstance(found, MediaPrompt) else found


class RendersByItself(SmallChat):
    async def prompt(self, text: str) -> str | MediaPrompt:
        template = ChatTemplate(self.client.tokenizer.chat_templates["default"])
        chat = [{"role": "user", "content": text}]
        return await asyncio.to_thread(template.render, chat, add_generation_prompt=True)


class KnowsOnlyTexts(SmallChat):
    """Measures what it takes for a text."""

    async def prompt(self, text: str) -> str | MediaPrompt:
        found: Any = await super().prompt(text)
        if len(found) > 10**6:
            raise InvalidRequest("this is too long", param="text")
        return str(found)


class ServesTextModels(SmallApi):
    async def answer(self, request: Request, body: TextBody) -> Response:
        if any(one.startswith("media.") for one in self.client.info.features):
            raise InvalidRequest("this model is for pictures")
        return await super().answer(request, body)


def _mutant(factory: type[Any], caught_by: str, says: str) -> Mutant:
    base = next(one for one in (SmallLines, SmallChat, SmallApi) if issubclass(factory, one))
    return Mutant(factory, suite=ApiRouterContract, caught_by=caught_by, base=base, says=says)


HOLDS, MIXED, LOOP = "test_stream_holds_the_text", "test_answers_are_not_mixed_up", "test_nothing_blocks_the_loop"
ARRIVES = "test_sampling_parameters_reach_the_engine"
BY_HAND = "put together by hand"
SPELLED = "test_spelled_tokens_stay_text"

MUTANTS = [
    _mutant(KeepsTheAnswer, MIXED, "mixed up"),
    _mutant(KeepsThePiece, MIXED, "mixed up"),
    _mutant(_streams(SmallApi, "RepeatsPieces", _twice), HOLDS, "a piece comes twice"),
    _mutant(_streams(SmallLines, "LosesTheLastChunk", _without_the_last), HOLDS, "the last chunk's text is lost"),
    _mutant(_streams(SmallApi, "StopsAtAnEmptyChunk", _until_nothing), HOLDS, "lost"),
    _mutant(_streams(SmallLines, "SkipsRepeats", _without_repeats), HOLDS, "a piece is lost, one that is equal"),
    _mutant(_streams(SmallApi, "CutsAtLines", _cut_at_lines), HOLDS, "characters are changed at"),
    _mutant(_streams(SmallApi, "EventsByHand", _as_they_come, _by_hand("data: ", "\n\n")), HOLDS, BY_HAND),
    _mutant(_streams(SmallLines, "LinesByHand", _as_they_come, _by_hand("", "\n")), HOLDS, BY_HAND),
    _mutant(WritesWholeAnswersByHand, "test_answer_holds_the_text", BY_HAND),
    _mutant(WritesErrorsByHand, "test_failure_ends_a_stream_cleanly", BY_HAND),
    _mutant(_streams(SmallLines, "SendsAllAtOnce", _all_at_once), "test_pieces_are_sent_as_they_come", "held back"),
    _mutant(_drops("temperature", 1.0), ARRIVES, "temperature = 0.25 became temperature = 1.0"),
    _mutant(_drops("max_new_tokens", 128, streams_only=True), ARRIVES, "max_tokens = 11 became max_new_tokens = 128"),
    _mutant(_drops("unset", ()), "test_what_a_request_leaves_out_is_left_to_the_model", "are not in the body, and yet"),
    _mutant(_drops("stop", ()), ARRIVES, "stop = 'END7' became stop = ()"),
    _mutant(SleepsOnTheLoop, LOOP, "await asyncio.sleep"),
    _mutant(ConnectsOnTheLoop, LOOP, "a connection"),
    _mutant(TokenizesOnTheLoop, LOOP, "self.client.tokenize"),
    _mutant(RendersOnTheLoop, "test_templates_do_not_block_the_loop", "render_chat"),
    _mutant(CompilesTemplatesOnTheLoop, LOOP, "render_chat"),
    _mutant(TakesTheTextAlone, SPELLED, "submit what `render_chat` returns as it is"),
    _mutant(RendersByItself, SPELLED, "as the token that it spells"),
    _mutant(KnowsOnlyTexts, SPELLED, "`render_chat` may return a MediaPrompt"),
    _mutant(ServesTextModels, "test_models_with_media_are_served", "a model that takes media gets 400"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some never answer, and a test gives up on them.
    monkeypatch.setattr(asgi, "PATIENCE", 4.0)
    assert_caught(mutant)
