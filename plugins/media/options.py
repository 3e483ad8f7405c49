"""The config's section about media."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import NameList, PositiveInt, SectionFields
from pegboard.plugins.media.api import MediaLimits


class MediaSection(SectionFields):
    """Pictures and video in prompts, for models that take them."""

    enabled: bool = True
    """Off, the model is served for text alone, and the weights that read media are not loaded."""
    helpers: PositiveInt = 1
    """Most helper processes that decode and resize media, for each of three sizes of items, so that small pictures wait
    for no large one. They start with the first item of their size."""
    helper_bytes: PositiveInt = 1024 * 1024 * 1024
    """Memory that a helper may take."""
    prepare_seconds: Annotated[float, Field(gt=0)] = 20.0
    """Computing time that one item may take to be prepared, in seconds; its request fails with 400 then. Items that are
    expected to be small have an eighth of it, those of medium size half."""
    max_queued: PositiveInt = 1024
    """Most items that wait for a helper; one more is answered with 503, a request with more by itself with 400."""
    max_items: PositiveInt = 16
    """Most items in one prompt."""
    max_item_bytes: PositiveInt = 50 * 1024 * 1024
    """Largest item as it is received, in bytes."""
    max_pixels: PositiveInt = 64 * 1024 * 1024
    """Most pixels of a picture or frame as it is received."""
    max_resized_pixels: PositiveInt = 24 * 1024 * 1024
    """Most pixels of one item as the model sees it: of all frames of a video together."""
    max_piece_tokens: PositiveInt | None = None
    """Most tokens of a picture, or of a video's frames that are encoded together; larger ones are resized to fit. They
    are encoded in one step, in which no request gets a token. Unset: 16384 on a GPU, 2048 on a CPU."""
    max_frames: PositiveInt = 768
    """Most frames that are sampled of one video."""
    max_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """Longest video, in seconds."""
    max_bytes_in_flight: PositiveInt = 1024 * 1024 * 1024
    """Disk space that the media of all requests under way may take; beyond it they are answered with 503."""
    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    """Largest body of a request to a model that takes media, in bytes; `server.max_body_bytes` where that is larger.
    What is in it beside media in base64 has `server.max_body_bytes` at most."""
    fetch: bool = False
    """Fetch media from the `http:` and `https:` addresses that requests name, as far as they are public."""
    fetch_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that fetching one item may take."""
    fetch_ports: tuple[Annotated[int, Field(gt=0, lt=65536)], ...] = (80, 443)
    """Ports that media may be fetched from."""
    allowed_domains: NameList = ()
    """Names of servers that media may be fetched from: exact, or `.example.org` for all below it. Empty: any."""
    allowed_paths: NameList = ()
    """Directories below which requests may name files, as `file:` addresses. Empty: none."""
    encode_tokens: PositiveInt | None = None
    """Most tokens that one step encodes. A larger piece is encoded alone, and each counts as 64 at least. Unset: as
    many as a chunk has."""
    cache_bytes: PositiveInt = 1024 * 1024 * 1024
    """Memory for encoded media on the device, used ones kept for requests to come."""


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
