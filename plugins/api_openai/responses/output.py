"""An answer's items as they come into being, and the events that tell of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

from pegboard.plugins.api_openai.responses.content_logprobs import ContentEntries, Entry
from pegboard.plugins.api_openai.responses.custom import InputReader
from pegboard.plugins.api_openai.responses.events import Event, began, ended, grew, set_text
from pegboard.plugins.api_openai.responses.replay import Tape
from pegboard.toolkit.parsing.output_parser import Content, OutputEvent, Reasoning, ToolCallStart

if TYPE_CHECKING:
    from pegboard.toolkit.chat.tool_calls import ChatStream


class Output:
    """The `output` of a response. Every change to it is an event; whole answers leave the events aside.

    Thinking, text and each call are items of their own. One is open at a time: it is done when the next one begins.
    `custom` are the names of functions that stand for custom tools.
    """

    def __init__(self, stream: ChatStream, custom: Set[str] = frozenset()) -> None:
        self._stream = stream
        self._custom = custom
        self.items: list[dict[str, Any]] = []
        self.tape = Tape()
        self._open = False
        self._entries = ContentEntries()
        self._reader: InputReader | None = None

    def feed(self, text: str) -> list[Event]:
        """Return what the next piece of the answer's text adds."""
        return self._take(self._stream.feed(text) if text else [])

    def feed_tokens(self, pieces: Iterable[tuple[str, Entry]]) -> list[Event]:
        """Return what the next tokens add, each with its text and logprobs."""
        told: list[Event] = []
        for text, entry in pieces:
            self._entries.add(text, entry)
            told += self.feed(text)
        return told

    def finish(self, *, complete: bool) -> list[Event]:
        """Return the rest, at the end. An answer has at least one item; the last one is as complete as the answer."""
        told = self._take(self._stream.finish())
        if not self.items:
            told += self._begin(_message())
        return told + self._end("completed" if complete else "incomplete")

    def settle(self) -> None:
        """Give the item that is open its text, which came in pieces. No more may come."""
        if self._open and self.tape.pieces:
            set_text(self._item, self.tape.text())

    @property
    def reasoning(self) -> str:
        """All thinking so far."""
        return self._stream.answer().reasoning

    def _take(self, events: Sequence[OutputEvent]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            told += self._one(event)
        if any(not isinstance(event, Content) for event in events):
            self._entries.clear()
        return told

    def _one(self, event: OutputEvent) -> list[Event]:
        if isinstance(event, Reasoning):
            return [*self._need("reasoning", _reasoning), self._piece(event.text)]
        if isinstance(event, Content):
            told = self._need("message", _message)
            return [*told, self._piece(event.text, self._entries.take(event.text))]
        if isinstance(event, ToolCallStart):
            call = self._stream.calls[event.index]
            custom = call.name in self._custom
            told = self._begin(_call(call.id, call.name, custom=custom))
            self._reader = InputReader() if custom else None
            return told
        text = event.text if self._reader is None else self._reader.feed(event.text)
        return [self._piece(text)] if text else []

    @property
    def _item(self) -> dict[str, Any]:
        return self.items[-1]

    def _need(self, kind: str, make: Callable[[], dict[str, object]]) -> list[Event]:
        """Begin an item unless one of this kind is open."""
        if self._open and self._item["type"] == kind:
            return []
        return self._begin(make())

    def _begin(self, item: dict[str, object]) -> list[Event]:
        told = self._end("completed")
        self.tape.begin()
        self.items.append(item)
        self._open = True
        return told + began(len(self.items) - 1, item)

    def _piece(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Event:
        self.tape.cut(text, len(logprobs))
        if logprobs:
            self._item["content"][0]["logprobs"] += logprobs
        return grew(len(self.items) - 1, self._item, text, logprobs)

    def _end(self, status: str) -> list[Event]:
        if not self._open:
            return []
        told: list[Event] = []
        if self._reader is not None:
            rest = self._reader.finish()
            told = [self._piece(rest)] if rest else []
            self._reader = None
        self.settle()
        self._open = False
        self._item["status"] = status
        return told + ended(len(self.items) - 1, self._item)


def _message() -> dict[str, object]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    identity = f"msg_{uuid.uuid4().hex}"
    return {"id": identity, "type": "message", "status": "in_progress", "role": "assistant", "content": [part]}


def _reasoning() -> dict[str, object]:
    part = {"type": "reasoning_text", "text": ""}
    identity = f"rs_{uuid.uuid4().hex}"
    return {"id": identity, "type": "reasoning", "status": "in_progress", "summary": [], "content": [part]}


def _call(call_id: str, name: str, *, custom: bool) -> dict[str, Any]:
    prefix, kind, field = ("ctc", "custom_tool_call", "input") if custom else ("fc", "function_call", "arguments")
    return {
        "id": f"{prefix}_{uuid.uuid4().hex}",
        "type": kind,
        "status": "in_progress",
        "call_id": call_id,
        "name": name,
        field: "",
    }
