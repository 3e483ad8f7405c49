"""/v1/tokenize and /v1/detokenize: what the engine reads where people read text."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.contents import CHAT_PARTS, Contents
from pegboard.plugins.api_openai.messages import template_messages
from pegboard.plugins.api_openai.surface import ID_BYTES, Surface, documented
from pegboard.plugins.api_openai.tools import chat_tools
from pegboard.toolkit.chat.rendering import render_chat
from pegboard.toolkit.http.answers import built_response
from pegboard.toolkit.http.bodies import RequestModel, parse_body
from pegboard.toolkit.http.events import until_disconnect
from pegboard.toolkit.http.generation import MAX_REQUESTS
from pegboard.toolkit.http.media_fields import common_settings
from pegboard.toolkit.media.inputs import MediaSettings
from pegboard.toolkit.media.service import reader_of
from pegboard.toolkit.parsing.output_parser import tool_parser_of

T = TypeVar("T")
Ids = Sequence[Sequence[int]]

LONG = 16 * 1024
"""Tokens from which on the work is done in a thread."""
STRING_BYTES = 32
"""One token's text of an answer, where equal ones are one object."""
LETTER_BYTES = 8
"""One letter of a token in an answer that has the text twice."""


class TokenizeBody(RequestModel):
    """Body of `/v1/tokenize`: a text, several, or a conversation."""

    model: str = ""
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Whether the model's own tokens go around the text; by default around a prompt only, since a conversation has
    them."""
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []

    @property
    def media_settings(self) -> MediaSettings:
        """What holds for all media of the messages. Raises InvalidRequest for what is wrong."""
        return MediaSettings()


class MediaTokenizeBody(TokenizeBody):
    """Body of `/v1/tokenize` for a model that takes pictures or video."""

    mm_processor_kwargs: object = None
    """As of chats."""

    @property
    def media_settings(self) -> MediaSettings:
        return common_settings(self.mm_processor_kwargs)


class DetokenizeBody(RequestModel):
    """Body of `/v1/detokenize`: the tokens of a text, or of several."""

    model: str = ""
    tokens: list[int] | list[list[int]]
    skip_special_tokens: bool = True


class Tokens:
    """The routes."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._body = TokenizeBody if reader_of(surface.client) is None else MediaTokenizeBody

    def add_to(self, router: APIRouter) -> None:
        model = self._surface.model
        tokenize = documented(self._body, Tokenized, {"model": model, "prompt": "The capital of France"})
        detokenize = documented(DetokenizeBody, Detokenized, {"model": model, "tokens": [65, 66, 67]})
        for prefix in ("/v1", ""):
            router.post(f"{prefix}/tokenize", summary="Text to tokens", **tokenize)(self.tokenize)
            router.post(f"{prefix}/detokenize", summary="Tokens to text", **detokenize)(self.detokenize)

    async def tokenize(self, request: Request) -> Response:
        body = await parse_body(request, self._body)
        self._surface.check_model(body.model)
        found = await self._ids(request, body)
        many, spell = isinstance(body.prompt, list), body.return_token_strs
        size = sum(map(len, found))
        self._surface.client.charge(size * (ID_BYTES + STRING_BYTES * spell))

        def answer() -> dict[str, Any]:
            spelled = self._spelled(found) if spell else None
            return {
                "tokens": found if many else found[0],
                "count": [len(ids) for ids in found] if many else len(found[0]),
                "max_model_len": self._surface.client.info.max_context_len,
                "token_strs": spelled if many or spelled is None else spelled[0],
            }

        return await built_response(answer, large=size > LONG)

    async def detokenize(self, request: Request) -> Response:
        body = await parse_body(request, DetokenizeBody)
        self._surface.check_model(body.model)
        given: Any = body.tokens
        many = bool(given) and isinstance(given[0], list)
        lists: list[list[int]] = given if many else [given]
        self._check_sizes(lists)
        long = sum(map(len, lists)) > LONG
        letters = await _maybe_threaded(long, lambda: self._letters(lists))
        self._surface.client.charge(letters * LETTER_BYTES)
        decode = self._surface.client.tokenizer.decode

        def answer() -> dict[str, Any]:
            texts = [decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in lists]
            text = texts if many else texts[0]
            # vLLM's name for it, and SGLang's.
            return {"prompt": text, "text": text}

        return await built_response(answer, large=long)

    def _check_sizes(self, lists: Ids) -> None:
        """Raise InvalidRequest for more lists, or longer ones, than a request could have as prompts."""
        if len(lists) > MAX_REQUESTS:
            raise InvalidRequest(f"tokens: at most {MAX_REQUESTS} lists, got {len(lists)}", param="tokens")
        most, longest = self._surface.client.info.max_context_len, max(map(len, lists))
        if longest > most:
            message = f"tokens: {longest} ids, but the context of this model has {most}; send them in parts"
            raise InvalidRequest(message, param="tokens", code="context_length_exceeded")

    def _letters(self, lists: Ids) -> int:
        """Return the most letters that the text of these ids has. Raises InvalidRequest for what is not an id."""
        size, spelling = self._surface.client.info.vocab_size, self._surface.client.tokenizer.id_to_token
        counts = Counter(chain.from_iterable(lists))
        for token in counts:
            if not 0 <= token < size:
                message = f"tokens: {token} is not a token id of this model (0 to {size - 1})"
                raise InvalidRequest(message, param="tokens")
        # Some decoders put a space before each.
        return sum(number * (1 + len(spelling(token) or "")) for token, number in counts.items())

    def _spelled(self, found: Ids) -> list[list[str]]:
        texts = {token: self._surface.texts.text(token) for token in set(chain.from_iterable(found))}
        return [[texts[token] for token in ids] for ids in found]

    async def _ids(self, request: Request, body: TokenizeBody) -> Ids:
        """Return the tokens of each text, or of the conversation. Raises InvalidRequest."""
        if (body.prompt is None) == (body.messages is None):
            what = "is needed" if body.prompt is None else "exclude each other"
            raise InvalidRequest(f"prompt or messages {what}", param="prompt")
        if isinstance(body.prompt, list) and not body.prompt:
            raise InvalidRequest("prompt is empty", param="prompt")
        client, special = self._surface.client, body.add_special_tokens
        if body.messages is None:
            texts = body.prompt if isinstance(body.prompt, list) else [str(body.prompt)]
            if len(texts) > MAX_REQUESTS:
                raise InvalidRequest(f"at most {MAX_REQUESTS} texts, got {len(texts)}", param="prompt")
            return await client.tokenize(texts, add_special_tokens=special is None or special)
        render = render_chat(
            client,
            template_messages(
                body.messages,
                client.tokenizer.chat_templates.values(),
                Contents(CHAT_PARTS, reader_of(client), body.media_settings),
            ),
            tools=chat_tools(body.tools),
            tool_parser=tool_parser_of(self._surface.ctx),
            kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
        )
        # From here on the prompt alone has the media.
        body.messages = []
        prompt = await until_disconnect(request, render)
        return [await until_disconnect(request, client.token_ids(prompt, add_special_tokens=bool(special)))]


async def _maybe_threaded(threaded: bool, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if threaded else work()


class Tokenized(BaseModel):
    """The answer of `/v1/tokenize`; lists of lists for several texts."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | list[list[str]] | None


class Detokenized(BaseModel):
    """The answer of `/v1/detokenize`: the text under two names."""

    prompt: str | list[str]
    text: str | list[str]
