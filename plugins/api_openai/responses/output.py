"""An answer's items as they come into being, and the events that tell of it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.output_parser import Content, OutputEvent, Reasoning, ToolCallStart

if TYPE_CHECKING:
    from pegboard.core.toolkit.tool_calls import ChatStream

Event = dict[str, Any]


class Output:
    """The `output` of a response. Every change to it is an event; whole answers leave the events aside.

    Thinking, text and each call are items of their own. One is open at a time: it is done when the next one begins.
    """

    def __init__(self, stream: ChatStream) -> None:
        self._stream = stream
        self.items: list[dict[str, Any]] = []
        self._open = False
        self._logprobs: list[dict[str, Any]] = []

    def feed(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """The next piece of the answer's text, with the logprobs of its tokens."""
        return self._take(self._stream.feed(text) if text else [], logprobs)

    def finish(self, *, complete: bool, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """The rest, at the end. An answer has at least one item; the last one is as complete as the answer."""
        told = self._take(self._stream.finish(), logprobs)
        if not self.items:
            told += self._begin(_message())
        return told + self._end("completed" if complete else "incomplete")

    @property
    def reasoning(self) -> str:
        """All thinking so far."""
        return self._stream.answer().reasoning

    def _take(self, events: Sequence[OutputEvent], logprobs: Sequence[dict[str, Any]]) -> list[Event]:
        # Tokens of a text may come before the text, which is held back; those of anything else are nobody's.
        self._logprobs += logprobs
        told: list[Event] = []
        for event in events:
            told += self._one(event)
        if any(not isinstance(event, Content) for event in events):
            self._logprobs.clear()
        return told

    def _one(self, event: OutputEvent) -> list[Event]:
        if isinstance(event, Reasoning):
            told = self._need("reasoning", _reasoning)
            self._item["content"][0]["text"] += event.text
            return [*told, self._told("response.reasoning_text.delta", delta=event.text, content_index=0)]
        if isinstance(event, Content):
            told = self._need("message", _message)
            part = self._item["content"][0]
            logprobs, self._logprobs = self._logprobs, []
            part["text"] += event.text
            part["logprobs"] += logprobs
            more = {"delta": event.text, "content_index": 0, "logprobs": logprobs}
            return [*told, self._told("response.output_text.delta", **more)]
        if isinstance(event, ToolCallStart):
            call = self._stream.calls[event.index]
            return self._begin(
                {
                    "id": f"fc_{uuid.uuid4().hex}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": "",
                }
            )
        self._item["arguments"] += event.text
        return [self._told("response.function_call_arguments.delta", delta=event.text)]

    @property
    def _item(self) -> dict[str, Any]:
        return self.items[-1]

    def _need(self, kind: str, make: Any) -> list[Event]:
        """Begin an item unless one of this kind is open."""
        if self._open and self._item["type"] == kind:
            return []
        return self._begin(make())

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        told = self._end("completed")
        self.items.append(item)
        self._open = True
        parts = item.get("content")
        shown = {**item, "content": []} if parts else dict(item)
        told.append(self._told("response.output_item.added", item=shown))
        if parts:
            told.append(self._told("response.content_part.added", content_index=0, part=_copy(parts[0])))
        return told

    def _end(self, status: str) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        item = self._item
        item["status"] = status
        told = []
        if item["type"] == "function_call":
            whole = {"arguments": item["arguments"], "name": item["name"]}
            told.append(self._told("response.function_call_arguments.done", **whole))
        else:
            part = item["content"][0]
            if item["type"] == "message":
                more = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
                told.append(self._told("response.output_text.done", **more))
            else:
                told.append(self._told("response.reasoning_text.done", content_index=0, text=part["text"]))
            told.append(self._told("response.content_part.done", content_index=0, part=_copy(part)))
        told.append(self._told("response.output_item.done", item=dict(item)))
        return told

    def _told(self, kind: str, **fields: Any) -> Event:
        place: dict[str, Any] = {"type": kind, "output_index": len(self.items) - 1}
        if "item" not in fields:
            place["item_id"] = self._item["id"]
        return {**place, **fields}


def _copy(part: dict[str, Any]) -> dict[str, Any]:
    # The part grows on.
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    identity = f"msg_{uuid.uuid4().hex}"
    return {"id": identity, "type": "message", "status": "in_progress", "role": "assistant", "content": [part]}


def _reasoning() -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": ""}
    identity = f"rs_{uuid.uuid4().hex}"
    return {"id": identity, "type": "reasoning", "status": "in_progress", "summary": [], "content": [part]}
