"""What all routes share: the engine, the model's name, and the way of requests in and of errors out."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar, GrammarKind
from pegboard.plugins.sessions_in_memory.api import turn
from pegboard.toolkit.http.events import until_disconnect
from pegboard.toolkit.http.generation import Answer, Answers, check_model
from pegboard.toolkit.http.levels import LARGE
from pegboard.toolkit.http.openapi import body_docs, error_responses, json_answer
from pegboard.toolkit.media.inputs import MediaPrompt
from pegboard.toolkit.text.token_text import TokenTexts

if TYPE_CHECKING:
    from fastapi import Request
    from pydantic import BaseModel

    from pegboard.core.interfaces.api_router import ApiContext
    from pegboard.core.interfaces.client import Embedding, EmbedRequest, GenerateRequest
    from pegboard.plugins.sessions_in_memory.api import SessionParams

Names = Mapping[str, str]
"""What fields of the engine are called in a body, where that differs."""

Prompt = str | list[int] | MediaPrompt

ID_BYTES = 8
"""One token id of an answer."""


class Surface:
    """The engine behind the routes of one server."""

    def __init__(self, ctx: ApiContext) -> None:
        self.ctx = ctx
        self.client = ctx.client
        self.texts = TokenTexts(ctx.client.tokenizer)

    @property
    def model(self) -> str:
        """The name of the model, as answers have it."""
        return self.client.info.served_name

    def check_model(self, model: str) -> None:
        """Raise InvalidRequest (404) for a model that this server does not have."""
        check_model(self.client.info, model)

    async def token_ids(
        self, request: Request, prompts: Sequence[Prompt], copies: int, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Return prompts as tokens, to be sent to the engine and to the client, who gets each so many times. Raises
        InvalidRequest for one with media.
        """
        for one in prompts:
            refuse_media(one, "return_token_ids")
        texts = [one for one in prompts if isinstance(one, str)]
        tokenize = self.client.tokenize(texts, add_special_tokens=add_special_tokens)
        made = iter(await until_disconnect(request, tokenize))
        found: list[list[int]] = []
        for one in prompts:
            if isinstance(one, str):
                found.append(next(made))
            else:
                found.append([*await self.client.token_ids(one, add_special_tokens=add_special_tokens)])
        self.client.charge(copies * sum(map(len, found)) * ID_BYTES)
        return found

    async def submit(
        self,
        request: Request,
        requests: Sequence[GenerateRequest],
        names: Names,
        session: SessionParams | None = None,
    ) -> Answers:
        """Submit requests that belong together, or one turn of a session; what is refused is said in the body's words
        (`names`).
        """
        submit = Answers.submit(self.client, requests, turn(self.ctx, session))
        try:
            return await until_disconnect(request, submit)
        except InvalidRequest as error:
            raise error.called(names) from None

    async def collect(self, request: Request, answers: Answers, names: Names) -> list[Answer]:
        """Whole answers; what the engine refuses on the way is said in the body's words too."""
        try:
            return await until_disconnect(request, answers.collect())
        except InvalidRequest as error:
            raise error.called(names) from None

    async def embed(self, request: Request, requests: Sequence[EmbedRequest], names: Names) -> list[Embedding]:
        """Embeddings of prompts, in order."""
        try:
            return await until_disconnect(request, self.client.embed(requests))
        except InvalidRequest as error:
            raise error.called(names) from None


def new_id(prefix: str, rid: str = "") -> str:
    """Return an answer's id, which aborts the request: the caller's own, or a new one."""
    return rid or f"{prefix}-{uuid.uuid4().hex}"


def refuse_media(prompt: Prompt, param: str) -> None:
    """Raise InvalidRequest, naming what asks for its tokens, for a prompt with media: they would be sent to the engine
    without these.
    """
    if isinstance(prompt, MediaPrompt) and prompt.media:
        raise InvalidRequest(
            f"{param}: the messages have pictures or videos, and the tokens of such a prompt are not told here; "
            "/v1/tokenize tells them",
            param=param,
            code="unsupported",
        )


def documented(
    body: type[BaseModel], answer: type[BaseModel], example: Mapping[str, Any], *errors: int, events: str = ""
) -> dict[str, Any]:
    """Return arguments of a route that takes prompts, which say what it takes and what it answers; `events` describes
    its stream, if it has one.
    """
    responses = {**json_answer(answer, events=events), **error_responses(404, 429, *errors)}
    return {"openapi_extra": body_docs(body, example), "responses": responses, "dependencies": [LARGE]}


def grammar_names(own: Grammar | None, used: Grammar | None, names: Mapping[str, str]) -> Names:
    """Return what the kinds of the grammar that is `used` are called in a body that asks for `own`, whose kinds have
    these `names`. One that is not the request's own comes from its tools, or from both.
    """
    if own is used:
        return names
    found: dict[str, str] = dict.fromkeys(get_args(GrammarKind), "tools")
    if own is not None and used is not None and used.kind == "any_of":
        found[own.kind] = names.get(own.kind, own.kind)
    return found
