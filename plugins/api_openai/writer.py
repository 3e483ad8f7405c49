"""What writers of chat and of text completions have in common: they write whole answers, and chunks of a stream."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.plugins.api_openai.logprobs import prompt_logprobs
from pegboard.plugins.api_openai.usage import usage
from pegboard.toolkit.http.answer_stream import AnswerStream, AnswerWriter
from pegboard.toolkit.http.answers import built_response
from pegboard.toolkit.http.events import event
from pegboard.toolkit.http.generation import are_large

if TYPE_CHECKING:
    from fastapi import Request, Response

    from pegboard.core.interfaces.client import GenerateRequest, OutputChunk
    from pegboard.plugins.api_openai.fields import CommonBody
    from pegboard.plugins.api_openai.surface import Names, Surface
    from pegboard.toolkit.http.generation import Answer, Answers

Choice = dict[str, object]


class Writer(abc.ABC):
    """Writes the answer to one HTTP request."""

    kind = ""
    chunk_kind = ""

    def __init__(
        self, surface: Surface, rid: str, body: CommonBody, prompt_ids: Sequence[list[int]] | None = None
    ) -> None:
        self.surface = surface
        self.texts = surface.texts
        self.wanted = body
        self.prompt_ids = prompt_ids
        """The prompts as tokens, where they are asked for."""
        self._head = {"id": rid, "created": int(time.time()), "model": surface.model}

    @abc.abstractmethod
    def choice(self, index: int, answer: Answer) -> Choice:
        """Return one finished choice."""

    @abc.abstractmethod
    def begin(self, index: int) -> list[Choice]:
        """Of a streamed choice, what comes before any token."""

    @abc.abstractmethod
    def pieces(self, index: int, chunk: OutputChunk) -> list[Choice]:
        """Return what a chunk of the engine brings of a streamed choice; with the last one, its end."""

    @abc.abstractmethod
    def plain(self, index: int, chunk: OutputChunk) -> str | None:
        """Return the text that a chunk is, where it is nothing but text, for a choice as `piece` makes it; "" where
        there is nothing to say. None for any other: ask `pieces` next.
        """

    @abc.abstractmethod
    def piece(self, index: int, text: str) -> Choice:
        """Return a streamed choice that has nothing but text."""

    def chosen(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Return those of the generated answers that become choices."""
        return answers

    def reasoning_tokens(self) -> int | None:
        """Return how many tokens went into thinking, if it is known."""
        return None

    def opening(self) -> dict[str, object]:
        """Return what a whole answer, and the chunks in which a stream begins, have beside their choices."""
        return {}

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [self.choice(index, answer) for index, answer in enumerate(self.chosen(answers))]
        counted = usage(answers, self.wanted.copies, self.reasoning_tokens())
        return {**self._head, "object": self.kind, "choices": choices, "usage": counted, **self.opening()}

    def chunk(self, choices: list[Choice], **more: Any) -> dict[str, Any]:
        """Return one chunk of a stream."""
        return {**self._head, "object": self.chunk_kind, "choices": choices, **more}

    def extras(self, answer: Answer) -> Choice:
        """Return what a choice has of the extras that were asked for."""
        found: Choice = {}
        if self.wanted.prompt_logprobs is not None:
            entries = prompt_logprobs(self.texts, answer.input_logprobs, self.wanted.prompt_logprobs)
            found["prompt_logprobs"] = entries
        if self.wanted.return_hidden_states:
            found["hidden_states"] = answer.hidden_states
        if answer.extra:
            found["extra"] = answer.extra
        if self.wanted.return_token_ids:
            found["token_ids"] = answer.token_ids
        return found

    async def respond(self, request: Request, requests: Sequence[GenerateRequest], names: Names) -> Response:
        """Return the HTTP answer to what the engine makes of these requests, whole or as a stream."""
        answers = await self.surface.submit(request, requests, names, self.wanted.session_params)
        if self.wanted.stream:
            return AnswerStream(answers, _Events(self, answers))
        done = await self.surface.collect(request, answers, names)
        return await built_response(lambda: self.body(done), large=are_large(done))


class Template:
    """An event in which nothing changes but one string: `fill` writes what `write` would, in less time."""

    def __init__(self, write: Callable[[str], bytes]) -> None:
        self._write = write
        # A request's id is the client's, so it may hold any text; but it does not change.
        mark = "\0"
        while write(mark).count(msgspec.json.encode(mark)) != 1:
            mark += "\0"
        self._head, _, self._tail = write(mark).partition(msgspec.json.encode(mark))

    def fill(self, text: str) -> bytes:
        """Return the event with this string."""
        return b"%b%b%b" % (self._head, msgspec.json.encode(text), self._tail)


class _Events(AnswerWriter):
    """The chunks of a stream, each with one choice."""

    def __init__(self, writer: Writer, answers: Answers) -> None:
        self._writer = writer
        self._answers = answers
        # With usage asked for, every other chunk carries a null, as OpenAI's do.
        self._more: dict[str, Any] = {"usage": None} if writer.wanted.include_usage else {}
        self._continuous = writer.wanted.continuous_usage
        self._templates: dict[int, Template] = {}

    def begin(self) -> bytes:
        indices = range(len(self._answers.answers))
        choices = [choice for index in indices for choice in self._writer.begin(index)]
        return self._events(choices, **self._writer.opening())

    def more(self, index: int, chunk: OutputChunk) -> bytes:
        if self._continuous:
            self._more = {"usage": usage([self._answers.answers[index]], 1)}
        elif (text := self._writer.plain(index, chunk)) is not None:
            return self._template(index).fill(text) if text else b""
        return self._events(self._writer.pieces(index, chunk))

    def end(self) -> bytes:
        writer = self._writer
        if not writer.wanted.include_usage:
            return b""
        counted = usage(self._answers.answers, writer.wanted.copies, writer.reasoning_tokens())
        return event(writer.chunk([], usage=counted))

    def _template(self, index: int) -> Template:
        known = self._templates.get(index)
        if known is None:
            known = Template(lambda text: self._events([self._writer.piece(index, text)]))
            self._templates[index] = known
        return known

    def _events(self, choices: list[Choice], **more: object) -> bytes:
        return b"".join([event(self._writer.chunk([choice], **self._more, **more)) for choice in choices])


def ending(reason: dict[str, object] | None) -> Choice:
    """`finish_reason`, and what matched where the output was stopped."""
    if reason is None:
        return {"finish_reason": None}
    return {"finish_reason": reason.get("type", "stop"), "matched_stop": reason.get("matched")}
