"""What the fake engine client makes of media: the toy's pictures and videos, prepared in this process."""

from __future__ import annotations

import base64
import binascii
import io
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pegboard.conformance.rig.media_toy import KEY, TOKENS, ToyProcessor
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.media.api import MediaContext, MediaItem, MediaLayout, MediaProcessor, MediaShape, MediaSource
from pegboard.plugins.media.frontend.encoded import copy_states
from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt

FIRST_ID = 0x10F000
"""The id of the first of the toy's tokens, for a tokenizer whose ids are characters; the others follow."""
_TOKEN = re.compile("|".join(map(re.escape, TOKENS)))


def fake_processor() -> ToyProcessor:
    """Return the toy's processor for a model that is not there. A patch is one pixel."""
    ids = {"image_token_id": FIRST_ID + 1, "video_token_id": FIRST_ID + 2}
    return ToyProcessor(NoOptions(), MediaContext(Path(), {KEY: {**ids, "block": 1}}))


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A prompt as the engine would run it. `data` has the bytes of each item, in the order of the placeholders."""

    prompt: MediaPrompt
    data: tuple[bytes, ...]
    layout: MediaLayout

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of media by kind."""
        found: Counter[str] = Counter()
        for span in self.layout.spans:
            found[self.prompt.media[span.item].kind] += span.count
        return dict(found)

    @property
    def text(self) -> str:
        """The prompt's text, in which each token that means media is a character of its own."""
        return "".join(map(chr, self.layout.ids.tolist()))


@dataclass
class FakeMedia:
    """Reads media as a server would: `data:` addresses, and those of `web`. Errors have an item's place."""

    processor: MediaProcessor
    web: Mapping[str, bytes] = field(default_factory=dict)

    def lay_out(self, prompt: MediaPrompt) -> LaidOut:
        """Return a prompt with its media in it."""
        data = tuple(map(self._bytes, prompt.media))
        items = [self._item(one, content) for one, content in zip(prompt.media, data, strict=True)]
        layout = self.processor.lay_out(ids_of(prompt), items, lambda text: [ord(char) for char in text])
        return LaidOut(prompt, data, layout)

    def _bytes(self, item: MediaInput) -> bytes:
        if item.data:
            return item.data
        if item.url.startswith("data:"):
            try:
                return base64.b64decode(item.url.partition(",")[2], validate=True)
            except binascii.Error:
                raise _wrong(item, "this is not base64") from None
        if item.url not in self.web:
            raise _wrong(item, "this cannot be fetched")
        return self.web[item.url]

    def _item(self, item: MediaInput, data: bytes) -> MediaItem:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            try:
                shape = self._shape(item, Path(file.name))
            except InvalidRequest as error:
                raise _wrong(item, error.message) from None
        return MediaItem(item.kind, bytes(32), "fake", shape.shape, shape.grid, shape.pieces, shape.times)

    def _shape(self, item: MediaInput, file: Path) -> MediaShape:
        if item.encoded is None:
            return self.processor.prepare(MediaSource(item.kind, file, item.settings), io.BytesIO())
        states = copy_states(item.encoded, file, io.BytesIO())
        return self.processor.shape_of(item.kind, item.encoded.grid, item.encoded.times, states.shape[0])


def ids_of(prompt: MediaPrompt) -> list[int]:
    """Return a prompt's ids: characters, but for the toy's tokens where a text does not mean their spelling."""
    if not isinstance(prompt.base, str):
        return list(prompt.base)
    literal = {place for start, stop in prompt.literals for place in range(start, stop)}
    found: list[int] = []
    at = 0
    for match in _TOKEN.finditer(prompt.base):
        if literal.isdisjoint(range(*match.span())):
            found += [*map(ord, prompt.base[at : match.start()]), FIRST_ID + TOKENS.index(match[0])]
            at = match.end()
    return [*found, *map(ord, prompt.base[at:])]


def _wrong(item: MediaInput, what: str) -> InvalidRequest:
    return InvalidRequest(f"{item.place}: {what}", param=item.place, code="invalid_media")
