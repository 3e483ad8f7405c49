"""Pictures and videos of requests: APIs create them from bodies, and the plugin `media` prepares them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pegboard.core.interfaces.client import AnnotatedPrompt
from pegboard.core.interfaces.errors import InvalidRequest

MediaKind = Literal["image", "video"]

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]

StateDtype = Literal["float32", "float16", "bfloat16"]


class MediaSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request says about one item; None where it says nothing.

    `min_pixels` and `max_pixels` bound the resized picture or frame, `detail` is OpenAI's word for that. `fps` (frames
    per second) and `num_frames` say how a video is sampled.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    detail: Literal["auto", "low", "high"] = "auto"
    fps: float | None = None
    num_frames: int | None = None


class EncodedForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request states an item that it has encoded itself: it brings states [tokens, width] in place of a file. A
    row has a token's state and behind it the token's deep states in order, so width is hidden size * (1 + deep levels).

    `grid` counts patches (time, height, width), and `times` are seconds, as in the MediaShape of the plugin `media`.
    `format` is "safetensors", with one tensor, or "raw": the rows alone, little-endian, of `dtype` and `shape`.
    """

    grid: tuple[Count, Count, Count]
    times: tuple[float, ...] = ()
    format: Literal["safetensors", "raw"] = "safetensors"
    dtype: StateDtype | None = None
    shape: tuple[Count, Count] | None = None


class MediaInput(msgspec.Struct, kw_only=True):
    """One picture or video as a client states it: an address (`data:`, `http:`, `https:`, `file:`), or the bytes
    themselves. With `encoded` they are those of states that the client has made of it. `place` says where it stands in
    the client's request, for errors.
    """

    kind: MediaKind
    url: str = ""
    data: bytes = b""
    settings: MediaSettings = msgspec.field(default_factory=MediaSettings)
    encoded: EncodedForm | None = None
    place: str = ""


class MediaPrompt(AnnotatedPrompt, kw_only=True):
    """A prompt with media: `base` has one placeholder for each item of `media`, in their order."""

    media: tuple[MediaInput, ...] = ()

    @property
    def items(self) -> tuple[MediaInput, ...]:
        return self.media

    def refusal(self, *, embedding: bool = False) -> InvalidRequest:
        if embedding:
            text, place = "there are no embeddings of pictures and videos", "prompt"
        else:
            text, place = "this model takes no pictures or videos", self.media[0].place if self.media else ""
        return InvalidRequest(text, param=place or None, code="unsupported")
