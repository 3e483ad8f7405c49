"""Messages of a chat, checked, as templates read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.contents import CHAT_PARTS, Contents, string_of

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_FUNCTION_ROLE = re.compile(r"role['\"\]]*\s*==\s*['\"]function['\"]")
"""How templates that have such a role ask for it; many more speak of functions."""


def template_messages(
    messages: Sequence[object], templates: Iterable[str] = (), contents: Contents | None = None
) -> list[dict[str, object]]:
    """Return messages with contents as `contents` reads them: text, if it is None. A tool's answer gets the name that
    its call had, which some templates want. Roles are OpenAI's, and those that one of the `templates` speaks of.

    Raises InvalidRequest, with the path, for what is malformed or cannot be read.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    names: dict[str, str] = {}
    sources, contents = list(templates), contents or Contents(CHAT_PARTS)
    return [_message(f"messages.{i}", message, names, sources, contents) for i, message in enumerate(messages)]


def _message(
    where: str, message: object, names: dict[str, str], sources: Sequence[str], contents: Contents
) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object", param=where)
    found = {name: value for name, value in message.items() if value is not None}
    role = string_of(found, "role", where)
    if role == "function" and not any(_FUNCTION_ROLE.search(one) for one in sources):
        # What tools were before they were tools.
        called = [identity for identity, name in names.items() if name == found.get("name")]
        role = "tool"
        found |= {"role": role, "tool_call_id": called[-1] if called else "call_0"}
    if role == "assistant" and "tool_calls" not in found and isinstance(found.get("function_call"), Mapping):
        found["tool_calls"] = [{"id": f"call_{len(names)}", "type": "function", "function": found.pop("function_call")}]
    if role not in ROLES and not any(f"'{role}'" in one or f'"{role}"' in one for one in sources):
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, got {role[:64]!r}", param=f"{where}.role"
        )
    if role not in ("assistant", "tool") and "content" not in found:
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    if "name" in found:
        string_of(found, "name", where)
    read = contents.text if role == "assistant" else contents.of
    found["content"] = read(found.get("content", ""), f"{where}.content")
    if role == "assistant":
        if "reasoning" in found:
            found.setdefault("reasoning_content", found.pop("reasoning"))
        if "reasoning_content" in found:
            string_of(found, "reasoning_content", where)
        names.update(_calls(found.get("tool_calls", []), f"{where}.tool_calls"))
    elif role == "tool":
        identity = string_of(found, "tool_call_id", where)
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
        name = string_of(function, "name", f"{path}.function")
        if not isinstance(function.get("arguments") or "", (str, Mapping)):
            raise InvalidRequest(
                f"{path}.function.arguments must be JSON text, or an object", param=f"{path}.function.arguments"
            )
        if call.get("id") is not None:
            names[string_of(call, "id", path)] = name
    return names
