"""/v1/chat/completions/render, as vLLM has it: what the engine would be asked for a conversation, without asking it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from pegboard.plugins.api_openai.chat import Chat
from pegboard.plugins.api_openai.surface import ID_BYTES, Surface, documented, new_id, refuse_media
from pegboard.plugins.api_openai.tokens import LONG
from pegboard.toolkit.http.answers import built_response
from pegboard.toolkit.http.openapi import error_responses

_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "seed",
    "min_tokens",
)
"""Fields of the body that are vLLM's sampling parameters too."""


class Rendered(BaseModel):
    """A conversation as the engine reads it. `sampling_params` has vLLM's names; `max_tokens` is null until the context
    is full.
    """

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool
    cache_salt: str | None
    priority: int


class Render:
    """The route, beside that of chats."""

    def __init__(self, surface: Surface, chat: Chat) -> None:
        self._surface = surface
        self._chat = chat

    def add_to(self, router: APIRouter) -> None:
        path = "/v1/chat/completions/render"
        if not self._surface.client.tokenizer.has_chat_template:
            summary = "The prompt of a conversation: this model has no chat template"
            router.post(path, summary=summary, responses=error_responses(404))(self.create)
            return
        example = {"model": self._surface.model, "messages": [{"role": "user", "content": "Hello!"}]}
        docs = documented(self._chat.body, Rendered, example)
        router.post(path, summary="The prompt and token ids of a conversation", **docs)(self.create)

    async def create(self, request: Request) -> Response:
        body, turn, _ = await self._chat.read(request)
        client = self._surface.client
        refuse_media(turn.prompt, "messages")
        ids = await client.token_ids(turn.prompt, add_special_tokens=body.add_special_tokens)
        client.charge(len(ids) * ID_BYTES)
        # A template decides whether special tokens are text of the answer.
        defaults = client.info.sampling_defaults
        sampling = {name: body.in_force(name, defaults) for name in _SAME}
        limit = defaults.get("max_new_tokens") if body.limit is None else body.limit
        sampling |= {"max_tokens": limit, "skip_special_tokens": turn.skip_special_tokens}
        answer = {
            "request_id": new_id("chatcmpl", body.rid),
            "model": self._surface.model,
            "prompt": turn.text,
            "token_ids": ids,
            "sampling_params": sampling,
            "stream": body.stream,
            "cache_salt": body.cache_salt or None,
            "priority": body.priority,
        }
        return await built_response(lambda: answer, large=len(ids) > LONG)
