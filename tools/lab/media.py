"""Media in the lab: items of so many tokens, which the scheduler takes as it takes those of a server, and an encoder of
which there is nothing but its cost.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.errors import ConfigError
from pegboard.plugins.media.api import MediaItem, MediaSpan, RequestMedia
from pegboard.plugins.media.arrival import Arrivals
from pegboard.plugins.media.encoder_cache import EncoderCache
from pegboard.plugins.media.options import MediaFields, MediaSection
from pegboard.plugins.media.stage import MediaStage

if TYPE_CHECKING:
    from pegboard.core.config.sections import EngineConfig
    from pegboard.tools.lab.cost import CostModel

MEDIA_TOKEN = 3
"""The token that stands where media are."""
MOST_PIECES = 4096


@dataclass(frozen=True, slots=True)
class Medium:
    """A picture or video at the tokens [start, start + tokens) of a prompt. Equal `content` looks the same. `pieces` of
    equal size make it up: one of a picture, several of a video.
    """

    content: int
    start: int
    tokens: int
    pieces: int = 1

    def __post_init__(self) -> None:
        if self.start < 0 or not 1 <= self.pieces <= MOST_PIECES or self.tokens < 1 or self.tokens % self.pieces:
            raise ValueError(f"no item has {self.tokens} tokens in {self.pieces} pieces from {self.start} on")

    @property
    def item(self) -> MediaItem:
        """As it travels: a pixel for each piece, and a grid that says how many tokens one has."""
        shape = (self.pieces, 1, 1, 3)
        said = f"{self.content} {self.tokens} {self.pieces}"
        return MediaItem(
            kind="image" if self.pieces == 1 else "video",
            digest=hashlib.blake2b(said.encode(), digest_size=32).digest(),
            file=str(self.pieces),
            shape=shape,
            grid=(self.pieces, 1, self.tokens // self.pieces),
            pieces=self.pieces,
        )


class CountedTokens:
    """An encoder as far as the scheduler asks it."""

    def tokens(self, item: MediaItem, piece: int) -> int:
        return item.grid[2]


def media_section(config: object) -> MediaSection:
    """Return what a config says of media; without the plugin, that there are none."""
    return config.media if isinstance(config, MediaFields) else MediaSection(enabled=False)


class LabMedia:
    """The media of one run. `stage` is the scheduler's."""

    def __init__(self, config: EngineConfig, cost: CostModel, chunk: int | None) -> None:
        """Take limits from the config. Raises ConfigError for a cost model that does not say what encoding costs."""
        if not cost.encodes:
            raise ConfigError(
                f"cost model {cost.name or '(a file)'} does not say what encoding costs (encode_base, "
                "encode_per_token), and the workload has media; take h200-8b, or a file of your own"
            )
        section = media_section(config)
        step_tokens = section.encode_tokens or chunk or config.scheduler.max_prefill_tokens
        books = EncoderCache(section.cache_bytes, cost.encoded_token_bytes, step_tokens)
        page_size = config.memory.page_size
        self.stage = MediaStage(Arrivals(CountedTokens(), books, page_size, Path()), page_size)
        self._files: set[str] = set()

    @contextlib.contextmanager
    def files(self) -> Iterator[None]:
        """Have a folder for files: the scheduler looks for the file of each item."""
        with tempfile.TemporaryDirectory(prefix="pegboard-lab-") as folder:
            self.stage.arrivals.directory = Path(folder)
            yield

    def request(self, media: Sequence[Medium], length: int) -> RequestMedia | None:
        """Return the media of a prompt of so many tokens, positioned as text is; None where it has none."""
        if not media:
            return None
        items = tuple(one.item for one in media)
        for item in items:
            self._write(item)
        spans = []
        for index, one in enumerate(media):
            each = one.tokens // one.pieces
            spans += [MediaSpan(index, piece, one.start + piece * each, each) for piece in range(one.pieces)]
        return RequestMedia(items, tuple(spans), np.tile(np.arange(length, dtype="<i4"), 3).tobytes())

    def _write(self, item: MediaItem) -> None:
        """Write a file for all items of as many pieces."""
        if item.file not in self._files:
            self._files.add(item.file)
            (self.stage.arrivals.directory / item.file).write_bytes(bytes(math.prod(item.shape)))

    def figures(self) -> dict[str, float]:
        """Return how much was encoded, and how often that was there already. `encode_time` in virtual seconds."""
        found = self.stage.figures()
        names = ("encode_steps", "encode_time", "encoded_pieces")
        return {**{name: found[name] for name in names}, "encoder_hits": found["encoder_cache_hits"]}
