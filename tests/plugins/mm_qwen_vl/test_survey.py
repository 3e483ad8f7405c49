"""What pictures' files say of themselves, and files that would take minutes to read."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaContext, MediaSource
from pegboard.plugins.mm_qwen_vl.options import QwenVLProcessorOptions
from pegboard.plugins.mm_qwen_vl.processor import QwenVLProcessor
from pegboard.plugins.mm_qwen_vl.survey import MAX_PARTS, MAX_SCANS, expected_pixels, survey
from tests.plugins.mm_qwen_vl.models import config


def saved(form: str, size: tuple[int, int] = (60, 40), mode: str = "RGB", **more: Any) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(file, form, **more)
    return file.getvalue()


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


FORMATS: list[tuple[str, str, dict[str, Any]]] = [
    ("PNG", "RGBA", {}),
    ("JPEG", "RGB", {}),
    ("JPEG", "L", {"progressive": True}),
    ("JPEG", "CMYK", {"exif": b"Exif\0\0" + bytes(5000)}),
    ("GIF", "P", {"comment": b"x" * 3000}),
    ("BMP", "RGB", {}),
    ("WEBP", "RGB", {"lossless": True}),
    ("WEBP", "RGB", {"quality": 5}),
    ("WEBP", "RGBA", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}),
]


@pytest.mark.parametrize(("form", "mode", "more"), FORMATS)
def test_sizes_are_those_that_pillow_finds(tmp_path: Path, form: str, mode: str, more: dict[str, Any]) -> None:
    for size in ((61, 40), (1, 3), (300, 200)):
        path = written(tmp_path / "picture", saved(form, size, mode, **more))
        found = survey(path)
        assert (found.width, found.height) == size
        found.check()
        assert found.scans == (0 if form != "JPEG" else 6 if more.get("progressive") else 1)
        least = size[0] * size[1]
        assert least <= expected_pixels(path) <= 2 * least + 2 * path.stat().st_size


def scans(count: int, after: bytes = b"") -> bytes:
    """A JPEG with so many scans more than it needs, as the attack has it."""
    whole = saved("JPEG", (200, 200), "L", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * count + whole[-2:] + after


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(chunks: int) -> bytes:
    whole = saved("PNG")
    return whole[:33] + chunk(b"tEXt", b"a\0b") * chunks + whole[33:]


def gif(blocks: int) -> bytes:
    whole = saved("GIF", mode="P")
    palette = 13 + (3 << (whole[10] & 7) + 1)
    return whole[:palette] + b"\x21\xfe" + b"\1a" * blocks + b"\0" + whole[palette:]


BOMBS = {
    "scans": scans(MAX_SCANS),
    "segments": saved("JPEG")[:2] + b"\xff\xfe\0\2" * (MAX_PARTS + 1) + saved("JPEG")[2:],
    "chunks": png(MAX_PARTS),
    "blocks": gif(MAX_PARTS),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each part took some microseconds in Pillow, and each scan the time of a whole picture in libjpeg."""
    path = written(tmp_path / "bomb", BOMBS[name])
    processor = QwenVLProcessor(QwenVLProcessorOptions(), MediaContext(tmp_path, config("qwen2_5")))
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(InvalidRequest, match="more than") as caught:
        processor.prepare(MediaSource("image", path), io.BytesIO())
    assert caught.value.code == "media_too_complex"


@pytest.mark.parametrize("data", [scans(20, after=b"\xff\xda\0\2" * 500), png(500) + bytes(2**20), gif(500)])
def test_many_parts_are_read(data: bytes, tmp_path: Path) -> None:
    """What stands after a picture's end, such as the video of a phone's moving picture, is none of it."""
    found = survey(written(tmp_path / "picture", data))
    found.check()
    assert found.scans <= 26


def test_what_costs_more_is_expected_to(tmp_path: Path) -> None:
    costs = [
        expected_pixels(written(tmp_path / "picture", data))
        for data in (
            saved("JPEG", (200, 200), "L"),
            scans(0),
            scans(50),
            saved("PNG", (1000, 900)),
            png(0) + bytes(2**22),
        )
    ]
    assert costs == sorted(costs)
    assert costs[2] > 3 * costs[1]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_damage_is_no_crash(form: str, tmp_path: Path) -> None:
    """Files cut short anywhere, and with bytes changed anywhere."""
    whole = saved(form, (20, 20), "P" if form == "GIF" else "RGB")
    rng = np.random.default_rng(3)
    for cut in range(1, 80):
        expected_pixels(written(tmp_path / "picture", whole[:cut]))
        data = np.frombuffer(whole, np.uint8).copy()
        data[rng.integers(0, min(len(data), 200), 8)] = rng.integers(0, 256, 8)
        assert expected_pixels(written(tmp_path / "picture", data.tobytes())) >= 0
