"""/tokenizer_info: what a client needs to know of the tokenizer that it has not got itself."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict

from pegboard.plugins.api_openai.surface import Surface
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.openapi import error_responses, json_answer

_ALWAYS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Clients ask for these whether the model has them or not."""


class TokenizerAnswer(BaseModel):
    """The tokenizer: its named tokens as text, and null for those of the usual ones that it has not. There may be more
    of them. `chat_template` is the source of the template that plain conversations take.
    """

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    eos_token_ids: list[int]
    chat_template: str | None
    vocab_size: int
    model_max_length: int


class TokenizerInfo:
    """The route."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    def add_to(self, router: APIRouter) -> None:
        answer = {**json_answer(TokenizerAnswer), **error_responses()}
        summary = "The tokenizer's special tokens and chat template"
        router.get("/tokenizer_info", summary=summary, responses=answer)(self.read)

    async def read(self) -> Response:
        info, tokenizer = self._surface.client.info, self._surface.client.tokenizer
        templates = tokenizer.chat_templates
        body: dict[str, Any] = {
            # vLLM has transformers' class here; what is read is what any fast tokenizer of its has.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict.fromkeys(_ALWAYS),
            **tokenizer.named_tokens,
            "eos_token_ids": sorted(tokenizer.eos_token_ids),
            "chat_template": templates.get("default") or next(iter(templates.values()), None),
            "vocab_size": info.vocab_size,
            "model_max_length": info.max_context_len,
        }
        return json_response(body)
