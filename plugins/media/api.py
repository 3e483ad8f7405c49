"""Contract: pictures and video. A processor prepares them and lays them out in prompts, an encoder turns them into
states.

An *item* is one picture or video. A *piece* is the unit that is encoded and cached: a picture, or one temporal patch of
a video. A *span* is where a piece's tokens stand in the prompt.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, NamedTuple

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.options import OptionsT
from pegboard.toolkit.media.inputs import MediaKind, MediaSettings, StateDtype

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import NDArray

EncoderContext = ModelContext
"""What a MediaEncoder is built from."""

Encode = Callable[[str], Sequence[int]]
"""A tokenizer's `encode`, without special tokens around the text."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What an operator allows of one item. `max_pixels` are those of the source, before it is resized, `resized_pixels`
    those of all its resized frames together. A piece has at most `piece_tokens` tokens; None: any number. `max_frames`
    are sampled, of a video of at most `max_seconds`.
    """

    max_pixels: int = 64 * 2**20
    resized_pixels: int = 24 * 2**20
    max_frames: int = 768
    max_seconds: float = 3600.0
    piece_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MediaContext:
    """The prepared model's directory and config.json, and what an operator allows. No weights, no device, no torch."""

    directory: Path
    hf_config: Mapping[str, Any]
    limits: MediaLimits = field(default_factory=MediaLimits)


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One item as it was received: `file` has its bytes, of whatever format they turn out to be."""

    kind: MediaKind
    file: Path
    settings: MediaSettings = field(default_factory=MediaSettings)


@dataclass(frozen=True, slots=True)
class MediaShape:
    """What became of an item. `shape` is that of the uint8 pixels: (frames, height, width, 3), frames in pieces of
    equal size. `grid` counts patches: (time, height, width). `times` are seconds: whatever a processor's `lay_out`
    needs to know of a video's frames.
    """

    shape: tuple[int, int, int, int]
    grid: tuple[int, int, int]
    pieces: int = 1
    times: tuple[float, ...] = ()


class EncodedStates(msgspec.Struct, frozen=True):
    """What the file of an item holds that came encoded: rows of `shape` (tokens, width), little-endian."""

    dtype: StateDtype
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.shape[0] * self.shape[1] * (4 if self.dtype == "float32" else 2)


class MediaItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prepared item, as it travels to the scheduler. `file` is the name of the file that holds the pixels, in the
    directory for media, or with `encoded` the states. `digest` (32 bytes) covers these and everything else of
    `MediaShape`, whose fields follow.
    """

    kind: MediaKind
    digest: bytes
    file: str
    shape: tuple[int, int, int, int]
    grid: tuple[int, int, int]
    pieces: int = 1
    times: tuple[float, ...] = ()
    encoded: EncodedStates | None = None


class PieceKey(NamedTuple):
    """What identifies an encoded piece of media: whose it is, what the item looks like, and which piece of it."""

    namespace: str
    digest: bytes
    piece: int


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens [start, start + count) are those of a piece of an item (an index into the request's items)."""

    item: int
    piece: int
    start: int
    count: int


class RequestMedia(msgspec.Struct, frozen=True, omit_defaults=True):
    """The media of a prompt, as `MediaLayout` says: `positions` is int32 little-endian [3, prompt tokens]. The files of
    the items stay where they are until the request has ended.
    """

    items: tuple[MediaItem, ...]
    spans: tuple[MediaSpan, ...]
    positions: bytes
    delta: int = 0


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """A prompt with its media in it. `ids` int64 [length]; `spans` in their order, each piece of each item once;
    `positions` int32 [3, length]: time, height and width; `delta`: the position of token `length + i` is `length + i +
    delta` on all three axes.
    """

    ids: NDArray[np.int64]
    spans: tuple[MediaSpan, ...]
    positions: NDArray[np.int32]
    delta: int


class MediaProcessor(abc.ABC, Generic[OptionsT]):
    """Prepares media and lays them out. Built in the API process and in its helper processes; imports no torch, and
    libraries that decode only in `prepare`. Cheap to build.
    """

    def __init__(self, options: OptionsT, ctx: MediaContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: MediaContext) -> str | None:
        """Return None, or why it cannot prepare media for this model; a model without media is the usual reason.

        Raises ModuleNotFoundError for its own model where a library is not installed that its plugin's `extras` name:
        operators are warned of that, where other reasons are the rule.
        """
        return None

    @property
    @abc.abstractmethod
    def kinds(self) -> frozenset[MediaKind]:
        """What the model takes."""

    @property
    @abc.abstractmethod
    def reserved(self) -> frozenset[str]:
        """Spellings of the tokens that mean media to the model: placeholders, and what surrounds them. A user's text
        that spells one stays text.
        """

    def expected_pixels(self, source: MediaSource) -> int:
        """Return about how many pixels have to be decoded to prepare an item, from its file's header.

        It decides with which others the item waits for a helper process, and how long it may compute there. Runs in the
        API process: reads little, decodes nothing, takes any file, and may be wrong. By default, from the file's size.
        """
        return 16 * source.file.stat().st_size

    @abc.abstractmethod
    def prepare(self, source: MediaSource, out: BinaryIO) -> MediaShape:
        """Decode and resize an item, and write its pixels to `out`: uint8, row by row, frame by frame.

        Runs in a helper process with little memory, so frames are written one at a time. Raises InvalidRequest for bad
        media and for what the limits do not allow, saying what is wrong with it and nothing of this machine.
        """

    def shape_of(self, kind: MediaKind, grid: tuple[int, int, int], times: Sequence[float], tokens: int) -> MediaShape:
        """Return what `prepare` says of an item with this grid and these times, which a request has encoded itself, as
        `tokens` states.

        With the capability `encoded`. Takes little time, whatever the numbers are. Raises InvalidRequest where they do
        not belong together, and for what `prepare` would make of no item.
        """
        raise InvalidRequest("this model takes no media that are encoded already", code="unsupported")

    def check_places(self, ids: Sequence[int], kinds: Sequence[MediaKind]) -> None:
        """Raise InvalidRequest as `lay_out` does, where the placeholders of a prompt do not match items of these kinds.

        Asked before any item is prepared. By default, `lay_out` finds it out when all are.
        """

    @abc.abstractmethod
    def part(self, kind: MediaKind) -> Mapping[str, object]:
        """Return the content part that chat templates are given for an item."""

    @abc.abstractmethod
    def lay_out(self, ids: Sequence[int], items: Sequence[MediaItem], encode: Encode) -> MediaLayout:
        """Expand the placeholders of a prompt, which bind to items in order.

        Pure. Raises InvalidRequest where placeholders and items do not match, in number or in kind.
        """


@dataclass(frozen=True, slots=True)
class MediaPiece:
    """One piece to be encoded: `pixels` uint8 [frames, height, width, 3] on the host."""

    item: MediaItem
    piece: int
    pixels: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MediaStates:
    """An encoded piece, on the device in the model's dtype: `states` [tokens, hidden] take the place of the token
    embeddings; `deep[k]` [tokens, hidden] is added to the output of decoder layer k.
    """

    states: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()


class MediaEncoder(abc.ABC, Generic[OptionsT]):
    """Turns pixels into states on the device. Built cheaply from config.json alone; `load` reads the weights."""

    def __init__(self, options: OptionsT, ctx: EncoderContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: EncoderContext) -> str | None:
        """Return None, or why it cannot encode media for this model. Raises as `MediaProcessor.supports` does."""
        return None

    @property
    @abc.abstractmethod
    def levels(self) -> int:
        """How many `MediaStates.deep` a piece has."""

    @abc.abstractmethod
    def load(self) -> None:
        """Read the weights of the encoder, and of nothing else, from the checkpoint. Raises ModelError as
        `ModelFamily.load` does.
        """

    @abc.abstractmethod
    def tokens(self, item: MediaItem, piece: int) -> int:
        """Return how many tokens a piece has. Raises ValueError for an item that no processor of this model makes: its
        shape, grid and pieces do not belong together.
        """

    @abc.abstractmethod
    def encode(self, pieces: Sequence[MediaPiece]) -> list[MediaStates]:
        """Encode each piece: the answers in order, each independent of what else is in the list. Under inference
        mode.
        """
