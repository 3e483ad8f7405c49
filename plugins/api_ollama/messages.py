"""Ollama's messages as chat templates read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.tool_calls import Tools
from pegboard.toolkit.chat.tool_schema import FunctionSource, checked_functions, wrong
from pegboard.toolkit.http.media_fields import media_data
from pegboard.toolkit.media.inputs import MediaInput, MediaSettings

_ROLES = ("system", "user", "assistant", "tool")
_NO_IDS = "000000000"
"""Calls have ids in templates, and may have none here: these are as long as the strictest templates want them."""


def chat_tools(tools: Sequence[object]) -> Tools:
    """Return the tools of a chat. Raises InvalidRequest with the path of what is wrong."""
    return Tools(checked_functions(tools, _function))


def _function(where: str, tool: Mapping[str, object]) -> FunctionSource:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise wrong(f"{where}.function", "must be an object")
    return FunctionSource(f"{where}.function", function)


def template_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return a conversation with OpenAI's fields. A tool's result belongs to the call of its id, else to the first one
    of its name that has none yet. Raises InvalidRequest, naming the place.
    """
    reader = _Reader()
    return [reader.message(message, f"messages.{index}") for index, message in enumerate(messages)]


def user_message(text: str, images: Sequence[str], where: str = "images") -> dict[str, object]:
    """Return a user's message."""
    return {"role": "user", "content": _content(text, images, where)}


class _Reader:
    """Reads messages, one after the other."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []
        """Ids and names of calls that have no result yet."""

    def message(self, message: Mapping[str, object], where: str) -> dict[str, object]:
        """Return one message."""
        role = message.get("role")
        if role not in _ROLES:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
        images = message.get("images") or []
        if not isinstance(images, list):
            raise InvalidRequest(f"{where}.images must be a list", param=f"{where}.images")
        found: dict[str, object] = {"role": role}
        found["content"] = _content(_text(message, "content", where), images, f"{where}.images")
        if role == "assistant":
            if thinking := _text(message, "thinking", where):
                found["reasoning_content"] = thinking
            if calls := message.get("tool_calls"):
                found["tool_calls"] = self._calls(calls, f"{where}.tool_calls")
        elif role == "tool":
            identity, name = self._answered(_text(message, "tool_call_id", where), _text(message, "tool_name", where))
            found |= {key: value for key, value in (("tool_call_id", identity), ("name", name)) if value}
        return found

    def _calls(self, calls: object, where: str) -> list[dict[str, object]]:
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where} must be a list", param=where)
        return [self._call(call, f"{where}.{index}") for index, call in enumerate(calls)]

    def _call(self, call: object, where: str) -> dict[str, object]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise InvalidRequest(f"{where}.function must be an object", param=f"{where}.function")
        name = _text(function, "name", f"{where}.function")
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, Mapping):
            param = f"{where}.function.arguments"
            raise InvalidRequest(f"{param} must be an object", param=param)
        self._count += 1
        identity = _text(call, "id", where) or f"{_NO_IDS}{self._count}"[-len(_NO_IDS) :]
        self._open.append((identity, name))
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _answered(self, identity: str, name: str) -> tuple[str, str]:
        """Return the call that a result belongs to, of which it says one of these, or nothing."""
        for call in self._open:
            if call[0] == identity or (not identity and name in ("", call[1])):
                self._open.remove(call)
                return call
        return identity, name


def _content(text: str, images: Sequence[object], where: str) -> object:
    """Return a message's content: the pictures come first."""
    found: list[MediaInput | dict[str, str]] = [
        media_data("image", image, MediaSettings(), f"{where}.{index}") for index, image in enumerate(images)
    ]
    return [*found, {"type": "text", "text": text}] if found else text


def _text(fields: Mapping[str, object], name: str, where: str) -> str:
    found = fields.get(name)
    if found is not None and not isinstance(found, str):
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return found or ""
