"""The events that tell of an item: as it comes into being, and in the same words when its stream is told again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]

_DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_STRINGS = {"function_call": "arguments", "custom_tool_call": "input"}


def text_of_item(item: dict[str, Any]) -> str:
    """Return what its deltas are pieces of."""
    name = _STRINGS.get(item["type"])
    return str(item[name] if name else item["content"][0]["text"])


def set_text(item: dict[str, Any], text: str) -> None:
    """Say what its deltas are pieces of."""
    name = _STRINGS.get(item["type"])
    if name:
        item[name] = text
    else:
        item["content"][0]["text"] = text


def began(index: int, item: dict[str, Any]) -> list[Event]:
    """Say that an item is there, with nothing in it yet."""
    shown = {**item, "status": "in_progress"}
    name = _STRINGS.get(item["type"])
    shown[name or "content"] = "" if name else []
    told: list[Event] = [{"type": "response.output_item.added", "output_index": index, "item": shown}]
    if not name:
        part = {**item["content"][0], "text": ""}
        if "logprobs" in part:
            part["logprobs"] = []
        told.append(_told("response.content_part.added", index, item, content_index=0, part=part))
    return told


def grew(index: int, item: dict[str, Any], text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Event:
    """Say that a piece has been added."""
    more: dict[str, Any] = {"delta": text}
    if item["type"] not in _STRINGS:
        more["content_index"] = 0
    if item["type"] == "message":
        more["logprobs"] = list(logprobs)
    return _told(f"{_DELTAS[item['type']]}.delta", index, item, **more)


def ended(index: int, item: dict[str, Any]) -> list[Event]:
    """Say that an item is as it will stay."""
    kind = item["type"]
    done = f"{_DELTAS[kind]}.done"
    if kind == "function_call":
        told = [_told(done, index, item, arguments=item["arguments"], name=item["name"])]
    elif kind == "custom_tool_call":
        told = [_told(done, index, item, input=item["input"])]
    else:
        part = item["content"][0]
        more = {"logprobs": part["logprobs"]} if kind == "message" else {}
        told = [
            _told(done, index, item, content_index=0, text=part["text"], **more),
            _told("response.content_part.done", index, item, content_index=0, part=dict(part)),
        ]
    return [*told, {"type": "response.output_item.done", "output_index": index, "item": dict(item)}]


def _told(kind: str, index: int, item: dict[str, object], **fields: object) -> Event:
    return {"type": kind, "output_index": index, "item_id": item["id"], **fields}
