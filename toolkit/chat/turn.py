"""For chat APIs: a conversation's next turn: its prompt, the format of the answer, and how to parse it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.media_parts import prompt_text
from pegboard.toolkit.chat.rendering import render_chat
from pegboard.toolkit.chat.tool_calls import ChatStream, Tools, skip_special_tokens
from pegboard.toolkit.http.events import until_disconnect
from pegboard.toolkit.parsing.output_parser import reasoning_parser_of, tool_parser_of

if TYPE_CHECKING:
    from fastapi import Request

    from pegboard.core.interfaces.api_router import ApiContext
    from pegboard.core.interfaces.client import ModelInfo
    from pegboard.core.interfaces.sampling import Grammar
    from pegboard.toolkit.media.inputs import MediaPrompt
    from pegboard.toolkit.parsing.output_parser import OutputParser


@dataclass(frozen=True)
class Turn:
    """What the engine is asked, and how its answer is read. `prefill` is what the answer goes on from, if anything."""

    prompt: str | MediaPrompt
    prefill: str
    tools: Tools
    grammar: Grammar | None
    skip_special_tokens: bool
    tool_parser: OutputParser | None
    reasoning_parser: OutputParser | None
    constrained: bool
    openings: tuple[str, ...] = ()
    """How calls begin, where the answer is either calls or what the request's format says."""

    @property
    def text(self) -> str:
        """The prompt as text, media being what the template made of them."""
        return prompt_text(self.prompt)

    @property
    def before_prefill(self) -> str:
        """The prompt without the beginning of the answer. Templates may have trimmed that."""
        own = self.prefill if self.text.endswith(self.prefill) else self.prefill.rstrip()
        return self.text.removesuffix(own)

    def stream(self, *, stream_reasoning: bool = True) -> ChatStream:
        """Return a reader of one answer."""
        return ChatStream(
            tools=self.tools,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            prompt=self.text,
            prefill=self.prefill,
            constrained=self.constrained,
            stream_reasoning=stream_reasoning,
            openings=self.openings,
        )


async def take_turn(
    ctx: ApiContext,
    request: Request,
    messages: Sequence[Mapping[str, object]],
    *,
    tools: Tools,
    grammar: Grammar | None,
    separate_reasoning: bool = True,
    skip_special: bool = True,
    kwargs: Mapping[str, object] | None = None,
    hints: Mapping[str, object] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> Turn:
    """Return the turn after `messages`, which are as `render_chat` takes them. `grammar` is the request's own.

    With a format (JSON) and tools, an answer is either calls or of that format, where parser and engine can have it so
    (many functions may be more than the engine takes), and else always of that format; a call that is required goes
    before any format. With an expression or rules of its own an answer is what these say. Raises InvalidRequest where
    tools are there and nothing reads calls, and where a call is required beside an expression or rules.
    """
    form = _form(ctx, tools, grammar)
    prompt = await until_disconnect(
        request,
        render_chat(
            ctx.client,
            messages,
            tools=tools,
            tool_parser=tool_parser_of(ctx),
            kwargs=kwargs,
            hints=hints,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
        ),
    )
    prefill = str(messages[-1]["content"]) if continue_final_message else ""
    return _turn(ctx, tools, form, prompt, prefill, separate_reasoning=separate_reasoning, skip_special=skip_special)


@dataclass(frozen=True)
class _Form:
    """What an answer has to look like, by the request's own grammar; `openings` as in `Turn`."""

    grammar: Grammar | None
    openings: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether an answer is what the grammar says and nothing else, so that no call is to be found in it."""
        return self.grammar is not None and self.grammar.kind != "structural_tag"


def _form(ctx: ApiContext, tools: Tools, grammar: Grammar | None) -> _Form:
    """Reconcile tools and the request's own grammar; `take_turn` says how, and what it raises."""
    if not tools.active:
        return _Form(grammar)
    if tool_parser_of(ctx) is None:
        raise InvalidRequest(
            "tools: no tool parser fits this model's chat template, so its calls cannot be read; set tool_parser.use "
            "in the server's config, or leave tools out",
            param="tools",
            code="unsupported",
        )
    if grammar is None:
        return _Form(None)
    if tools.choice == "required":
        if grammar.kind in ("regex", "ebnf"):
            raise InvalidRequest(
                f"tool_choice: a call is required, and {grammar.kind} says otherwise; leave one of them out",
                param="tool_choice",
            )
        return _Form(None)
    if grammar.kind in ("json_schema", "json_object"):
        either = tools.grammar_or(grammar, tool_parser_of(ctx), features=ctx.client.info.features)
        if either is not None and _fits(either[0], _longest(ctx.client.info)):
            return _Form(*either)
    return _Form(grammar)


def _turn(
    ctx: ApiContext,
    tools: Tools,
    form: _Form,
    prompt: str | MediaPrompt,
    prefill: str,
    *,
    separate_reasoning: bool,
    skip_special: bool,
) -> Turn:
    """Choose how the answer to this prompt is constrained and read."""
    calls = tool_parser_of(ctx)
    tool_parser = calls if tools.active and (form.openings or not form.whole) else None
    reasoning_parser = reasoning_parser_of(ctx) if separate_reasoning else None
    grammar = form.grammar or tools.grammar(calls, features=ctx.client.info.features)
    return Turn(
        prompt=prompt,
        prefill=prefill,
        tools=tools,
        grammar=grammar,
        skip_special_tokens=skip_special and skip_special_tokens(tools, tool_parser, reasoning_parser),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        constrained=form.whole or (tools.active and tools.choice == "required"),
        openings=form.openings,
    )


def _longest(info: ModelInfo) -> int | None:
    """Return the most bytes that the source of a grammar may have; None: any number."""
    return info.stages.get("grammar", {}).get("max_source_bytes")


def _fits(grammar: Grammar, most: int | None) -> bool:
    return most is None or len(grammar.source.encode("utf-8", "replace")) <= most
