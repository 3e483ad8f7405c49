"""MediaFrontend: all that prompts with media need before they reach the scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import MediaPrompt
    from pegboard.core.interfaces.media import MediaKind, MediaProcessor
    from pegboard.core.pipeline.frontend.media.layout import Layouts
    from pegboard.core.pipeline.frontend.media.prepare import Preparer

NAMES: dict[MediaKind, str] = {"image": "pictures", "video": "videos"}


@dataclasses.dataclass(frozen=True, slots=True)
class MediaFrontend:
    """What prepares the media of one engine's requests, and lays them out. `kinds` are those that it takes, at most
    `max_items` in one prompt.
    """

    preparer: Preparer
    layouts: Layouts
    kinds: frozenset[MediaKind]
    max_items: int

    @property
    def processor(self) -> MediaProcessor:
        return self.layouts.processor

    def with_features(self, features: Collection[str]) -> MediaFrontend | None:
        """Return what there is of it for an engine with these features, one of which is `media.<kind>` for each kind
        that it encodes; None where nothing is left.
        """
        kinds = frozenset(kind for kind in self.processor.kinds if f"media.{kind}" in features)
        return dataclasses.replace(self, kinds=kinds) if kinds else None

    def check(self, prompt: MediaPrompt) -> None:
        """Raise InvalidRequest for more items than a prompt may have, or of a kind that the model does not take."""
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
