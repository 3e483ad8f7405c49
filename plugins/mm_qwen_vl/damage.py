"""Decoders of hostile bytes raise anything at all: here it becomes a request's own error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaLimits


@contextlib.contextmanager
def decoding(what: str) -> Iterator[None]:
    """Raise InvalidRequest for every error within, that of a library above all, saying nothing of its text."""
    try:
        yield
    except InvalidRequest:
        raise
    except MemoryError:
        raise InvalidRequest(
            f"this {what} takes more memory than this server has for one", code="media_too_large"
        ) from None
    except Exception:
        raise InvalidRequest(
            f"this {what} is truncated, damaged, or not in a supported format", code="invalid_media"
        ) from None


def check_source(width: int, height: int, limits: MediaLimits) -> None:
    """Raise InvalidRequest for a picture or frame that has more pixels than the limits allow, or none."""
    if min(width, height) < 1:
        raise InvalidRequest("this has no size that can be read", code="invalid_media")
    if width * height > limits.max_pixels:
        raise InvalidRequest(
            f"this has {width} x {height} pixels, and this server allows {limits.max_pixels}", code="media_too_large"
        )
