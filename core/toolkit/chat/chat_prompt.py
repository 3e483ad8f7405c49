"""A conversation as one chat template wants it: tools, earlier calls and roles that it does not know are put in words.

`rendering.render_chat` is for API plugins, and runs this in a helper process.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.toolkit.chat.chat_template import RESERVED, ChatTemplate


class ChatPrompt(msgspec.Struct, kw_only=True):
    """Everything that a prompt is made of, as plain values.

    `tokens` are the special tokens that templates read by name, `kwargs` what the request says to the template itself,
    `hints` what it hears only if it listens.
    `instructions` explain the tools to a model whose template does not read any; `written` has, by the index of a
    message with tool calls, the text that stands for them where the template does not read calls.
    """

    source: str
    messages: list[Any]
    tokens: dict[str, str] = {}
    tools: list[dict[str, Any]] = []
    instructions: str = ""
    written: dict[int, str] = {}
    kwargs: dict[str, Any] = {}
    hints: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def render(self, template: ChatTemplate) -> str:
        """Return the text. Raises InvalidRequest for what the template refuses, and for kwargs that it does not
        read.
        """
        allowed = template.variables - RESERVED - self.tokens.keys()
        self._check_kwargs(allowed)
        hints = {name: value for name, value in self.hints.items() if name in allowed}
        messages = [self._message(i, one, template) for i, one in enumerate(self.messages)]
        if self.tools and self.instructions and not template.reads("tools"):
            messages = _instructed(messages, self.instructions)
        return template.render(
            messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=self.tools or None,
            variables={**self.tokens, **hints, **self.kwargs},
        )

    def _check_kwargs(self, allowed: frozenset[str]) -> None:
        for name in self.kwargs:
            if name not in allowed:
                known = ", ".join(sorted(allowed)) or "nothing of its own"
                raise InvalidRequest(
                    f"chat_template_kwargs: this model's chat template does not read {name[:64]!r} from requests; it "
                    f"reads: {known}",
                    param="chat_template_kwargs",
                )

    def _message(self, index: int, message: Any, template: ChatTemplate) -> Any:
        if not isinstance(message, dict):
            return message
        if message.get("role") == "developer" and "developer" not in template.source:
            message = {**message, "role": "system"}
        if index in self.written and "tool_calls" not in template.source:
            text = message.get("content")
            parts = [text if isinstance(text, str) else "", self.written[index]]
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            message["content"] = "\n".join(filter(None, parts))
        return message


def _instructed(messages: list[Any], instructions: str) -> list[Any]:
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") == "system" and isinstance(first.get("content"), str):
        text = "\n\n".join(filter(None, [first["content"], instructions]))
        return [{**first, "content": text}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]
