"""Settings of media and their addresses, as bodies state them."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.media_fields import (
    COMMON,
    common_settings,
    detailed,
    media_data,
    media_input,
    own_settings,
)
from pegboard.toolkit.media.inputs import MediaKind, MediaSettings


def settled(part: dict[str, Any], common: dict[str, Any] | None = None, kind: MediaKind = "video") -> MediaSettings:
    return own_settings(part, "here", kind, common_settings(common))


def test_what_a_part_says_goes_before_what_holds_for_all() -> None:
    common = {"min_pixels": 5, "max_pixels": 50, "fps": 1}
    assert settled({}, common) == MediaSettings(min_pixels=5, max_pixels=50, fps=1.0)
    assert settled({"max_pixels": 40, "fps": None}, common) == MediaSettings(min_pixels=5, max_pixels=40, fps=1.0)
    # One of the two says how many frames there are.
    assert settled({"num_frames": 3}, common) == MediaSettings(min_pixels=5, max_pixels=50, num_frames=3)
    assert settled({"fps": 2.5}, {"num_frames": 3}) == MediaSettings(fps=2.5)
    assert settled({}, common, "image") == MediaSettings(min_pixels=5, max_pixels=50)
    assert settled({"other": 1, "url": "x"}) == MediaSettings()


@pytest.mark.parametrize("name", ["min_pixels", "max_pixels", "num_frames", "fps"])
@pytest.mark.parametrize("value", [0, -1, True, "2", [], 2**40, float("nan"), float("inf"), 10**400])
def test_settings_are_bounded_and_typed(name: str, value: Any) -> None:
    for read, where in (
        (lambda: settled({name: value}), f"here.{name}"),
        (lambda: common_settings({name: value}), f"{COMMON}.{name}"),
    ):
        with pytest.raises(InvalidRequest, match="must be a") as caught:
            read()
        assert (caught.value.param, caught.value.status) == (where, 400)


@pytest.mark.parametrize(
    ("part", "common", "kind", "param"),
    [
        ({"min_pixels": 5, "max_pixels": 4}, {}, "image", "here.min_pixels"),
        ({"min_pixels": 5}, {"max_pixels": 4}, "image", "here.min_pixels"),
        ({"fps": 1, "num_frames": 1}, {}, "video", "here.num_frames"),
        ({"num_frames": 1}, {}, "image", "here.num_frames"),
        ({}, {"fps": 1, "num_frames": 1}, "video", f"{COMMON}.num_frames"),
        ({}, {"min_pixels": 5, "max_pixels": 4}, "video", f"{COMMON}.min_pixels"),
        ({}, {"size": 1}, "video", COMMON),
        ({}, [], "video", COMMON),
    ],
)
def test_what_contradicts_itself_is_refused(part: Any, common: Any, kind: MediaKind, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        settled(part, common, kind)
    assert caught.value.param == param


def test_details() -> None:
    plain = MediaSettings(max_pixels=3)
    assert detailed(plain, None, "here") is plain
    assert detailed(plain, "low", "here") == MediaSettings(max_pixels=3, detail="low")
    assert detailed(plain, "original", "here").detail == "high"
    with pytest.raises(InvalidRequest, match="here: must be one of auto, low, high, original"):
        detailed(plain, "huge", "here")


@pytest.mark.parametrize("url", ["data:;base64,aGk=", "http://a/b", "HTTPS://a/b", "file:///a"])
def test_addresses(url: str) -> None:
    for read in (media_input, media_data):
        item = read("image", url, MediaSettings(), "here")
        assert (item.url, item.kind, item.place, item.data) == (url, "image", "here", b"")


def test_base64_without_an_address() -> None:
    assert media_data("video", "aGk=", MediaSettings(), "here").url == "data:;base64,aGk="
    for one in ("", None, 5, ["aGk="]):
        with pytest.raises(InvalidRequest, match="here: must be an address"):
            media_data("video", one, MediaSettings(), "here")
    for wrong in ("aGk=", "ftp://a", "javascript:x", " http://a"):
        with pytest.raises(InvalidRequest, match="here: must begin with data:"):
            media_input("video", wrong, MediaSettings(), "here")
