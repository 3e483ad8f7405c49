"""Media for the harness's fake model: what it keeps of a token depends on its position on three axes, and at media on
what the encoder was shown. So a wrong position, overlay or prefix changes the answer.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.req import TokenPositions
from pegboard.core.pipeline.executor import Done
from pegboard.core.pipeline.points import encoded
from pegboard.plugins.media.api import MediaItem, MediaSpan, PieceKey, RequestMedia
from pegboard.plugins.media.arrival import Arrivals
from pegboard.plugins.media.encoder_cache import EncoderCache
from pegboard.plugins.media.stage import MediaStage
from pegboard.plugins.media.work import NAME, EncodeWork
from pegboard.toolkit.media.inputs import MediaKind
from tests.core.pipeline.harness import EOS, VOCAB, FakeModel, Harness, next_token

PAD = VOCAB + 700
"""The token that stands where media are; none that is sampled."""
TOKEN_BYTES = 4


def seen(digest: bytes, piece: int, offset: int) -> int:
    """What the encoder makes of one token of a piece."""
    return 1000 + int.from_bytes(hashlib.blake2b(digest + bytes([piece, offset]), digest_size=4).digest(), "little")


def placed(value: int | NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
    """What the model keeps of a token: `positions` int64 [3, ...]."""
    return value + 300 * positions[0] + 7000 * positions[1] + 110000 * positions[2]


class FakeEncoder:
    """Counts tokens; the model below encodes."""

    def tokens(self, item: MediaItem, piece: int) -> int:
        return item.grid[1] * item.grid[2]


class MediaModel(FakeModel):
    """Reads positions and media. `encoded` has what the worker would keep; `shown` every piece that was encoded."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stage_parts[NAME] = self.encode
        self.encoded: dict[PieceKey, list[int]] = {}
        self.shown: list[PieceKey] = []
        self.tries = 0
        """Times that it was told to encode something."""
        self.directory = Path()
        self.capacity = 0
        self.broken: frozenset[bytes] = frozenset()
        """Digests of items that cannot be encoded."""
        self.steps: list[str] = []
        """What it was told to do, one after the other: "encode", or the mode of a forward pass."""

    def encode(self, work: EncodeWork) -> Done[float]:
        self.tries += 1
        self.steps.append("encode")
        for key in work.drop:
            del self.encoded[key]
        found = {}
        for one in work.pieces:
            assert one.key not in self.encoded, "a piece is encoded that is there"
            assert (self.directory / one.item.file).stat().st_size == math.prod(one.item.shape)
            if one.key.digest in self.broken:
                raise RuntimeError("this cannot be looked at")
            found[one.key] = [seen(one.key.digest, one.key.piece, i) for i in range(one.tokens)]
        self.encoded |= found
        self.shown += found
        assert sum(map(len, self.encoded.values())) * TOKEN_BYTES <= self.capacity
        return Done(0.001)

    def contents(self, work: ModelWorkerBatch, input_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        self.steps.append(work.forward_mode.name.lower())
        values = input_ids.copy()
        covered = np.zeros(len(values), np.bool_)
        parts: Any = work.payloads.get(NAME, ())
        for part in parts:
            at = slice(part.row, part.row + part.count)
            assert not covered[at].any(), "two pieces at one token"
            covered[at] = True
            values[at] = self.encoded[part.key][part.offset : part.offset + part.count]
        assert ((input_ids == PAD) == covered).all(), "the overlay is not where the media are"
        positions = work.positions if work.positions.ndim == 2 else np.broadcast_to(work.positions, (3, len(values)))
        found: NDArray[np.int64] = placed(values, positions)
        return found


@dataclass(frozen=True)
class Prompt:
    """A prompt with media, as intake would send it."""

    ids: list[int]
    media: RequestMedia

    @property
    def positions(self) -> TokenPositions:
        positions = np.frombuffer(self.media.positions, "<i4").reshape(3, -1).astype(np.int64)
        return TokenPositions(positions, self.media.delta)

    def answer(self, n: int) -> list[int]:
        """What it would get, alone in the world."""
        kept = list(self.ids)
        for span in self.media.spans:
            digest = self.media.items[span.item].digest
            kept[span.start : span.start + span.count] = [seen(digest, span.piece, i) for i in range(span.count)]
        positions, out = self.positions, list[int]()
        while len(out) < n:
            length = len(kept) + len(out)
            values = np.array([*kept, *out], np.int64)
            out.append(next_token(placed(values, positions.of(0, length))))
            if out[-1] == EOS:
                break
        return out


class Album:
    """Makes items with their files, and prompts with them."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self._files = 0
        self.counts: dict[str, int] = {}
        """Tokens that each request asked for."""

    def item(self, name: int | str, height: int, width: int, pieces: int = 1) -> MediaItem:
        """An item whose looks follow from `name` and its size; each call writes a file of its own."""
        shape = (pieces, height, width, 3)
        digest = hashlib.blake2b(f"{name} {shape}".encode(), digest_size=32).digest()
        self._files += 1
        file = f"item-{self._files}"
        (self.directory / file).write_bytes(bytes(math.prod(shape)))
        kind: MediaKind = "image" if pieces == 1 else "video"
        return MediaItem(kind, digest, file, shape, (pieces, height, width), pieces)

    def words(self, count: int) -> list[int]:
        return [self.random.choice([one for one in range(VOCAB) if one != EOS]) for _ in range(count)]

    def prompt(self, *parts: list[int] | MediaItem) -> Prompt:
        """Text and items in turn, with positions as in the Qwen-VL models."""
        ids: list[int] = []
        positions: list[tuple[int, int, int]] = []
        items: list[MediaItem] = []
        spans: list[MediaSpan] = []
        now = 0
        for part in parts:
            if isinstance(part, list):
                ids += part
                positions += [(now + i,) * 3 for i in range(len(part))]
                now += len(part)
                continue
            _, height, width = part.grid
            for piece in range(part.pieces):
                spans.append(MediaSpan(len(items), piece, len(ids), height * width))
                ids += [PAD] * (height * width)
                positions += [(now, now + y, now + x) for y in range(height) for x in range(width)]
                now += max(height, width)
            items.append(part)
        packed = np.array(positions, "<i4").T.tobytes()
        return Prompt(ids, RequestMedia(tuple(items), tuple(spans), packed, now - len(ids)))


def stage_of(books: EncoderCache, page_size: int, directory: Path) -> MediaStage:
    """The scheduler's half, for the model above."""
    return MediaStage(Arrivals(FakeEncoder(), books, page_size, directory), page_size)


def media_in(features: Mapping[str, msgspec.Raw]) -> RequestMedia | None:
    """What a message brings of media."""
    stated = features.get(NAME)
    return None if stated is None else msgspec.msgpack.decode(stated, type=RequestMedia)


def media_harness(
    directory: Path, *, capacity: int = 64, encode_tokens: int = 16, model: type[MediaModel] = MediaModel, **more: Any
) -> Harness:
    """A harness whose model takes media; `capacity` is in tokens."""
    books = EncoderCache(capacity * TOKEN_BYTES, TOKEN_BYTES, encode_tokens, 1)
    stage = stage_of(books, more.get("page_size", 1), directory)
    harness = Harness(model=model, joining=[stage, *more.pop("joining", ())], **more)
    assert isinstance(harness.model, MediaModel)
    harness.model.directory, harness.model.capacity = directory, books.capacity
    return harness


def model_of(harness: Harness) -> MediaModel:
    assert isinstance(harness.model, MediaModel)
    return harness.model


def books_of(harness: Harness) -> EncoderCache:
    [stage] = [one for one in harness.points.stages if isinstance(one, MediaStage)]
    return stage.books


def submit(harness: Harness, rid: str, prompt: Prompt, n: int = 8, **more: Any) -> Any:
    return harness.submit(rid, prompt.ids, n, features={NAME: encoded(prompt.media)}, **more)


def text_answer(ids: Sequence[int], n: int) -> list[int]:
    """What a prompt without media gets of this model."""
    return Prompt(list(ids), RequestMedia((), (), np.tile(np.arange(len(ids), dtype="<i4"), 3).tobytes())).answer(n)
