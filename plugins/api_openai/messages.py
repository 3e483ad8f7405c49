"""Messages of a chat, checked, as templates read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pegboard.core.interfaces.errors import InvalidRequest

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def template_messages(messages: Sequence[object], templates: Iterable[str] = ()) -> list[dict[str, object]]:
    """Return messages with text for content: parts joined by a line break. A tool's answer gets the name that its call
    had, which some templates want. Roles are OpenAI's, and those that one of the `templates` speaks of.

    Raises InvalidRequest, with the path, for what is malformed or no text.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    names: dict[str, str] = {}
    sources = list(templates)
    return [_message(f"messages.{i}", message, names, sources) for i, message in enumerate(messages)]


def _message(where: str, message: object, names: dict[str, str], sources: Sequence[str]) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object", param=where)
    found = {name: value for name, value in message.items() if value is not None}
    role = _string(found, "role", where)
    if role not in ROLES and not any(f"'{role}'" in one or f'"{role}"' in one for one in sources):
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, got {role[:64]!r}", param=f"{where}.role"
        )
    if role != "assistant" and "content" not in found:
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    if "name" in found:
        _string(found, "name", where)
    found["content"] = text_of(found.get("content", ""), f"{where}.content")
    if role == "assistant":
        if "reasoning" in found:
            found.setdefault("reasoning_content", found.pop("reasoning"))
        if "reasoning_content" in found:
            _string(found, "reasoning_content", where)
        names.update(_calls(found.get("tool_calls", []), f"{where}.tool_calls"))
    elif role == "tool":
        identity = _string(found, "tool_call_id", where)
        if identity in names:
            found.setdefault("name", names[identity])
    return found


def _calls(calls: object, where: str) -> dict[str, str]:
    """Return names of functions by the ids of their calls."""
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    names: dict[str, str] = {}
    for i, call in enumerate(calls):
        path = f"{where}.{i}"
        if not isinstance(call, Mapping):
            raise InvalidRequest(f"{path} must be an object", param=path)
        if call.get("type", "function") != "function":
            raise InvalidRequest(f"{path}.type must be function", param=f"{path}.type")
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise InvalidRequest(f"{path}.function must be an object", param=f"{path}.function")
        name = _string(function, "name", f"{path}.function")
        if not isinstance(function.get("arguments", ""), str):
            raise InvalidRequest(
                f"{path}.function.arguments must be a string, JSON text", param=f"{path}.function.arguments"
            )
        if call.get("id") is not None:
            names[_string(call, "id", path)] = name
    return names


def text_of(content: object, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return a string, or parts of these kinds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    return "\n".join(_part(f"{where}.{i}", part, kinds) for i, part in enumerate(content))


def _part(where: str, part: Any, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = "refusal" if kind == "refusal" else "text"
    if kind not in (*kinds, "refusal"):
        raise InvalidRequest(
            f"{where}: this model reads text only, no parts of type {str(kind)[:64]!r}", param=where, code="unsupported"
        )
    return _string(part, key, where)


def _string(values: Mapping[str, Any], name: str, where: str) -> str:
    value = values.get(name)
    if not isinstance(value, str) or (not value and name in ("role", "id", "tool_call_id")):
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
