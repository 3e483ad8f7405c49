"""Pictures and videos of /generate, as SGLang has them: beside prompts whose placeholders the client has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_native.bodies import each
from pegboard.plugins.api_native.requests import GenerateBody, Prompt
from pegboard.toolkit.chat.media_parts import refuse_others
from pegboard.toolkit.http.media_fields import common_settings, encoded_media, media_data, own_settings
from pegboard.toolkit.media.inputs import MediaInput, MediaKind, MediaPrompt

if TYPE_CHECKING:
    from pegboard.toolkit.media.service import MediaReader

Item = str | dict[str, object]
Data = Item | list[Item | list[Item] | None] | None
_FIELDS: dict[str, MediaKind] = {"image_data": "image", "video_data": "video"}


class MediaGenerateBody(GenerateBody):
    """Body of `/generate` for a model that takes pictures or video."""

    taken = tuple(_FIELDS)

    image_data: Data = None
    """Pictures for the placeholders of the prompt, in their order: one or a list, each an address (`data:`, `https:`)
    or base64, or an object with the states of one that is encoded already: `states`, `grid` and `format`. In a batch
    one for all prompts, or a list with one, a list or null for each. They go before videos."""
    video_data: Data = None
    """The same of videos."""
    mm_processor_kwargs: object = None
    """How they are read: `min_pixels`, `max_pixels`, and for videos `fps` or `num_frames`."""

    def with_media(self, prompts: Sequence[str | list[int]], processor: MediaReader | None) -> list[Prompt]:
        """As GenerateBody's. The body has no media afterwards: it stays until the answer has ended."""
        common = common_settings(self.mm_processor_kwargs)
        found: list[list[MediaInput]] = [[] for _ in prompts]
        for field, kind in _FIELDS.items():
            settings = own_settings({}, field, kind, common)
            for items, (data, where) in zip(found, self._of_each(field, len(prompts)), strict=True):
                for one, place in _listed(data, where):
                    if isinstance(one, Mapping):
                        items.append(encoded_media(kind, one, place))
                    else:
                        items.append(media_data(kind, one, settings, place))
                    refuse_others(processor, items[-1])
            setattr(self, field, None)
        return [
            MediaPrompt(base=prompt, media=tuple(items)) if items else prompt
            for prompt, items in zip(prompts, found, strict=True)
        ]

    def _of_each(self, field: str, count: int) -> list[tuple[object, str]]:
        """Return what each prompt has, and where it stands."""
        given = getattr(self, field)
        if self.batch:
            several = each(given, count, field)
            return [(one, f"{field}.{i}" if isinstance(given, list) else field) for i, one in enumerate(several)]
        if isinstance(given, list) and any(isinstance(one, list) for one in given):
            raise InvalidRequest(f"{field}: lists in a list are for several prompts", param=field)
        return [(given, field)]


def _listed(data: object, where: str) -> list[tuple[object, str]]:
    """Return one prompt's items with their places. What is empty is none."""
    if isinstance(data, list):
        return [(one, f"{where}.{i}") for i, one in enumerate(data) if one]
    return [(data, where)] if data else []
