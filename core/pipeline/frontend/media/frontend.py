"""MediaFrontend: all that prompts with media need before they reach the scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.media import EncodedForm
from pegboard.core.pipeline.frontend.media.process import placed

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import MediaInput, MediaPrompt
    from pegboard.core.interfaces.media import MediaKind, MediaProcessor
    from pegboard.core.pipeline.frontend.media.layout import LaidOut, Layouts
    from pegboard.core.pipeline.frontend.media.prepare import Preparer
    from pegboard.core.pipeline.frontend.media.process import PreparedItem

NAMES: dict[MediaKind, str] = {"image": "pictures", "video": "videos"}


@dataclasses.dataclass(frozen=True, slots=True)
class MediaFrontend:
    """What prepares the media of one engine's requests, and lays them out. `kinds` are those that it takes, at most
    `max_items` in one prompt. `width` is ModelInfo's.
    """

    preparer: Preparer
    layouts: Layouts
    kinds: frozenset[MediaKind]
    max_items: int
    width: int = 0

    @property
    def processor(self) -> MediaProcessor:
        return self.layouts.processor

    def with_features(self, features: Collection[str], width: int = 0) -> MediaFrontend | None:
        """Return what there is of it for an engine with these features, one of which is `media.<kind>` for each kind
        that it encodes, to states of this width; None where nothing is left.
        """
        kinds = frozenset(kind for kind in self.processor.kinds if f"media.{kind}" in features)
        return dataclasses.replace(self, kinds=kinds, width=width) if kinds else None

    def check(self, prompt: MediaPrompt) -> None:
        """Raise InvalidRequest for more items than a prompt may have, for those of a kind that the model does not take,
        and for states whose form cannot be.
        """
        count = len(prompt.media)
        if count > self.max_items:
            text = f"{count} pictures and videos are more than the {self.max_items} that a prompt may have"
            raise InvalidRequest(
                f"{text} (media.max_items)", param=prompt.media[-1].place or None, code="too_many_media"
            )
        for item in prompt.media:
            if item.kind not in self.kinds:
                text = f"this model takes no {NAMES[item.kind]}"
                raise InvalidRequest(text, param=item.place or None, code="unsupported")
            if item.encoded is not None:
                try:
                    msgspec.convert(msgspec.to_builtins(item.encoded), EncodedForm)
                except (msgspec.ValidationError, OverflowError) as error:
                    raise placed(InvalidRequest(str(error), code="invalid_media"), item.place) from None

    def lay_out(self, ids: Sequence[int], media: Sequence[MediaInput], items: Sequence[PreparedItem]) -> LaidOut:
        """Return a prompt with its items in it; `media` is what was stated of them.

        Raises InvalidRequest where items and placeholders do not match, and for states of another width.
        """
        for stated, one in zip(media, items, strict=True):
            states = one.item.encoded
            if states is not None and states.shape[1] != self.width:
                text = f"its states have {states.shape[1]} numbers a token; this model's have {self.width}"
                raise placed(InvalidRequest(text, code="invalid_media"), stated.place)
        return self.layouts.lay_out(ids, [one.item for one in items])

    def figures(self) -> dict[str, object]:
        """Return counters and gauges as plain values, for `/server_info` and metrics."""
        preparer = self.preparer
        return {
            **preparer.stats.figures(),
            "open": preparer.open,
            "files": preparer.store.files,
            "bytes_in_flight": preparer.store.bytes,
            "helpers_lost": preparer.pool.lost,
        }

    def close(self) -> None:
        """End helpers, threads and files. May be called twice."""
        self.preparer.close()
