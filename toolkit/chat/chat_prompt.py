"""A conversation in the form that a chat template expects: tools, earlier calls and roles that it lacks become text.

`rendering.render_chat` is for API plugins, and runs this in a helper process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.json_value import JsonValue
from pegboard.toolkit.chat.chat_template import RESERVED, ChatTemplate, ChatTemplateError
from pegboard.toolkit.chat.provenance import Found, Spellings, counted
from pegboard.toolkit.chat.template_reading import Reading, reading_of

MEDIA_NAMES = {"image": "pictures", "video": "videos"}
"""What kinds of media are called, many of them."""

SWITCHES = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
"""Names that clients say to every model, and that mean nothing to a template which does not read them."""


class PromptText(msgspec.Struct):
    """A rendered conversation. `literals` are as of MediaPrompt."""

    text: str
    literals: list[tuple[int, int]] = []


class ChatPrompt(msgspec.Struct, kw_only=True):
    """Everything that a prompt is made of, as plain values.

    `tokens` are the special tokens that templates read by name, `kwargs` what the request says to the template itself,
    `hints` what it hears only if it listens.
    `instructions` explain the tools to a model whose template does not read any; `written` has, by the index of a
    message with tool calls, the text that stands for them where the template does not read calls.
    `media` has the kind of each item and its place in the request. In lists of parts an item is its number; `parts`
    says what the template reads there, by kind. `reserved` are spellings that only the template may make.
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
    media: list[tuple[str, str]] = []
    parts: dict[str, dict[str, object]] = {}
    reserved: list[str] = []

    def render(self, template: ChatTemplate) -> PromptText:
        """Return the text. Raises InvalidRequest for what the template refuses, for kwargs that it does not read, and
        where it does not show each item of media once.
        """
        allowed = template.variables - RESERVED - self.tokens.keys()
        self._check_kwargs(allowed)
        hints = {name: value for name, value in self.hints.items() if name in allowed}
        kwargs = {name: value for name, value in self.kwargs.items() if name in allowed}
        asked = msgspec.structs.replace(self, hints=hints, kwargs=kwargs)
        return asked._with_media(template) if self.reserved else PromptText(asked._rendered(template))

    def _with_media(self, template: ChatTemplate) -> PromptText:
        readings = {kind: reading_of(template, part, self.reserved, self.tokens) for kind, part in self.parts.items()}
        for kind, where in self.media:
            if readings[kind].made == Counter():
                message = f"{where}: this model's chat template has no place for {MEDIA_NAMES[kind]}"
                raise InvalidRequest(message, param=where, code="chat_template")
        only_parts = any(one.parts and not one.texts for one in readings.values())
        spellings = Spellings(self.reserved)
        hidden = self._changed(spellings.hide)
        try:
            text = hidden._rendered(template, only_parts=only_parts)
        except ChatTemplateError as error:
            raise ChatTemplateError(spellings.restored(error.message)) from None
        made = spellings.find(text)
        joined = hidden._joined(template, text, made, spellings, only_parts) if made else []
        if self.media:
            self._check_media(counted(made) - counted(joined), readings)
        return PromptText(*spellings.show(text, joined))

    def _rendered(self, template: ChatTemplate, *, only_parts: bool = False) -> str:
        messages = [self._message(i, one, template) for i, one in enumerate(self.messages)]
        if self.tools and self.instructions and not template.reads("tools"):
            messages = _instructed(messages, self.instructions, in_parts=bool(self.reserved))
        for place, one in enumerate(messages if self.reserved else ()):
            content = one.get("content") if isinstance(one, dict) else None
            if isinstance(content, list):
                messages[place] = {**one, "content": [self._part(part) for part in content]}
            elif only_parts and isinstance(content, str):
                messages[place] = {**one, "content": [{"type": "text", "text": content}]}
        return template.render(
            messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=self.tools or None,
            variables={**self.tokens, **self.hints, **self.kwargs},
        )

    def _changed(self, change: Callable[[JsonValue], JsonValue]) -> ChatPrompt:
        """Return the same with `change` applied to whatever a client says."""
        return msgspec.structs.replace(
            self,
            messages=change(self.messages),
            tools=change(self.tools),
            instructions=change(self.instructions),
            written={index: change(text) for index, text in self.written.items()},
            kwargs={name: change(value) for name, value in self.kwargs.items()},
            hints={name: change(value) for name, value in self.hints.items()},
        )

    def _joined(
        self, template: ChatTemplate, text: str, made: Sequence[Found], spellings: Spellings, only_parts: bool
    ) -> Sequence[Found]:
        """Return those of the spellings in this conversation, whose texts are hidden, that are not the template's: a
        text has come to stand next to another one, or to something of the template's, which completes it.
        """
        marked = self._changed(spellings.mark)
        if marked == self:
            return []
        refusal = InvalidRequest(
            "messages: side by side in the prompt, texts of these messages spell a token that means media to this "
            "model; put something else between them",
            param="messages",
        )
        try:
            again = marked._rendered(template, only_parts=only_parts)
        except InvalidRequest:
            raise refusal from None
        left = spellings.find(again)
        if spellings.unmarked(again) == text:
            return [one for one in made if one not in set(left)]
        # The template looks at the marked texts. That does not matter where nothing was joined.
        if [one for _, one in left] != [one for _, one in made]:
            raise refusal
        return []

    def _check_media(self, made: Counter[str], readings: Mapping[str, Reading]) -> None:
        """Raise InvalidRequest where items have certainly been left out, or shown twice: where each spelling that
        belongs to their kind is there less often than items are, or more often. What else may be wrong, the model's
        processor knows.
        """
        expected: Counter[str] = Counter()
        for kind, _ in self.media:
            of_one = readings[kind].made
            if of_one is None:
                return
            expected += of_one
        for kind in dict(self.media):
            own = readings[kind].made or Counter()
            if all(made[one] < expected[one] for one in own):
                how = "leaves out some of the {}: it may not read them in messages of every role"
            elif all(made[one] > expected[one] for one in own):
                how = "shows some of the {} more than once"
            else:
                continue
            message = f"messages: this model's chat template {how.format(MEDIA_NAMES[kind])}"
            raise InvalidRequest(message, param="messages", code="chat_template")

    def _check_kwargs(self, allowed: frozenset[str]) -> None:
        for name in self.kwargs:
            if name not in allowed and name not in SWITCHES:
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

    def _part(self, part: object) -> object:
        return self.parts[self.media[part][0]] if isinstance(part, int) else part


def _instructed(messages: list[Any], instructions: str, *, in_parts: bool) -> list[Any]:
    """Return messages of which the first one explains tools. `in_parts` says that contents may be lists."""
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") == "system":
        content = first.get("content")
        if isinstance(content, str):
            text = "\n\n".join(filter(None, [content, instructions]))
            return [{**first, "content": text}, *messages[1:]]
        if isinstance(content, list) and in_parts:
            return [{**first, "content": [*content, {"type": "text", "text": f"\n\n{instructions}"}]}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]
