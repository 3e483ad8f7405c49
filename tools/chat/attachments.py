"""Pictures and videos of a conversation in the terminal: files on disk, then parts of messages in OpenAI's form."""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.errors import PegboardError

if TYPE_CHECKING:
    from pegboard.toolkit.media.inputs import MediaInput, MediaKind

Part = dict[str, Any]
Content = str | list[Part]

OF_A_FILE = frozenset({"invalid_media", "media_too_large", "media_too_complex"})
"""Codes of errors that blame what is in a picture or video."""
_KINDS: dict[str, MediaKind] = {"image_url": "image", "video_url": "video"}
_ADDRESS = re.compile(r"data:|[a-z][a-z0-9+.-]+:/", re.IGNORECASE)
_SHOWN = {"image": "[picture]", "video": "[video]"}


def read_media(path: Path, kind: MediaKind, where: str) -> MediaInput:
    """Return the picture or video in a file. Raises PegboardError, naming the option or command `where`."""
    from pegboard.toolkit.media.inputs import MediaInput

    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        if _ADDRESS.match(str(path)):
            given = re.sub(r"^(https?:)/", r"\1//", str(path))[:64]  # a Path has one slash for two
            raise PegboardError(f"{where} takes files only, and no address such as {given!r}") from None
        raise PegboardError(f"{where}: {path} cannot be read: {error.strerror}") from None
    if not data:
        raise PegboardError(f"{where}: {path} is empty")
    return MediaInput(kind=kind, data=data, place=f"{where} {path}")


def attachment(path: Path, kind: MediaKind, where: str) -> Part:
    """Return a file as a part of a message. Raises PegboardError as `read_media`."""
    data = read_media(path, kind, where).data
    guessed = mimetypes.guess_type(path.name)[0] or f"{kind}/*"
    name = f"{kind}_url"
    return {"type": name, name: {"url": f"data:{guessed};base64,{base64.b64encode(data).decode()}"}}


def check_content(content: object, where: str, *, media: bool = False) -> Content:
    """Return a message's content: text, parts of text joined; with `media` also a list with pictures and videos in it.
    Raises ValueError saying what is wrong with it.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} must be text")
    kinds = {"text", *_KINDS} if media else {"text"}
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") not in kinds or not _has_value(part):
            raise ValueError(f"{where} may have parts of type {' and '.join(sorted(kinds))} only")
    if any(part.get("type") in _KINDS for part in content):
        return list(content)
    return "\n".join(part["text"] for part in content)


def _has_value(part: Mapping[str, Any]) -> bool:
    kind = part.get("type", "text")
    if kind == "text":
        return isinstance(part.get("text"), str)
    address = part.get(kind)
    return isinstance(address, dict) and isinstance(address.get("url"), str)


def for_template(content: object) -> object:
    """Return a content with MediaInput in place of its pictures and videos."""
    from pegboard.toolkit.media.inputs import MediaInput

    if not isinstance(content, list):
        return content
    return [
        MediaInput(kind=_KINDS[part["type"]], url=part[part["type"]]["url"], place="this picture or video")
        if isinstance(part, dict) and part.get("type") in _KINDS
        else part
        for part in content
    ]


def with_attached(text: str, attached: Sequence[Part]) -> Content:
    """Return what is asked: the text, after what is attached to it."""
    return [*attached, {"type": "text", "text": text}] if attached else text


def addresses(content: Content) -> list[str]:
    """Return the addresses of the pictures and videos in a content."""
    parts = content if isinstance(content, list) else []
    return [part[part["type"]]["url"] for part in parts if part["type"] in _KINDS]


def shown(content: Content) -> str:
    """Return a content as text for the terminal."""
    if isinstance(content, str):
        return content
    return " ".join(_SHOWN[_KINDS[one["type"]]] if one["type"] in _KINDS else one["text"] for one in content)
