"""`data:` addresses against the standard library's own decoders, cut anywhere."""

from __future__ import annotations

import base64
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.frontend import data_urls
from pegboard.plugins.media.frontend.data_urls import PIECE, carried

HEADS = st.sampled_from(["data:", "data:image/png", "DATA:image/svg+xml;charset=utf-8", "data:;a=b"])


def decoded(url: str) -> bytes:
    return b"".join(carried(url))


@pytest.fixture(params=[1, 3, 64])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces so small that every place is cut."""
    monkeypatch.setattr(data_urls, "PIECE", request.param + 2)
    return int(request.param)


@properties()
@given(HEADS, st.binary(max_size=40), st.data())
@pytest.mark.usefixtures("small_pieces")
def test_base64(head: str, data: bytes, draw: st.DataObject) -> None:
    text = draw.draw(st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]))(data).decode()
    if draw.draw(st.booleans()):
        text = text.rstrip("=")
    letters = []
    for letter in text:
        letters.append(draw.draw(st.sampled_from(["", "", " ", "\r\n"])))
        letters.append(f"%{ord(letter):02X}" if draw.draw(st.integers(0, 9)) == 0 else letter)
    assert decoded(f"{head};base64,{''.join(letters)}") == data


@properties()
@given(HEADS, st.binary(max_size=40))
@pytest.mark.usefixtures("small_pieces")
def test_plain(head: str, data: bytes) -> None:
    assert decoded(f"{head},{quote_from_bytes(data, safe='')}") == data


def test_long_ones() -> None:
    data = bytes(range(256)) * 2048
    for blanks, encode in (("", base64.b64encode), ("\n", base64.b64encode), ("", base64.urlsafe_b64encode)):
        url = "data:;base64," + blanks.join(encode(data[i : i + 57]).decode() for i in range(0, len(data), 57))
        assert len(url) > 2 * PIECE
        assert decoded(url) == data


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:;base64",
        "date:,x",
        "data:" + "x" * 2000 + ",",
        "data:;base64,A",
        "data:;base64,AAAAA",
        "data:;base64,AA=A",
        "data:;base64,A===",
        "data:;base64,AA==AAAA",
        "data:;base64,====",
        "data:;base64,AA-~",
        "data:;base64,AAé=",
        "data:;base64,AA%",
        "data:,é",
    ],
)
@pytest.mark.usefixtures("small_pieces")
def test_malformed(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoded(url)
    assert caught.value.code == "invalid_media_address"
