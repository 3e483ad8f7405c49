"""/parse_function_call and /separate_reasoning: the server's output parsers for text that comes from elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_native.bodies import Described, answers, takes
from pegboard.plugins.api_native.tools import called_tools
from pegboard.toolkit.chat.tool_calls import ChatAnswer, ChatStream
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import RequestModel, parse_body
from pegboard.toolkit.parsing.output_parser import OutputParser, reasoning_parser_of, tool_parser_of

_LONG = 4096
"""Characters from which on a text is parsed in a thread."""

_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class FunctionCallBody(RequestModel):
    """Body of `/parse_function_call`."""

    text: str
    """A model's answer."""
    tools: list[dict[str, Any]]
    """The functions that it may call, as in OpenAI's chat completions."""
    tool_call_parser: str = ""
    """The parser's name, which must be that of the server."""


class Call(Described):
    """One call."""

    tool_index: int
    """Its place among the calls."""
    name: str
    parameters: str
    """Its arguments: a JSON object as text."""


class FunctionCalls(Described):
    """What was found."""

    normal_text: str
    """The text without the calls."""
    calls: list[Call]


class ReasoningBody(RequestModel):
    """Body of `/separate_reasoning`."""

    text: str
    """A model's answer."""
    reasoning_parser: str = ""
    """The parser's name, which must be that of the server."""


class Separated(Described):
    """What was found."""

    reasoning_text: str
    text: str


class Parsing:
    """The routes."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def add_to(self, router: APIRouter) -> None:
        example = {"text": "It is warm.", "tools": [_TOOL]}
        docs = {**takes(FunctionCallBody, example), **answers(FunctionCalls)}
        router.post("/parse_function_call", summary="Tool calls in a text", **docs)(self.function_call)
        docs = {**takes(ReasoningBody, {"text": "Paris."}), **answers(Separated)}
        router.post("/separate_reasoning", summary="A text without its thinking", **docs)(self.reasoning)

    async def function_call(self, request: Request) -> Response:
        body = await parse_body(request, FunctionCallBody)
        self._check_name("tool_parser", "tool_call_parser", body.tool_call_parser)
        tools = called_tools(body.tools)
        if not tools.active:
            raise InvalidRequest("tools is empty", param="tools")
        found = await _parse(body.text, ChatStream(tools=tools, tool_parser=tool_parser_of(self._ctx)))
        calls = [
            {"tool_index": index, "name": call.name, "parameters": call.arguments}
            for index, call in enumerate(found.calls)
        ]
        return json_response({"normal_text": found.content, "calls": calls})

    async def reasoning(self, request: Request) -> Response:
        body = await parse_body(request, ReasoningBody)
        self._check_name("reasoning_parser", "reasoning_parser", body.reasoning_parser)
        parser = reasoning_parser_of(self._ctx)
        found = await _parse(body.text, ChatStream(reasoning_parser=parser, prompt=_opening(parser, body.text)))
        return json_response({"reasoning_text": found.reasoning, "text": found.content})

    def _check_name(self, contract: str, field: str, name: str) -> None:
        """Raise InvalidRequest for another parser than the one that this server has chosen."""
        chosen = self._ctx.providers.get(contract) or ()
        if name and name not in chosen:
            has = f"has {', '.join(map(repr, chosen))}" if chosen else "has none by name"
            raise InvalidRequest(f"{field}: this server {has}, not {name[:64]!r}", param=field)


def _opening(parser: OutputParser | None, text: str) -> str:
    """Return the marker with which the prompt of `text` has begun a thought: where one ends in the text and none begins
    before that; "" for none. Where several thoughts may come, each says in the text itself that it is one.
    """
    form = parser.thought_form() if parser is not None else None
    if form is None or form.answer:
        return ""
    thought, end, _ = text.partition(form.closes[0])
    return form.begin if end and form.begin not in thought else ""


async def _parse(text: str, stream: ChatStream) -> ChatAnswer:
    return await asyncio.to_thread(stream.collect, text) if len(text) > _LONG else stream.collect(text)
