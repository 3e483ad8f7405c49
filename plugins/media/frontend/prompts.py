"""MediaFrontend: all that prompts with media need before they reach the scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.frontend import Expanded, PromptExpander
from pegboard.plugins.media.frontend.process import placed
from pegboard.toolkit.media.inputs import EncodedForm, MediaPrompt

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import AnnotatedPrompt
    from pegboard.core.interfaces.frontend import Expand, TokenIds
    from pegboard.plugins.media.api import MediaProcessor
    from pegboard.plugins.media.frontend.layout import Layouts
    from pegboard.plugins.media.frontend.prepare import Preparer
    from pegboard.plugins.media.frontend.process import PreparedItem
    from pegboard.toolkit.media.inputs import MediaInput, MediaKind

NAMES: dict[MediaKind, str] = {"image": "pictures", "video": "videos"}


@dataclasses.dataclass(frozen=True, slots=True)
class MediaFrontend(PromptExpander):
    """What prepares the media of one engine's requests, and lays them out. `kinds` are those that it takes, at most
    `max_items` in one prompt. `width` is how many numbers a token's states have.
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

    def check(self, prompt: AnnotatedPrompt) -> None:
        """Raise InvalidRequest for more items than a prompt may have, for those of a kind that the model does not take,
        and for states whose form cannot be.
        """
        media = _media(prompt)
        if len(media) > self.max_items:
            text = f"{len(media)} pictures and videos are more than the {self.max_items} that a prompt may have"
            raise InvalidRequest(f"{text} (media.max_items)", param=media[-1].place or None, code="too_many_media")
        for item in media:
            if item.kind not in self.kinds:
                text = f"this model takes no {NAMES[item.kind]}"
                raise InvalidRequest(text, param=item.place or None, code="unsupported")
            if item.encoded is not None:
                try:
                    msgspec.convert(msgspec.to_builtins(item.encoded), EncodedForm)
                except (msgspec.ValidationError, OverflowError) as error:
                    raise placed(InvalidRequest(str(error), code="invalid_media"), item.place) from None

    def takes(self, prompt: object, ids: TokenIds) -> bool:
        media = _media(prompt)
        if not media and not self.layouts.concern(ids):
            return False
        self.layouts.check_places(ids.tolist(), media)
        return True

    @contextlib.asynccontextmanager
    async def prepared(self, prompts: Sequence[object], asker: str) -> AsyncIterator[list[Expand]]:
        media = [one for prompt in prompts for one in _media(prompt)]
        if not media:
            yield self._expands(prompts, ())
            return
        async with self.preparer.prepared(media, asker) as items:
            yield self._expands(prompts, items)

    @contextlib.contextmanager
    def prepared_now(self, prompts: Sequence[object]) -> Iterator[list[Expand]]:
        media = [one for prompt in prompts for one in _media(prompt)]
        if not media:
            yield self._expands(prompts, ())
            return
        with self.preparer.prepared_now(media) as items:
            yield self._expands(prompts, items)

    def _expands(self, prompts: Sequence[object], items: Sequence[PreparedItem]) -> list[Expand]:
        """Give each prompt its items."""
        left = iter(items)
        found: list[Expand] = []
        for prompt in prompts:
            media = _media(prompt)
            own = [next(left) for _ in media]
            found.append(functools.partial(self.expand, media=media, items=own))
        return found

    def expand(self, ids: TokenIds, media: Sequence[MediaInput], items: Sequence[PreparedItem]) -> Expanded | None:
        """Return a prompt with its items in it, or None where it has none; `media` is what was stated of them.

        Raises InvalidRequest where items and placeholders do not match, and for states of another width.
        """
        for stated, one in zip(media, items, strict=True):
            states = one.item.encoded
            if states is not None and states.shape[1] != self.width:
                text = f"its states have {states.shape[1]} numbers a token; this model's have {self.width}"
                raise placed(InvalidRequest(text, code="invalid_media"), stated.place)
        found = self.layouts.lay_out(ids.tolist(), [one.item for one in items])
        if found.media is None:
            return None
        note = f"{sum(found.tokens.values())} tokens of the prompt are those of its media"
        return Expanded(found.ids, found.media, found.tokens, note, tuple(one.file for one in items))

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


def _media(prompt: object) -> tuple[MediaInput, ...]:
    return prompt.media if isinstance(prompt, MediaPrompt) else ()
