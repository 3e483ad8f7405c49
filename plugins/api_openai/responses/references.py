"""What a request's input refers to, and what is told of the input of a response that is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.responses.store import Item, Shelf

MAX_LISTED = 100


def resolved(store: Shelf, given: Sequence[dict[str, object]], before: Sequence[Item], most_bytes: int) -> list[Item]:
    """Return the input's items, with what is kept in the place of references to it. `before` are those of the responses
    that it follows on.

    Raises InvalidRequest (404) for what is not kept, (400) for a reference to what is there already, and (413) for more
    than a body with the items themselves could say.
    """
    seen = {one.id for one in before}
    found, size = [], 0
    for number, value in enumerate(given):
        if not _is_reference(value):
            found.append(Item(value))
            continue
        item = _find(store, value.get("id"), f"input.{number}.id")
        if item.id in seen:
            raise InvalidRequest(
                f"input.{number}: duplicate item found with id {item.id!r}; leave it out, the conversation has it",
                param=f"input.{number}.id",
            )
        seen.add(item.id)
        found.append(item)
        size += item.size
        if size > most_bytes:
            raise InvalidRequest(
                f"input: the items that it refers to have more than {most_bytes} bytes",
                param="input",
                code="body_too_large",
                status=413,
            )
    return found


def _is_reference(value: Mapping[str, object]) -> bool:
    """Return whether it is a reference; its type may be null or left out."""
    kind = value.get("type")
    return kind == "item_reference" or (kind is None and "id" in value and "role" not in value)


def _find(store: Shelf, identity: object, where: str) -> Item:
    if not isinstance(identity, str) or not identity:
        raise InvalidRequest(f"{where} must be a string", param=where)
    item = store.item(identity)
    if item is None:
        raise InvalidRequest(
            f"Item with id {identity[:128]!r} not found. Items are kept for a while, with their responses, but not "
            "where `store` is false. Send the item itself.",
            param=where,
            code="item_not_found",
            status=404,
        )
    return item


def listed(items: Sequence[Item], *, after: str, limit: int, order: str) -> dict[str, object]:
    """Return one page of an input's items. Raises InvalidRequest where none has the id `after`."""
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {order[:64]!r}", param="order")
    if not 1 <= limit <= MAX_LISTED:
        raise InvalidRequest(f"limit must be from 1 to {MAX_LISTED}, got {limit}", param="limit")
    ordered = list(items if order == "asc" else reversed(items))
    start = 0
    if after:
        start = next((i for i, one in enumerate(ordered, 1) if one.value.get("id") == after), 0)
        if not start:
            raise InvalidRequest(f"after: the input has no item of id {after[:128]!r}", param="after")
    page = [_shown(one.value) for one in ordered[start : start + limit]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }


def _shown(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item in full, as OpenAI's lists have it."""
    kind = value.get("type") or "message"
    shown = {**value, "type": kind}
    if kind == "message":
        shown["content"] = _parts(value["content"], value["role"])
    if kind != "reasoning":
        shown.setdefault("status", "completed")
    else:
        shown.setdefault("summary", [])
    return shown


def _parts(content: object, role: str) -> object:
    if not isinstance(content, str):
        return content
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": content}]
