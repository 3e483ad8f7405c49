"""The config's section about media."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import NameList, PositiveInt, SectionFields
from pegboard.plugins.media.api import MediaLimits


class MediaSection(SectionFields):
    """Pictures and video in prompts, for models that take them."""

    enabled: bool = True
    """Accept media. Off: the model is served for text only, and its media encoder is not loaded."""
    helpers: PositiveInt = 1
    """Maximum number of helper processes that decode and resize media, for each of three sizes of items, so that small
    pictures do not wait for large ones. They start with the first item of their size."""
    helper_bytes: PositiveInt = 1024 * 1024 * 1024
    """Memory limit of a helper, in bytes."""
    prepare_seconds: Annotated[float, Field(gt=0)] = 20.0
    """Computing time for preparing one item, in seconds; if it needs more, its request gets 400. Small items have an
    eighth of it, medium ones half."""
    max_queued: PositiveInt = 1024
    """Maximum number of items that wait for a helper. One more gets 503; a request that has more by itself gets 400."""
    max_items: PositiveInt = 16
    """Maximum number of items in one prompt."""
    max_item_bytes: PositiveInt = 50 * 1024 * 1024
    """Largest item as received, in bytes."""
    max_pixels: PositiveInt = 64 * 1024 * 1024
    """Maximum number of pixels of a picture or frame as received."""
    max_resized_pixels: PositiveInt = 24 * 1024 * 1024
    """Maximum number of pixels of one item after resizing; for a video, of all its frames together."""
    max_piece_tokens: PositiveInt | None = None
    """Maximum number of tokens of a picture, or of a video's frames that are encoded together; larger ones are resized.
    They are encoded in one step, in which no request gets a token. Unset: 16384 on a GPU, 2048 on a CPU."""
    max_frames: PositiveInt = 768
    """Maximum number of frames that are sampled from one video."""
    max_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """Longest video, in seconds."""
    max_bytes_in_flight: PositiveInt = 1024 * 1024 * 1024
    """Maximum disk space of the media of all requests in progress, in bytes; requests beyond it get 503."""
    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    """Largest body of a request to a model that takes media, in bytes, or `server.max_body_bytes` if that is larger.
    The part of a body that is not base64 media may have at most `server.max_body_bytes`."""
    fetch: bool = False
    """Fetch media from `http:` and `https:` URLs in requests, if their addresses are public."""
    fetch_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Time limit for fetching one item, in seconds."""
    fetch_ports: tuple[Annotated[int, Field(gt=0, lt=65536)], ...] = (80, 443)
    """Ports from which media may be fetched."""
    allowed_domains: NameList = ()
    """Names of servers from which media may be fetched: exact, or `.example.org` for all names below it. Empty: any."""
    allowed_paths: NameList = ()
    """Directories below which requests may name files, as `file:` URLs. Empty: none."""
    encode_tokens: PositiveInt | None = None
    """Maximum number of tokens that one step encodes. A larger piece is encoded alone; each piece counts as at least
    64. Unset: as many as a prefill chunk."""
    cache_bytes: PositiveInt = 1024 * 1024 * 1024
    """Memory for encoded media on the device, including those kept for later requests, in bytes."""


class MediaFields(SectionFields):
    """Keys of the whole config."""

    media: MediaSection = MediaSection()
    """Pictures and video in prompts, for models that take them."""


def media_limits(config: MediaSection, piece_tokens: int | None) -> MediaLimits:
    """Return what the config allows of one item, and of a piece what the engine's device does."""
    return MediaLimits(
        max_pixels=config.max_pixels,
        resized_pixels=config.max_resized_pixels,
        max_frames=config.max_frames,
        max_seconds=config.max_seconds,
        piece_tokens=piece_tokens,
    )
