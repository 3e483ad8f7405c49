"""Contents of messages that may have pictures and video, as OpenAI's chats and responses spell them, and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.media_parts import refuse_others
from pegboard.toolkit.http.media_fields import detailed, media_input, own_settings
from pegboard.toolkit.media.inputs import MediaInput, MediaKind, MediaSettings

if TYPE_CHECKING:
    from pegboard.toolkit.media.service import MediaReader

Content = str | list[object]
Kinds = Mapping[str, tuple[MediaKind, str]]
"""By a part's type, what it is and the key that has its address."""

CHAT_PARTS: Kinds = {"image_url": ("image", "image_url"), "video_url": ("video", "video_url")}
TEXT_PARTS = ("text", "input_text", "output_text")
"""Parts that are text, whichever API they are of."""
RESPONSE_PARTS: Kinds = {
    "input_image": ("image", "image_url"),
    "input_video": ("video", "video_url"),
    "video_url": ("video", "video_url"),
}


class Contents:
    """Reads contents for a model: text, or for a `processor` of media also lists with MediaInput in them. `common` are
    the request's settings for all of its media.
    """

    def __init__(self, parts: Kinds, processor: MediaReader | None = None, common: MediaSettings | None = None) -> None:
        self._parts = parts
        self._processor = processor
        self._common = common or MediaSettings()

    def of(self, content: object, where: str, kinds: Sequence[str] = TEXT_PARTS, *, place: str = "") -> Content:
        """Return a text, parts of these `kinds` joined by a line break; or a list where there are media. These stand at
        `place`, if it is not their own path. Raises InvalidRequest, with the path, for anything else.
        """
        if self._processor is None or not isinstance(content, list):
            return text_of(content, where, kinds)
        named = [str(one.get("type")) if isinstance(one, Mapping) else "" for one in content]
        for i, kind in enumerate(named):
            if kind not in self._parts and kind not in (*kinds, "refusal"):
                known = ", ".join((*kinds, *self._parts))
                raise InvalidRequest(
                    f"{where}.{i}: parts of type {kind[:64]!r} are not supported; these are: {known}",
                    param=f"{where}.{i}",
                    code="unsupported",
                )
        if not any(kind in self._parts for kind in named):
            return text_of(content, where, kinds)
        return [
            self._item(one, kind, f"{where}.{i}", place)
            if kind in self._parts
            else {"type": "text", "text": _part(f"{where}.{i}", one, kinds)}
            for i, (one, kind) in enumerate(zip(content, named, strict=True))
        ]

    def text(self, content: object, where: str, kinds: Sequence[str] = TEXT_PARTS) -> str:
        """Return a content that has no place for media."""
        found = self.of(content, where, kinds)
        if not isinstance(found, str):
            where = next(one.place for one in found if isinstance(one, MediaInput))
            raise InvalidRequest(f"{where}: the assistant's messages are text", param=where, code="unsupported")
        return found

    def _item(self, part: Mapping[str, object], type_: str, where: str, place: str) -> MediaInput:
        kind, key = self._parts[type_]
        here = f"{where}.{key}"
        given = part.get(key)
        if part.get("file_id") is not None and given is None:
            raise InvalidRequest(
                f"{where}.file_id: this server keeps no files; send {key}, an address or a data: URL with the content",
                param=f"{where}.file_id",
                code="unsupported",
            )
        inner = given if isinstance(given, Mapping) else {"url": given}
        # Qwen's own API has settings beside the address, SGLang's in one object with it.
        said = {**part, **inner}
        settings = own_settings(said, where, kind, self._common)
        if kind == "image":
            settings = detailed(settings, said.get("detail"), f"{here}.detail" if inner is given else f"{where}.detail")
        item = media_input(kind, inner.get("url"), settings, here)
        refuse_others(self._processor, item)
        item.place = place or here
        return item


def text_of(content: object, where: str, kinds: Sequence[str] = TEXT_PARTS) -> str:
    """Return a string, or parts of these kinds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    return "\n".join(_part(f"{where}.{i}", part, kinds) for i, part in enumerate(content))


def _part(where: str, part: object, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in (*kinds, "refusal"):
        raise InvalidRequest(
            f"{where}: this model reads text only, no parts of type {str(kind)[:64]!r}", param=where, code="unsupported"
        )
    return string_of(part, "refusal" if kind == "refusal" else "text", where)


def string_of(values: Mapping[str, object], name: str, where: str) -> str:
    """Return a field that must be a string, and not an empty one where it names something."""
    value = values.get(name)
    if not isinstance(value, str) or (not value and name in ("role", "id", "tool_call_id")):
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
