"""Answers, in lines and whole."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel

from pegboard.toolkit.chat.tool_calls import INVALID_JSON
from pegboard.toolkit.http.openapi import error_responses
from pegboard.toolkit.parsing.json_stream import without_lone_surrogates
from pegboard.toolkit.parsing.output_parser import Content, OutputEvent, Reasoning, ToolCallStart

if TYPE_CHECKING:
    from pegboard.toolkit.chat.tool_calls import ChatStream, ToolCall
    from pegboard.toolkit.http.generation import Answer


class Ended(BaseModel):
    """What the last line, or a whole answer, has beside its text. Durations are nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class ChatAnswer(Ended):
    """The answer of `/api/chat`: `message` has `role`, `content`, and where they are there `thinking` and
    `tool_calls`.
    """

    message: dict[str, object]


class GenerateAnswer(Ended):
    """The answer of `/api/generate`."""

    response: str
    thinking: str | None = None


class ErrorAnswer(BaseModel):
    """What an answer with an error has."""

    error: str


class EmbedAnswer(BaseModel):
    """The answer of `/api/embed`. Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingAnswer(BaseModel):
    """The answer of `/api/embeddings`."""

    embedding: list[float]


ERRORS = error_responses(404, 429, model=ErrorAnswer)
"""What the server's document says of each route's errors."""

Part = dict[str, object]
"""Some of `content`, `thinking` and `tool_calls`."""


class AnswerWriter:
    """Writes one answer as `/api/chat` has it, or with `chat` off as `/api/generate` has it. `parsed` reads its text,
    None for a text that is read by nothing.
    """

    def __init__(self, model: str, parsed: ChatStream | None, *, chat: bool) -> None:
        self.model, self._parsed, self._chat = model, parsed, chat
        self._began = time.perf_counter_ns()
        self._first = 0
        self._told = 0
        """How many of the calls have been told of."""
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[Part] = []

    def more(self, text: str) -> Iterator[Part]:
        """Yield what is new, each to be a line."""
        self._first = self._first or time.perf_counter_ns()
        events: Sequence[OutputEvent] = [Content(text)] if text else []
        yield from self._parts(events if self._parsed is None else self._parsed.feed(text))

    def rest(self, *, ended: bool) -> Iterator[Part]:
        """Yield the rest; `ended` says whether the model has ended the answer, so that the last call is whole."""
        if self._parsed is not None:
            yield from self._parts(self._parsed.finish())
            yield from self._called(self._parsed.calls, whole=ended)

    def line(self, part: Part) -> dict[str, object]:
        """Return a line."""
        return {"model": self.model, "created_at": now(), **self._shaped(part), "done": False}

    def end(self, answer: Answer, *, whole: bool = False) -> dict[str, object]:
        """Return the last line; `whole`: the whole answer."""
        part: Part = {"content": "".join(self._content) if whole else ""}
        if whole and self._thinking:
            part["thinking"] = "".join(self._thinking)
        if whole and self._calls:
            part["tool_calls"] = self._calls
        return {**self.line(part), "done": True, "done_reason": reason_of(answer), **self._figures(answer)}

    def _parts(self, events: Sequence[OutputEvent]) -> Iterator[Part]:
        for event in events:
            if isinstance(event, Content):
                self._content.append(event.text)
                yield {"content": event.text}
            elif isinstance(event, Reasoning):
                self._thinking.append(event.text)
                yield {"content": "", "thinking": event.text}
            elif isinstance(event, ToolCallStart) and self._parsed is not None:
                # The one before is complete.
                yield from self._called(self._parsed.calls[: event.index], whole=True)

    def _called(self, calls: Sequence[ToolCall], *, whole: bool) -> Iterator[Part]:
        """Yield calls that have not been told of. The last one may have been cut: it is left out then."""
        while self._told < len(calls):
            call = calls[self._told]
            self._told += 1
            arguments = _object(call.arguments)
            if arguments is None and not (whole or self._told < len(calls)):
                return
            if arguments is None:
                # No tool is to run as if it had been called without arguments.
                arguments = {INVALID_JSON: call.arguments} if call.arguments else {}
            function = {"index": self._told - 1, "name": call.name, "arguments": arguments}
            self._calls.append({"id": call.id, "function": function})
            yield {"content": "", "tool_calls": self._calls[-1:]}

    def _shaped(self, part: Part) -> Part:
        if self._chat:
            return {"message": {"role": "assistant", **part}}
        content = part.get("content", "")
        return {"response": content, **({"thinking": part["thinking"]} if "thinking" in part else {})}

    def _figures(self, answer: Answer) -> dict[str, int]:
        end = time.perf_counter_ns()
        first = self._first or end
        return {
            "total_duration": end - self._began,
            "load_duration": 0,
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": first - self._began,
            "eval_count": answer.completion_tokens,
            "eval_duration": end - first,
        }


def loaded(model: str, *, chat: bool, unload: bool) -> dict[str, object]:
    """Return the answer to a request that has no prompt, with which clients load or unload a model."""
    writer = AnswerWriter(model, None, chat=chat)
    return {**writer.line({"content": ""}), "done": True, "done_reason": "unload" if unload else "load"}


def reason_of(answer: Answer) -> str:
    """Return why an answer ended."""
    return "length" if (answer.finish_reason or {}).get("type") == "length" else "stop"


def now() -> str:
    """Return the time as Ollama writes it."""
    return stamp(time.time())


def stamp(seconds: float) -> str:
    """Return a time as Ollama writes it."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _object(text: str) -> dict[str, object] | None:
    try:
        found = json.loads(without_lone_surrogates(text))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
