"""For API plugins: pictures and videos in request bodies, and the fields that say how to read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.media.inputs import EncodedForm, MediaInput, MediaKind, MediaSettings

COMMON = "mm_processor_kwargs"
"""The field of a body, by vLLM's name, whose settings hold for all of its media."""
MAX_PIXELS = 2**31 - 1
MAX_FPS = 1000.0
MAX_FRAMES = 2**20
"""What a setting may be at most. What the server allows of an item is far less."""

_ADDRESSES = ("data:", "http:", "https:", "file:")
_ENCODED = ("states", *EncodedForm.__struct_fields__)
_OF_VIDEO = ("fps", "num_frames")
_DETAILS = {"auto": "auto", "low": "low", "high": "high", "original": "high"}


def common_settings(given: object) -> MediaSettings:
    """Return what `mm_processor_kwargs` say. Raises InvalidRequest for what is wrong, and for any other key: it would
    change how media are read.
    """
    if given is None:
        return MediaSettings()
    if not isinstance(given, Mapping):
        raise _wrong(COMMON, "must be an object")
    for name in given:
        if name not in _READERS:
            message = f"{str(name)[:64]!r} is not supported by this server; {', '.join(_READERS)} are"
            raise _wrong(COMMON, message, code="unsupported")
    return _settings(given, COMMON)


def own_settings(part: Mapping[str, object], where: str, kind: MediaKind, common: MediaSettings) -> MediaSettings:
    """Return what holds for an item: what its part says at `where`, and besides it what holds for all of them. Raises
    InvalidRequest for what is wrong, and for settings of videos in a part that is none.
    """
    if kind != "video":
        for name in _OF_VIDEO:
            if part.get(name) is not None:
                raise _wrong(f"{where}.{name}", "is for videos")
        common = msgspec.structs.replace(common, fps=None, num_frames=None)
    own = _settings(part, where)
    if own.fps is not None or own.num_frames is not None:
        common = msgspec.structs.replace(common, fps=None, num_frames=None)
    said = {name: value for name in _READERS if (value := getattr(own, name)) is not None}
    found = msgspec.structs.replace(common, **said)
    _check_pixels(found, where)
    return found


def detailed(settings: MediaSettings, detail: object, where: str) -> MediaSettings:
    """Return settings with OpenAI's `detail`; null is auto. `original` is `high`: nothing here is ever enlarged for
    it.
    """
    if detail is None:
        return settings
    if not isinstance(detail, str) or detail not in _DETAILS:
        raise _wrong(where, f"must be one of {', '.join(_DETAILS)}")
    return msgspec.structs.replace(settings, detail=_DETAILS[detail])


def media_input(kind: MediaKind, url: object, settings: MediaSettings, where: str) -> MediaInput:
    """Return an item that a body states by an address. Raises InvalidRequest, naming `where`, for what is none."""
    if not isinstance(url, str) or not url:
        raise _wrong(where, "must be an address, as a string")
    if not url[:8].lower().startswith(_ADDRESSES):
        raise _wrong(where, "must begin with data:, https: or http:")
    return MediaInput(kind=kind, url=url, settings=settings, place=where)


def media_data(kind: MediaKind, text: object, settings: MediaSettings, where: str) -> MediaInput:
    """Return an item that is stated by an address or as base64. Raises InvalidRequest, naming `where`."""
    if isinstance(text, str) and text and not text[:8].lower().startswith(_ADDRESSES):
        text = f"data:;base64,{text}"
    return media_input(kind, text, settings, where)


def encoded_media(kind: MediaKind, given: Mapping[str, object], where: str) -> MediaInput:
    """Return an item that a body states by its states; see EncodedForm, whose fields `given` has beside `states`, which
    is an address or base64. Raises InvalidRequest, naming `where`.
    """
    for name in given:
        if name not in _ENCODED:
            message = f"{str(name)[:64]!r} is unknown; an item that is encoded has {', '.join(_ENCODED)}"
            raise _wrong(where, message)
    fields = {name: value for name, value in given.items() if name != "states" and value is not None}
    try:
        form = msgspec.convert(fields, EncodedForm)
    except msgspec.ValidationError as error:
        raise _wrong(where, str(error)) from None
    found = media_data(kind, given.get("states"), MediaSettings(), f"{where}.states")
    return msgspec.structs.replace(found, encoded=form, place=where)


def _settings(given: Mapping[str, object], where: str) -> MediaSettings:
    values = {
        name: read(given[name], f"{where}.{name}") for name, read in _READERS.items() if given.get(name) is not None
    }
    found = msgspec.structs.replace(MediaSettings(), **values)
    if found.fps is not None and found.num_frames is not None:
        raise _wrong(f"{where}.num_frames", "fps says how many frames are read as well; leave one of them out")
    _check_pixels(found, where)
    return found


def _check_pixels(settings: MediaSettings, where: str) -> None:
    low, high = settings.min_pixels, settings.max_pixels
    if low is not None and high is not None and low > high:
        raise _wrong(f"{where}.min_pixels", f"must be at most max_pixels ({high}), got {low}")


def _whole(most: int) -> Callable[[object, str], int]:
    def read(value: object, where: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise _wrong(where, f"must be a whole number from 1 to {most}")
        return value

    return read


def _rate(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_FPS:
        raise _wrong(where, f"must be a number above 0 and up to {MAX_FPS:g}")
    return float(value)


_READERS: dict[str, Callable[[object, str], float]] = {
    "min_pixels": _whole(MAX_PIXELS),
    "max_pixels": _whole(MAX_PIXELS),
    "fps": _rate,
    "num_frames": _whole(MAX_FRAMES),
}
"""Settings, and what reads each."""


def _wrong(where: str, what: str, code: str = "invalid_request") -> InvalidRequest:
    return InvalidRequest(f"{where}: {what}", param=where, code=code)
