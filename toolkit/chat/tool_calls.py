"""For chat APIs: the tools of a request, and the model's answer as content, reasoning and calls.

::

    tools = Tools(checked_functions(body.tools, find), choice, parallel=body.parallel)
    prompt = await render_chat(client, messages, tools=tools, tool_parser=tool_parser_of(ctx))
    grammar = tools.grammar(tool_parser_of(ctx))
    ...
    parsers = {"tool_parser": tool_parser_of(ctx), "reasoning_parser": reasoning_parser_of(ctx)}
    stream = ChatStream(tools=tools, **parsers, prompt=prompt)
    events = stream.feed(chunk.text)       # for each chunk, then stream.finish()
    answer = stream.answer()               # all of it: content, reasoning, calls
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.call_or import CallOrStream
from pegboard.toolkit.chat.thought_calls import ThoughtCalls
from pegboard.toolkit.chat.tool_schema import Choice, outline
from pegboard.toolkit.grammars.grammar import any_of
from pegboard.toolkit.parsing.output_parser import (
    Content,
    OutputEvent,
    OutputParser,
    ParserStream,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    ToolFunction,
)

if TYPE_CHECKING:
    from pegboard.core.interfaces.sampling import Grammar


INVALID_JSON = "INVALID_JSON"
"""For APIs whose calls have their arguments as an object: the only argument of a call whose text is not JSON, with that
text for a value. Anthropic's documentation of fine-grained tool streaming has clients write it so.
"""


@dataclass(frozen=True)
class Tools:
    """What a request says about tools, checked. `functions` are those that may be called, each with `name`,
    `parameters` (a JSON schema), and where they were given `description` and `strict` (see `checked_functions`); `name`
    is the function that has to be called, "" for any; `parallel` allows several calls in one answer.
    """

    functions: tuple[ToolFunction, ...] = ()
    choice: Choice = "auto"
    name: str = ""
    parallel: bool = True

    @property
    def active(self) -> bool:
        """Whether the model may call anything."""
        return bool(self.functions) and self.choice != "none"

    @property
    def for_template(self) -> list[dict[str, object]]:
        """The tools as chat templates read them; none where the model may not call any."""
        if not self.active:
            return []
        return [{"type": "function", "function": _without_strict(one)} for one in self.functions]

    def grammar(self, parser: OutputParser | None, *, features: Sequence[str] | None = None) -> Grammar | None:
        """Return the grammar of an answer that has to be a call, or None where it need not be.

        With the choice `auto` there is one where a function is `strict` and the parser has one for it: calls then fit
        their schemas, and other text is free. It is a courtesy: leave it out where the request brings a grammar of its
        own, and it is left out where the engine's `features` (`ModelInfo.features`) lack it. Raises InvalidRequest
        where a call is required and the parser has no grammar for it.
        """
        if not self.active:
            return None
        if self.choice == "auto":
            if parser is None or not any(one.get("strict") is True for one in self.functions):
                return None
            found = parser.constraint(self.functions, parallel=self.parallel, required=False)
            usable = found is not None and (features is None or f"grammar.{found.kind}" in features)
            return found if usable else None
        parallel = self.parallel and not self.name
        found = None if parser is None else parser.constraint(self.functions, name=self.name, parallel=parallel)
        if found is None:
            raise InvalidRequest(
                "this model's tool calls cannot be forced: no tool parser with a grammar fits its chat template; leave "
                "tool_choice at auto",
                param="tool_choice",
                code="unsupported",
            )
        return found

    def grammar_or(
        self, form: Grammar, parser: OutputParser | None, *, features: Sequence[str] | None = None
    ) -> tuple[Grammar, tuple[str, ...]] | None:
        """For the choice `auto`: the grammar of answers that are calls and nothing else, or follow `form`, and how
        the calls begin (`OutputParser.openings`). Arguments fit the schemas of functions that are strict, and have
        the names and types of the others'. None where the parser or the engine has no such thing.
        """
        openings = tuple(parser.openings(self.functions)) if parser is not None and self.active else ()
        if parser is None or not openings:
            return None
        functions = [one if one.get("strict") is True else outline(one) for one in self.functions]
        calls = parser.constraint(functions, parallel=self.parallel)
        kinds = {"any_of", form.kind, calls.kind} if calls is not None else set()
        if calls is None or (features is not None and not {f"grammar.{kind}" for kind in kinds} <= set(features)):
            return None
        return any_of(calls, form), openings


def _without_strict(function: ToolFunction) -> dict[str, object]:
    # It is about how the answer is generated; models were not trained on it.
    return {name: value for name, value in function.items() if name != "strict"}


def skip_special_tokens(tools: Tools | None, tool_parser: OutputParser | None, reasoning: OutputParser | None) -> bool:
    """Return what `SamplingParams.skip_special_tokens` has to be, for the parsers to see their markers."""
    used = [reasoning, tool_parser if tools is not None and tools.active else None]
    return all(one is None or one.skip_special_tokens for one in used)


@dataclass(slots=True)
class ToolCall:
    """One call of an answer; `arguments` is JSON text, incomplete where the answer is."""

    id: str
    name: str
    _pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A whole answer. `reasoning` is "" where there is none."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]


def _without_thought(parser: OutputParser) -> str:
    """Return the end of a prompt after which an answer has a thought only if it has the marker."""
    form = parser.thought_form()
    # Some models think without a marker, unless the prompt has a thought already.
    return form.closes[0] if form is not None and form.opened else ""


class ChatStream:
    """One answer's text as events: the reasoning parser first, and its content through the tool parser.

    `prompt` is the rendered prompt; `prefill` the part of it at its end that belongs to the answer
    (continue_final_message), "" mostly. `constrained` says that a grammar describes the whole answer, so that the model
    cannot think before it unless the grammar lets it write the marker. Without `stream_reasoning` the thinking comes
    in one piece when it is over. Leave a parser out to have its part as content. The tool parser is not used where no
    tool may be called. Where calls may not be parallel, those after the first are left out. With `openings` the answer
    is calls, which begin with one of them, or content, and never both (`Tools.grammar_or`). Calls at the end of a
    thought that nothing follows are calls (`ThoughtCalls`).
    """

    def __init__(
        self,
        *,
        tools: Tools | None = None,
        tool_parser: OutputParser | None = None,
        reasoning_parser: OutputParser | None = None,
        prompt: str = "",
        prefill: str = "",
        constrained: bool = False,
        stream_reasoning: bool = True,
        openings: Sequence[str] = (),
    ) -> None:
        self._tool_parser = tool_parser
        self._parallel = tools is None or tools.parallel
        self._thinking: ParserStream | None = None
        self._calling: ParserStream | None = None
        self._in_thoughts: ThoughtCalls | None = None
        if reasoning_parser is not None:
            # Templates may have trimmed it.
            own = prefill if prompt.endswith(prefill) else prefill.rstrip()
            before = _without_thought(reasoning_parser) if constrained else prompt.removesuffix(own)
            self._thinking = reasoning_parser.stream(prompt=before)
            if prefill and not constrained:
                self._thinking.feed(prefill)
        if tool_parser is not None and tools is not None and tools.active:
            parse = partial(tool_parser.stream, tools.functions, prompt=prompt)
            self._calling = CallOrStream(parse(), openings) if openings else parse()
            if self._thinking is not None and tool_parser.call_markers:
                self._in_thoughts = ThoughtCalls(tool_parser.call_markers, parse)
        self._stream_reasoning = stream_reasoning
        self._unsent: list[str] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        """The calls so far, each with its id, by the index that events have."""

    def feed(self, text: str) -> list[OutputEvent]:
        """Return what the next piece of text brings."""
        return self._note(self._parse(text, last=False))

    def finish(self) -> list[OutputEvent]:
        """Return the rest, when the text has ended."""
        events = self._note(self._parse("", last=True))
        return [*events, self._whole_reasoning()] if self._unsent else events

    def answer(self) -> ChatAnswer:
        """Return everything so far."""
        return ChatAnswer("".join(self._content), "".join(self._reasoning), tuple(self.calls))

    def collect(self, text: str) -> ChatAnswer:
        """Return a whole text's answer."""
        self.feed(text)
        self.finish()
        return self.answer()

    def _parse(self, text: str, *, last: bool) -> list[OutputEvent]:
        first: list[OutputEvent]
        if self._thinking is not None:
            first = self._thinking.feed(text) if text else []
            if last:
                first = first + self._thinking.finish()
        else:
            first = [Content(text)] if text else []
        if self._calling is None:
            return first
        events: list[OutputEvent] = []
        for one in first if self._in_thoughts is None else self._without_calls(first, self._in_thoughts, last=last):
            events += self._calling.feed(one.text) if isinstance(one, Content) else [one]
        return events + self._calling.finish() if last else events

    @staticmethod
    def _without_calls(events: Sequence[OutputEvent], calls: ThoughtCalls, *, last: bool) -> Iterator[OutputEvent]:
        """Yield thinking and content; calls in a thought that has no end are content, for the tool parser to read."""
        for event in events:
            thought = calls.feed(event.text) if isinstance(event, Reasoning) else calls.close()
            if thought:
                yield Reasoning(thought)
            if not isinstance(event, Reasoning):
                yield event
        thought, called = calls.finish() if last else ("", "")
        if thought:
            yield Reasoning(thought)
        if called:
            yield Content(called)

    def _note(self, events: list[OutputEvent]) -> list[OutputEvent]:
        """Keep what the answer needs, and leave out what clients should not see."""
        out: list[OutputEvent] = []
        for event in events:
            if isinstance(event, Reasoning):
                self._reasoning.append(event.text)
                if not self._stream_reasoning:
                    self._unsent.append(event.text)
                    continue
            elif self._unsent:
                out.append(self._whole_reasoning())
            if isinstance(event, Content):
                self._content.append(event.text)
            elif isinstance(event, ToolCallStart):
                if event.index and not self._parallel:
                    continue
                assert self._tool_parser is not None
                self.calls.append(ToolCall(event.id or self._tool_parser.call_id(), event.name))
            elif isinstance(event, ToolCallArguments):
                if event.index >= len(self.calls):
                    continue
                self.calls[event.index]._pieces.append(event.text)
            out.append(event)
        return out

    def _whole_reasoning(self) -> Reasoning:
        text = "".join(self._unsent)
        self._unsent.clear()
        return Reasoning(text)
