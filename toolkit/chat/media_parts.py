"""Pictures and video in a conversation: taken out for the engine, and replaced by parts for the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.chat_prompt import MEDIA_NAMES, ChatPrompt
from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt

if TYPE_CHECKING:
    from pegboard.toolkit.media.service import MediaReader


@dataclass(slots=True)
class MediaParts:
    """The media of one conversation for a model, whose `processor` is None where it takes none.

    `take` is called for each message, in order; `items` are then the media in theirs.
    """

    processor: MediaReader | None
    items: list[MediaInput] = field(default_factory=list)

    def take(self, content: object) -> object:
        """Return a message's content, where numbers stand for the items in a list of parts. Raises InvalidRequest for
        media that the model does not take, and for what is neither a part nor media.
        """
        if not isinstance(content, list):
            return content
        if self.processor is None and not any(isinstance(one, MediaInput) for one in content):
            return content
        return [self._taken(one) for one in content]

    def _taken(self, part: object) -> object:
        if not isinstance(part, MediaInput):
            if not isinstance(part, Mapping):
                raise InvalidRequest("messages: the parts of a content must be objects", param="messages")
            return part
        refuse_others(self.processor, part)
        self.items.append(part)
        return len(self.items) - 1

    def describe(self, prompt: ChatPrompt) -> None:
        """Tell a prompt of the media that its messages have, and of what the model knows."""
        if self.processor is not None:
            prompt.media = [(one.kind, one.place) for one in self.items]
            prompt.parts = {kind: dict(self.processor.part(kind)) for kind in sorted(self.processor.kinds)}
            prompt.reserved = sorted(self.processor.reserved)

    def prompt(self, text: str, literals: Sequence[tuple[int, int]]) -> str | MediaPrompt:
        """Return the prompt of the rendered conversation: its text, where that says all."""
        if not self.items and not literals:
            return text
        spans = tuple((start, stop) for start, stop in literals)
        return MediaPrompt(base=text, media=tuple(self.items), literals=spans)


def prompt_text(prompt: str | MediaPrompt) -> str:
    """Return the prompt of a conversation as text, media being what the template made of them."""
    return prompt if isinstance(prompt, str) else str(prompt.base)


def refuse_others(processor: MediaReader | None, item: MediaInput) -> None:
    """Raise InvalidRequest for media of a kind that the model does not take."""
    if processor is None or item.kind not in processor.kinds:
        where = item.place or "messages"
        taken = " and ".join(MEDIA_NAMES[kind] for kind in sorted(processor.kinds)) if processor is not None else ""
        message = f"{where}: this model reads {taken or 'text only'}, no {MEDIA_NAMES[item.kind]}"
        raise InvalidRequest(message, param=where, code="unsupported")
