"""For chat APIs: a conversation's next turn: the prompt that asks for it, what the answer has to look like, and how to
read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.toolkit.chat.rendering import render_chat
from pegboard.core.toolkit.chat.tool_calls import ChatStream, Tools, skip_special_tokens
from pegboard.core.toolkit.http.events import until_disconnect

if TYPE_CHECKING:
    from fastapi import Request

    from pegboard.core.interfaces.api_router import ApiContext
    from pegboard.core.interfaces.grammar import Grammar
    from pegboard.core.interfaces.output_parser import OutputParser


@dataclass(frozen=True)
class Turn:
    """What the engine is asked, and how its answer is read. `prefill` is what the answer goes on from, if anything."""

    prompt: str
    prefill: str
    tools: Tools
    grammar: Grammar | None
    skip_special_tokens: bool
    tool_parser: OutputParser | None
    reasoning_parser: OutputParser | None
    constrained: bool
    openings: tuple[str, ...] = ()
    """How calls begin, where the answer is either calls or what the request's format says."""

    def stream(self, *, stream_reasoning: bool = True) -> ChatStream:
        """A reader of one answer."""
        return ChatStream(
            tools=self.tools,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            prompt=self.prompt,
            prefill=self.prefill,
            constrained=self.constrained,
            stream_reasoning=stream_reasoning,
            openings=self.openings,
        )


async def take_turn(
    ctx: ApiContext,
    request: Request,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Tools,
    grammar: Grammar | None,
    separate_reasoning: bool = True,
    skip_special: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    hints: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> Turn:
    """The turn after `messages`, which templates can read already. `grammar` is the request's own.

    With a format (JSON) and tools, an answer is either calls or of that format, where parser and engine can have it so
    (many functions may be more than the engine takes), and else always of that format; a call that is required goes
    before any format. With an expression or rules of its own an answer is what these say. Raises InvalidRequest where
    tools are there and nothing reads calls, and where a call is required beside an expression or rules.
    """
    if tools.active and ctx.tool_parser is None:
        raise InvalidRequest(
            "tools: no tool parser fits this model's chat template, so its calls cannot be read; set tool_parser.use "
            "in the server's config, or leave tools out",
            param="tools",
            code="unsupported",
        )
    if grammar is not None and tools.active and tools.choice == "required":
        if grammar.kind in ("regex", "ebnf"):
            raise InvalidRequest(
                f"tool_choice: a call is required, and {grammar.kind} says otherwise; leave one of them out",
                param="tool_choice",
            )
        grammar = None
    openings: tuple[str, ...] = ()
    if grammar is not None and grammar.kind in ("json_schema", "json_object") and tools.active:
        either = tools.grammar_or(grammar, ctx.tool_parser, features=ctx.client.info.features)
        if either is not None and _fits(either[0], ctx.client.info.max_grammar_bytes):
            grammar, openings = either
    # With a grammar of its own alone an answer is what that says, so there is nothing in it to be found.
    whole = grammar is not None and grammar.kind != "structural_tag"
    prompt = await until_disconnect(
        request,
        render_chat(
            ctx.client,
            messages,
            tools=tools,
            tool_parser=ctx.tool_parser,
            kwargs=kwargs,
            hints=hints,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
        ),
    )
    tool_parser = ctx.tool_parser if tools.active and (openings or not whole) else None
    reasoning_parser = ctx.reasoning_parser if separate_reasoning else None
    if grammar is None:
        grammar = tools.grammar(ctx.tool_parser, features=ctx.client.info.features)
    return Turn(
        prompt=prompt,
        prefill=str(messages[-1]["content"]) if continue_final_message else "",
        tools=tools,
        grammar=grammar,
        skip_special_tokens=skip_special and skip_special_tokens(tools, tool_parser, reasoning_parser),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        constrained=whole or (tools.active and tools.choice == "required"),
        openings=openings,
    )


def _fits(grammar: Grammar, most: int | None) -> bool:
    return most is None or len(grammar.source.encode("utf-8", "replace")) <= most


def effort_hints(effort: str | None) -> dict[str, Any]:
    """What `reasoning_effort` is to chat templates that know of such a thing."""
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}
