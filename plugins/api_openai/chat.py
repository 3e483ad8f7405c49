"""/v1/chat/completions: conversations."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.api_openai.chat_answers import ChatCompletion, ChatWriter
from pegboard.plugins.api_openai.chat_body import ChatBody, MediaChatBody
from pegboard.plugins.api_openai.contents import CHAT_PARTS, Contents
from pegboard.plugins.api_openai.messages import template_messages
from pegboard.plugins.api_openai.surface import Prompt, Surface, documented, grammar_names, new_id
from pegboard.plugins.api_openai.tools import chat_tools
from pegboard.toolkit.chat.thinking import budget_params
from pegboard.toolkit.chat.turn import Turn, take_turn
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.openapi import error_responses
from pegboard.toolkit.http.request_fields import with_declared
from pegboard.toolkit.media.service import reader_of


class Chat:
    """The route."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        body = ChatBody if reader_of(surface.client) is None else MediaChatBody
        self.body: type[ChatBody] = with_declared(body, surface.ctx.body_fields)
        """What requests are read as."""

    def add_to(self, router: APIRouter) -> None:
        if not self._surface.client.tokenizer.has_chat_template:
            summary = "Answer a conversation: this model has no chat template"
            router.post("/v1/chat/completions", summary=summary, responses=error_responses(404))(self.create)
            return
        example = {
            "model": self._surface.model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 32,
            "temperature": 0,
        }
        docs = documented(
            self.body, ChatCompletion, example, 409, 504, events="Chunks of a chat completion, then [DONE]."
        )
        router.post("/v1/chat/completions", summary="Answer a conversation", **docs)(self.create)

    async def create(self, request: Request) -> Response:
        body, turn, grammar = await self.read(request)
        rid = new_id("chatcmpl", body.rid)
        prompts: list[Prompt] = [turn.prompt]
        ids = None
        if body.return_token_ids:
            # Each choice of a stream begins with them.
            copies, special = body.n if body.stream else 1, body.add_special_tokens
            ids = await self._surface.token_ids(request, prompts, copies, add_special_tokens=special)
            prompts = [*ids]
        requests = body.engine_requests(
            prompts,
            rid=rid,
            max_new_tokens=body.limit,
            add_special_tokens=body.add_special_tokens,
            params=self._budget(body, turn),
            grammar=turn.grammar,
            skip_special_tokens=turn.skip_special_tokens,
        )
        grammars = grammar_names(grammar, turn.grammar, body.grammar_names)
        names = {**body.names, **body.grammar_names, **grammars}
        return await ChatWriter(self._surface, rid, body, turn, ids).respond(request, requests, names)

    def _budget(self, body: ChatBody, turn: Turn) -> dict[str, object]:
        """Return what the engine is told of how much the model may think."""
        ctx, asked, switch = self._surface.ctx, body.thinking_token_budget, body.thinking
        if asked is None and switch is not None and switch.type == "enabled":
            return budget_params(ctx, turn, switch.budget_tokens, "thinking.budget_tokens", wish=True)
        return budget_params(ctx, turn, asked, "thinking_token_budget")

    async def read(self, request: Request) -> tuple[ChatBody, Turn, Grammar | None]:
        """Return a request's body, what is to be answered, and the grammar that the body itself has."""
        body = await parse_body(request, self.body)
        surface = self._surface
        surface.check_model(body.model)
        body.check()
        body.check_constraints(surface.client.info)
        grammar = body.grammar()
        contents = Contents(CHAT_PARTS, reader_of(surface.client), body.media_settings)
        turn = await take_turn(
            surface.ctx,
            request,
            template_messages(body.messages, surface.client.tokenizer.chat_templates.values(), contents),
            tools=chat_tools(body.tools, body.tool_choice, body.parallel_tool_calls),
            grammar=grammar,
            separate_reasoning=body.separate_reasoning,
            skip_special=body.skip_special_tokens,
            kwargs=body.chat_template_kwargs,
            hints=body.template_hints(),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        # The body stays until the answer has ended, and pictures are large.
        body.messages.clear()
        return body, turn, grammar
