"""The OpenAI-compatible routes, each in a file of its own."""

from __future__ import annotations

from fastapi import APIRouter

from pegboard.core.interfaces.api_router import ApiRouter
from pegboard.plugins.api_openai.chat import Chat
from pegboard.plugins.api_openai.chat_body import MediaChatBody
from pegboard.plugins.api_openai.completions import CompletionBody, Completions
from pegboard.plugins.api_openai.embeddings import Embeddings
from pegboard.plugins.api_openai.invocations import Invocations
from pegboard.plugins.api_openai.models import Models
from pegboard.plugins.api_openai.options import OpenAIOptions
from pegboard.plugins.api_openai.pooling import Pooling
from pegboard.plugins.api_openai.render import Render
from pegboard.plugins.api_openai.responses.body import MediaResponseBody
from pegboard.plugins.api_openai.responses.routes import Responses
from pegboard.plugins.api_openai.scoring import Scoring
from pegboard.plugins.api_openai.surface import Surface
from pegboard.plugins.api_openai.tokenizer_info import TokenizerInfo
from pegboard.plugins.api_openai.tokens import Tokens
from pegboard.toolkit.http.levels import USER
from pegboard.toolkit.http.routing import api_router


class OpenAIRouter(ApiRouter[OpenAIOptions]):
    """/v1/chat/completions, /v1/completions, /v1/responses, whole and streamed; embeddings, scores, tokens, models."""

    @classmethod
    def own_fields(cls) -> frozenset[str]:
        bodies = (MediaChatBody, CompletionBody, MediaResponseBody)
        return frozenset().union(*(body.model_fields for body in bodies))

    def routes(self) -> APIRouter:
        router = api_router(tags=["openai"], dependencies=[USER])
        surface = Surface(self.ctx)
        chat, completions = Chat(surface), Completions(surface)
        # The first route with an example is what a new server suggests to try.
        first = (chat, completions) if self.client.tokenizer.has_chat_template else (completions, chat)
        embeddings, scoring = Embeddings(surface), Scoring(surface)
        invocations = Invocations(
            {
                "messages": chat.create,
                "prompt": completions.create,
                "documents": scoring.rerank,
                "input": embeddings.create,
                "text_1": scoring.score,
                "items": scoring.score,
            },
            {"model": surface.model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        )
        pooled = (embeddings, Pooling(surface), scoring)
        told = (Tokens(surface), TokenizerInfo(surface), Models(surface))
        for part in (*first, Responses(surface, self.options), Render(surface, chat), *pooled, *told, invocations):
            part.add_to(router)
        return router
