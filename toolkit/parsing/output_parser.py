"""Contract: tool calls and reasoning in streamed text. Both kinds of parsers have this interface; see the contracts
`tool_parser` and `reasoning_parser`. They run in the API process and import no torch.
"""

from __future__ import annotations

import abc
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Required, TypedDict

from pegboard.core.interfaces.json_value import JsonObject
from pegboard.core.interfaces.options import OptionsT
from pegboard.core.interfaces.sampling import Grammar

if TYPE_CHECKING:
    from pegboard.core.interfaces.api_router import ApiContext


class ToolFunction(TypedDict, total=False):
    """A function of a request, as OpenAI has it. `parameters` is the JSON schema of its arguments, which are an object;
    with `strict` they have to fit it.
    """

    name: Required[str]
    description: str
    parameters: JsonObject
    strict: bool


class EarlierCall(TypedDict):
    """A call that an assistant's message has: the function's name, and its arguments by name."""

    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True)
class OutputParserContext:
    """What is known of the model: the source of its chat template (of all of them, one after the other, where it has
    several; "" for none), its architecture, its name.
    """

    chat_template: str
    architecture: str
    model: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins, the `index`th of this answer; the name is complete. `id` is the one that the model wrote, "" where
    it writes none: the call then gets one of `OutputParser.call_id`.
    """

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments; all pieces of one call together are one JSON object."""

    index: int
    text: str


OutputEvent = Content | Reasoning | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """How thoughts are marked in an answer. One begins with `begin`, at the answer's beginning, or with the answer
    where it is `opened`, and ends with one of `ends`. `closes` are what is written to end one: the first time, the
    second, and so on; the last counts for all further ones. Where more than one may come, `answer` ends them.
    """

    begin: str
    ends: tuple[str, ...]
    closes: tuple[str, ...]
    opened: bool = False
    answer: str = ""


class ParserStream(abc.ABC):
    """One answer on its way. The events, put together, do not depend on how the text was cut into pieces.

    The work per character is bounded, whatever came before it: an answer may be long and come a character at a time.
    """

    @abc.abstractmethod
    def feed(self, text: str) -> list[OutputEvent]:
        """Return what the next piece of text brings. What might be the beginning of a marker is held back."""

    @abc.abstractmethod
    def finish(self) -> list[OutputEvent]:
        """Return the rest, when the text has ended. A call that is incomplete or no valid call becomes Content, unless
        its start has already been told: then its arguments end where the text does. Nothing is lost but markers, and
        the whitespace around them.
        """


class OutputParser(abc.ABC, Generic[OptionsT]):
    """Knows one family of models' way to write tool calls, or to think."""

    skip_special_tokens = True
    """Whether its markers are ordinary text. False: the output must be decoded with special tokens in it."""
    call_markers: tuple[str, ...] = ()
    """Of tool parsers: what every call, or a section of calls, begins with wherever it stands. By them a call is found
    in a thought whose end was forgotten; none where calls have no marker.
    """

    def __init__(self, options: OptionsT, ctx: OutputParserContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: OutputParserContext) -> str | None:
        """Return None, or the reason why this model does not write so. Asked where the config says `auto`."""
        return None

    @abc.abstractmethod
    def stream(self, tools: Sequence[ToolFunction] = (), *, prompt: str = "") -> ParserStream:
        """Return a parser of one answer. `tools` are the functions of the request: a call of any other is not a call,
        unless there are none at all, when every name will do. `prompt` is the text before the answer, whose end may
        have opened a thinking block.
        """

    def constraint(
        self, tools: Sequence[ToolFunction], *, name: str = "", parallel: bool = True, required: bool = True
    ) -> Grammar | None:
        """Return a grammar that makes the answer consist of at least one call (of the function `name`, where given; of
        one only, unless `parallel`) and of nothing else, in the format that `stream` reads: after the last call it
        ends. Without `required` other text is as good, and only calls have to fit. None where the parser has none.
        """
        return None

    def openings(self, tools: Sequence[ToolFunction]) -> Sequence[str]:
        """Return how answers that follow ``constraint(tools)`` begin: with one of these texts, white space apart. By
        them an answer of calls is told from one with a form of its own, so they are as long as it takes to know. Needs
        the capability `opens`; empty without it.
        """
        return ()

    def thought_form(self, *, prompt: str = "") -> ThoughtForm | None:
        """Return how thoughts are marked in the answer to a prompt, so that they can be ended; None: not at all."""
        return None

    def instructions(self, tools: Sequence[ToolFunction]) -> str:
        """Return a system message that explains tools and format to a model whose chat template does not read `tools`;
        "" where the parser has none.
        """
        return ""

    def write_calls(self, calls: Sequence[EarlierCall]) -> str:
        """Return the text that stands for these calls (name, arguments: an object), such that `stream` reads them: what
        a chat template that does not know of calls is shown of earlier ones. "" where the parser has no format.
        """
        return ""

    def call_id(self) -> str:
        """Return a new call's id. Some models' templates want ids of a certain form."""
        return f"call_{secrets.token_hex(12)}"


def tool_parser_of(ctx: ApiContext) -> OutputParser | None:
    """Return the server's parser of tool calls; None where it has none."""
    return _service(ctx, "tool_parser")


def reasoning_parser_of(ctx: ApiContext) -> OutputParser | None:
    """Return the server's parser of reasoning; None where it has none."""
    return _service(ctx, "reasoning_parser")


def _service(ctx: ApiContext, name: str) -> OutputParser | None:
    found = ctx.services.get(name)
    return found if isinstance(found, OutputParser) else None
