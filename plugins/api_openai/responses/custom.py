"""Custom tools, which take free text: to the model they are functions with one string for an argument."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.core.interfaces.errors import InvalidRequest

_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|u[0-9a-fA-F]{4}|["\\/bfnrt])')
_LONE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_CUT = re.compile(r"(\\(u[0-9a-fA-F]{0,3})?)?")
_LOOK_AHEAD = 64
"""Characters in which the head of the arguments is over."""


def names_of(tools: Sequence[Mapping[str, object]]) -> frozenset[str]:
    """Return the names of custom tools."""
    return frozenset(str(one.get("name")) for one in tools if one.get("type") == "custom")


def as_functions(tools: Sequence[Any]) -> list[Any]:
    """`tools` with a function in place of each custom tool. Raises InvalidRequest for inputs with a grammar."""
    return [_function(f"tools.{i}", tool) if _is_custom(tool) else tool for i, tool in enumerate(tools)]


def as_choice(choice: object) -> object:
    """`tool_choice` with a function in place of each custom tool."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "custom":
        return {**choice, "type": "function"}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {**choice, "tools": [as_choice(one) for one in choice["tools"]]}
    return choice


def arguments_of(text: str) -> str:
    """Return the arguments of the function's call that stands for a custom tool's, as JSON."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _is_custom(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "custom"


def _function(where: str, tool: Mapping[str, object]) -> dict[str, object]:
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, Mapping) or form.get("type") != "text":
        raise InvalidRequest(
            f"{where}.format: this server reads the input of custom tools as text only, and follows no grammar in it",
            param=f"{where}.format",
            code="unsupported",
        )
    kept = {name: tool[name] for name in ("name", "description") if name in tool}
    return {"type": "function", **kept, "parameters": _PARAMETERS, "strict": True}


class InputReader:
    """The input of a custom tool's call, from the arguments of the function's, ``{"input": "..."}``, as they come.

    Where a model writes something else, the input is all of it, at the end.
    """

    def __init__(self) -> None:
        self._held = ""
        self._state = "head"

    def feed(self, text: str) -> str:
        """Return what the next piece of JSON adds to the input."""
        if self._state == "over":
            return ""
        self._held += text
        if self._state == "head":
            head = _HEAD.match(self._held)
            if head is None:
                self._state = "other" if len(self._held) > _LOOK_AHEAD else "head"
                return ""
            self._state, self._held = "input", self._held[head.end() :]
        return self._read() if self._state == "input" else ""

    def finish(self) -> str:
        """Return the rest."""
        if self._state in ("head", "other"):
            return self._whole()
        return ""

    def _read(self) -> str:
        found: list[str] = []
        at, text = 0, self._held
        while at < len(text):
            if plain := _PLAIN.match(text, at):
                found.append(plain[0])
                at = plain.end()
            elif text[at] == '"':
                self._state = "over"
                break
            elif (escape := _ESCAPE.match(text, at)) and not self._may_grow(text, escape):
                found.append(_sound(json.loads(f'"{escape[0]}"')))
                at = escape.end()
            elif escape or _CUT.fullmatch(text, at):
                break
            else:
                found.append(text[at])
                at += 1
        self._held = text[at:]
        return "".join(found)

    @staticmethod
    def _may_grow(text: str, escape: re.Match[str]) -> bool:
        """Return whether it is the first half of a pair, and the other half may be on its way."""
        return bool(_LONE.fullmatch(escape[0]) and _CUT.fullmatch(text, escape.end()))

    def _whole(self) -> str:
        try:
            value = json.loads(self._held)
        except (ValueError, RecursionError):
            return self._held
        found = value.get("input") if isinstance(value, dict) else None
        return _sound(found) if isinstance(found, str) else self._held


def _sound(text: str) -> str:
    """Without halves of pairs, which no answer may have."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
