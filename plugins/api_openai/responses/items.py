"""Items of a conversation, as chat templates read them: as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.contents import Contents, text_of
from pegboard.plugins.api_openai.responses.custom import arguments_of

MAX_ITEMS = 100_000
ROLES = ("user", "assistant", "system", "developer")


def input_items(value: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`input` as items: a text is the user's message. Raises InvalidRequest where there is none."""
    if not value:
        raise InvalidRequest("input is empty", param="input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if len(value) > MAX_ITEMS:
        raise InvalidRequest(f"input may have at most {MAX_ITEMS} items", param="input")
    return value


def messages_of(
    items: Sequence[Mapping[str, object]], instructions: str, contents: Contents, *, given: int = 0
) -> list[dict[str, object]]:
    """Return the messages of a conversation. The last `given` items are the request's own, which errors name
    ``input.<n>``.

    An answer's thinking, text and calls, which are items of their own, become one message.
    """
    conversation = _Conversation(contents)
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    kept = len(items) - given
    for number, item in enumerate(items):
        conversation.add(item, f"input.{number - kept}", "previous_response_id" if number < kept else "")
    return conversation.messages


class _Conversation:
    """Messages so far."""

    def __init__(self, contents: Contents) -> None:
        self.messages: list[dict[str, Any]] = []
        self._contents = contents
        self._names: dict[str, str] = {}

    def add(self, item: Mapping[str, object], where: str, place: str = "") -> None:
        """Add an item, which stands at `where`. Media of it are said to be at `place`, if that is given."""
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, where, place)
        elif kind == "function_call":
            self._call(item, where, _string(item, "arguments", where))
        elif kind == "custom_tool_call":
            self._call(item, where, arguments_of(_string(item, "input", where)))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._output(item, where, place)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            text = text_of(parts, f"{where}.content", ("reasoning_text", "summary_text"))
            self.messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        else:
            raise InvalidRequest(
                f"{where}: items of type {str(kind)[:64]!r} are not supported by this server",
                param=f"{where}.type",
                code="unsupported",
            )

    def _message(self, item: Mapping[str, object], where: str, place: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise InvalidRequest(
                f"{where}.role must be one of {', '.join(ROLES)}, got {str(role)[:64]!r}", param=f"{where}.role"
            )
        if item.get("content") is None:
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
        if role != "assistant":
            content = self._contents.of(item["content"], f"{where}.content", place=place)
            self.messages.append({"role": role, "content": content})
            return
        text = self._contents.text(item["content"], f"{where}.content")
        last = self._answer()
        if last is not None and not last["content"] and "tool_calls" not in last:
            last["content"] = text
        else:
            self.messages.append({"role": role, "content": text})

    def _call(self, item: Mapping[str, object], where: str, arguments: str) -> None:
        identity, name = _string(item, "call_id", where), _string(item, "name", where)
        self._names[identity] = name
        message = self._answer()
        if message is None:
            message = {"role": "assistant", "content": ""}
            self.messages.append(message)
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": identity, "type": "function", "function": function})

    def _output(self, item: Mapping[str, object], where: str, place: str) -> None:
        identity = _string(item, "call_id", where)
        if identity not in self._names:
            raise InvalidRequest(
                f"{where}.call_id: no call before it has the id {identity[:64]!r}", param=f"{where}.call_id"
            )
        if item.get("output") is None:
            raise InvalidRequest(f"{where}.output is missing", param=f"{where}.output")
        told = self._contents.of(item["output"], f"{where}.output", place=place)
        self.messages.append({"role": "tool", "tool_call_id": identity, "name": self._names[identity], "content": told})

    def _answer(self) -> dict[str, Any] | None:
        """Return the assistant's message that is still going on, if any."""
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == "assistant" else None


def _string(item: Mapping[str, object], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or (not value and name not in ("arguments", "input")):
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
