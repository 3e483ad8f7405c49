"""A response as it begins: what the request said, in full."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import ModelInfo
    from pegboard.plugins.api_openai.responses.body import ResponseBody
    from pegboard.toolkit.chat.tool_calls import Tools

_FUNCTION = {
    "type": "function",
    "description": None,
    "strict": False,
    "parameters": {"type": "object", "properties": {}},
}
_CUSTOM = {"type": "custom", "description": "", "format": {"type": "text"}}


def response_of(info: ModelInfo, identity: str, body: ResponseBody, tools: Tools) -> dict[str, object]:
    """Return a response of the served model that has just begun."""
    defaults = info.sampling_defaults
    return {
        "id": identity,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "model": info.served_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id or None,
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "store": body.store,
        "temperature": body.in_force("temperature", defaults),
        "text": {"format": body.text.format or {"type": "text"}, "verbosity": body.text.verbosity or "medium"},
        "tool_choice": _choice(body.tool_choice, tools),
        "tools": [_tool(one) for one in body.tools],
        "top_logprobs": body.top_logprobs,
        "top_p": body.in_force("top_p", defaults),
        "truncation": body.truncation,
        "usage": None,
        "user": body.user or None,
    }


def _tool(tool: Mapping[str, object]) -> dict[str, object]:
    usual = _CUSTOM if tool.get("type") == "custom" else _FUNCTION
    said = {name: tool[name] for name in usual if tool.get(name) is not None}
    return {**usual, "name": tool["name"], **said}


def _choice(given: object, tools: Tools) -> object:
    """`tool_choice`, which may be an object."""
    if not isinstance(given, Mapping):
        return tools.choice
    if given["type"] != "allowed_tools":
        return {"type": given["type"], "name": tools.name}
    allowed = [{"type": one["type"], "name": one["name"]} for one in given["tools"]]
    return {"type": "allowed_tools", "mode": given["mode"], "tools": allowed}
