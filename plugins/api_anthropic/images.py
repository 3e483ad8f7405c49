"""Anthropic's image blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.media_parts import refuse_others
from pegboard.toolkit.http.media_fields import media_input
from pegboard.toolkit.media.inputs import MediaInput, MediaSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.toolkit.media.service import MediaReader

MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
"""What a source may call itself. The content decides what it is."""


def image_of(block: Mapping[str, object], where: str, processor: MediaReader) -> MediaInput:
    """Return the picture of an image block. Raises InvalidRequest, naming the place, for what is malformed, and for
    what this server does not have: files, and refusing images that have to be made smaller.
    """
    source, here = block.get("source"), f"{where}.source"
    if not isinstance(source, dict):
        raise InvalidRequest(f"{here} must be an object", param=here)
    item = MediaInput(kind="image", place=here)
    refuse_others(processor, item)
    transformations = block.get("transformations")
    if isinstance(transformations, dict) and transformations.get("oversized_image", "downsize") != "downsize":
        param = f"{where}.transformations.oversized_image"
        raise InvalidRequest(f"{param}: this server makes large images smaller", param=param, code="unsupported")
    if source.get("type") == "url":
        return media_input("image", source.get("url"), MediaSettings(), f"{here}.url")
    if source.get("type") == "base64":
        item.url = f"data:{_media_type(source, here)};base64,{_data(source, here)}"
        return item
    if source.get("type") == "file":
        message = f"{here}.type: this server keeps no files; send the image as base64, or its address as url"
        raise InvalidRequest(message, param=f"{here}.type", code="unsupported")
    raise InvalidRequest(f"{here}.type must be base64 or url", param=f"{here}.type")


def _media_type(source: Mapping[str, object], where: str) -> str:
    found = source.get("media_type")
    if not isinstance(found, str) or found not in MEDIA_TYPES:
        param = f"{where}.media_type"
        raise InvalidRequest(f"{param} must be one of {', '.join(MEDIA_TYPES)}", param=param)
    return found


def _data(source: Mapping[str, object], where: str) -> str:
    found = source.get("data")
    if not isinstance(found, str) or not found:
        raise InvalidRequest(f"{where}.data must be base64, as a string", param=f"{where}.data")
    return found
