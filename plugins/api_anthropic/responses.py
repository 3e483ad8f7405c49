"""Answers in Anthropic's shapes: content blocks, whole or as the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import pydantic_core

from pegboard.toolkit.chat.tool_calls import INVALID_JSON
from pegboard.toolkit.http.events import event
from pegboard.toolkit.parsing.json_stream import is_beginning, without_lone_surrogates
from pegboard.toolkit.parsing.output_parser import Content, OutputEvent, Reasoning, ToolCallArguments, ToolCallStart

if TYPE_CHECKING:
    from pegboard.toolkit.chat.tool_calls import ChatStream
    from pegboard.toolkit.http.generation import Answer

Thinking = Literal["shown", "omitted", "dropped"]
"""What becomes of the model's thinking: a block of it, an empty block, or none."""

SIGNATURE = "unsigned"
"""Of thinking: clients pass blocks back only with one, and nothing is verified here."""


class Blocks:
    """One answer's content. `blocks` is what there is so far; `feed` and `finish` say it as events of a stream.

    `call_id` tells the id of the call of an index.
    """

    def __init__(self, call_id: Callable[[int], str], thinking: Thinking = "shown") -> None:
        self.blocks: list[dict[str, Any]] = []
        self._call_id = call_id
        self._thinking = thinking
        self._open = False
        self._json = ""

    def feed(self, events: Iterable[OutputEvent]) -> list[dict[str, Any]]:
        """Return what these events of the parsers add."""
        out: list[dict[str, Any]] = []
        for one in _joined(events):
            if isinstance(one, ToolCallStart):
                out += self._begin({"type": "tool_use", "id": self._call_id(one.index), "name": one.name, "input": {}})
            elif isinstance(one, ToolCallArguments):
                self._json += one.text
                out.append(self._delta({"type": "input_json_delta", "partial_json": one.text}))
            elif one.text:
                out += self._text(one)
        return out

    def finish(self) -> list[dict[str, Any]]:
        """Return the end of the last block."""
        if not self._open:
            return []
        self._open = False
        out = []
        block = self.blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            out.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        if block["type"] == "tool_use":
            block["input"] = _arguments(self._json)
            self._json = ""
        return [*out, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    @property
    def calls_tools(self) -> bool:
        """Whether the answer asks for a tool to be used."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def _text(self, one: Content | Reasoning) -> list[dict[str, Any]]:
        kind = "text" if isinstance(one, Content) else "thinking"
        if kind == "thinking" and self._thinking == "dropped":
            return []
        out: list[dict[str, Any]] = []
        if not self._open or self.blocks[-1]["type"] != kind:
            out = self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        if kind == "text" or self._thinking == "shown":
            self.blocks[-1][kind] += one.text
            out.append(self._delta({"type": f"{kind}_delta", kind: one.text}))
        return out

    def _begin(self, block: dict[str, object]) -> list[dict[str, object]]:
        out = self.finish()
        self.blocks.append(block)
        self._open = True
        return [*out, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, object]) -> dict[str, object]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _joined(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Texts of one kind that follow each other, as one."""
    out: list[OutputEvent] = []
    for one in events:
        last = out[-1] if out else None
        if isinstance(one, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + one.text)
        elif isinstance(one, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + one.text)
        elif isinstance(one, ToolCallArguments) and isinstance(last, ToolCallArguments) and one.index == last.index:
            out[-1] = ToolCallArguments(one.index, last.text + one.text)
        else:
            out.append(one)
    return out


def _arguments(text: str) -> dict[str, object]:
    """Return a call's arguments; as far as they go where the answer was cut off, as Anthropic's clients read a
    stream. Text that is not JSON is wrapped, so that no tool runs as if it had been called with other arguments.
    """
    text = without_lone_surrogates(text)
    if not text:
        return {}
    try:
        value = pydantic_core.from_json(text)
    except ValueError:
        value = _begun(text)
    return value if isinstance(value, dict) else {INVALID_JSON: text}


def _begun(text: str) -> object:
    """Return what JSON begins with `text`, as far as it goes; None where that is broken."""
    try:
        return pydantic_core.from_json(text, allow_partial="trailing-strings") if is_beginning(text) else None
    except ValueError:
        return None


class MessageWriter:
    """Writes the message of one HTTP request, whose text goes through `parsed`. `max_tokens` is what it asked for."""

    def __init__(
        self, rid: str, model: str, parsed: ChatStream, *, max_tokens: int, thinking: Thinking = "shown"
    ) -> None:
        self._head = {"id": rid, "type": "message", "role": "assistant", "model": model}
        self._parsed = parsed
        self._max_tokens = max_tokens
        self._content = Blocks(self._call_id, thinking)

    def message(self, answer: Answer) -> dict[str, Any]:
        """Return the whole message."""
        self._content.feed(self._parsed.feed(answer.text))
        self._content.feed(self._parsed.finish())
        self._content.finish()
        return {**self._head, "content": self._content.blocks, **self._stop(answer), "usage": usage(answer)}

    def start(self, answer: Answer) -> bytes:
        """Return the event that begins a stream."""
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage(answer)}
        return _frame({"type": "message_start", "message": {**self._head, **empty}})

    def more(self, text: str) -> bytes:
        """Return the stream's events for more of the text; several at once, or none."""
        return b"".join(map(_frame, self._content.feed(self._parsed.feed(text))))

    def end(self, answer: Answer) -> bytes:
        """Return the events that end a stream."""
        last = [
            *self._content.feed(self._parsed.finish()),
            *self._content.finish(),
            {"type": "message_delta", "delta": self._stop(answer), "usage": usage(answer)},
            {"type": "message_stop"},
        ]
        return b"".join(map(_frame, last))

    def _call_id(self, index: int) -> str:
        """Return the parser's, since some models want ids of a certain form; else as Anthropic's look."""
        identity = self._parsed.calls[index].id
        return f"toolu_{identity.removeprefix('call_')}" if identity.startswith("call_") else identity

    def _stop(self, answer: Answer) -> dict[str, Any]:
        reason = answer.finish_reason or {}
        matched = reason.get("matched")
        if isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        if reason.get("type") == "length":
            full = answer.completion_tokens < self._max_tokens
            return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
        return {"stop_reason": "tool_use" if self._content.calls_tools else "end_turn", "stop_sequence": None}


PING = event({"type": "ping"}, "ping")
"""Keeps a connection alive on which nothing else happens."""


def usage(answer: Answer) -> dict[str, Any]:
    """Return tokens; those of the prompt that were cached count apart."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    }


def _frame(data: dict[str, Any]) -> bytes:
    return event(data, str(data["type"]))
