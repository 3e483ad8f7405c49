"""Pictures equal those of transformers' own processor, to the bit."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaLimits, MediaShape, MediaSource
from pegboard.plugins.mm_qwen_vl.processor import QwenVLProcessor
from pegboard.toolkit.media.inputs import MediaSettings
from tests.plugins.mm_qwen_vl.models import GENEROUS, NORMAL, NORMALISED, processor
from tests.plugins.mm_qwen_vl.random_pictures import random_picture

PICTURES = 300
FEW = 20
"""Pictures of one test."""
FAMILIES = ("qwen2", "qwen3")


def prepared(
    made: QwenVLProcessor, directory: Path, data: bytes, **settings: Any
) -> tuple[MediaShape, NDArray[np.uint8]]:
    file = directory / "picture"
    file.write_bytes(data)
    out = io.BytesIO()
    shape = made.prepare(MediaSource("image", file, MediaSettings(**settings)), out)
    return shape, np.frombuffer(out.getvalue(), np.uint8).reshape(shape.shape)


def bounds(seed: int) -> dict[str, Any]:
    """What a model's preprocessor_config.json says: mostly small pictures, which are quicker."""
    rng = random.Random(seed)
    least = rng.choice((784, 3136, 50176))
    return {"size": {"shortest_edge": least, "longest_edge": least * rng.choice((4, 16, 60))}}


def expected(data: bytes, family: str, seed: int, **how: Any) -> NDArray[np.float32]:
    """The patches that transformers makes of a file that it has opened with `load_image`'s orientation."""
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        # Of 16-bit grey transformers makes white; test_modes.py says what it means.
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    own: dict[str, Any] = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    made = Qwen2VLImageProcessorPil(**bounds(seed), **(own if family == "qwen3" else {}))
    patches: NDArray[np.float32] = made([upright], return_tensors="np", **how)["pixel_values"]
    return patches


def patched(frame: NDArray[Any], patch: int) -> NDArray[Any]:
    """A picture [height, width, 3] as patches, in blocks of 2 x 2, each twice in time."""
    height, width = frame.shape[0] // (2 * patch), frame.shape[1] // (2 * patch)
    blocks = frame.reshape(height, 2, patch, width, 2, patch, 3)
    rows = [
        np.repeat(blocks[i, k, :, j, n].transpose(2, 0, 1)[:, None], 2, axis=1).reshape(-1)
        for i in range(height)
        for j in range(width)
        for k in range(2)
        for n in range(2)
    ]
    return np.stack(rows)


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=() if n in (120, 280) else pytest.mark.full) for n in range(0, PICTURES, FEW)]
)
def test_pixels_are_those_of_transformers(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + FEW):
        family = FAMILIES[seed % 2]
        name, data = random_picture(seed)
        made = processor(tmp_path, family, {"preprocessor_config.json": bounds(seed)}, limits=GENEROUS)
        shape, pixels = prepared(made, tmp_path, data)
        patch = 16 if family == "qwen3" else 14
        assert shape.grid == (1, shape.shape[1] // patch, shape.shape[2] // patch)
        own = patched(pixels[0], patch)
        raw = expected(data, family, seed, do_rescale=False, do_normalize=False)
        assert np.array_equal(own, raw), f"{name}: the resized pixels differ"
        mean, std = (_colours(one, own) for one in NORMAL[family])
        normal = (own.astype(np.float32) / 255 - mean) / std
        assert np.abs(normal - expected(data, family, seed)).max() < NORMALISED, f"{name}: the patches differ"


def _colours(values: tuple[float, ...], patches: NDArray[Any]) -> NDArray[np.float32]:
    """One value for each number of a patch: colours come first in it."""
    return np.repeat(np.array(values, np.float32), patches.shape[1] // 3)


def picture(width: int, height: int, form: str = "PNG", mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), (9, 99, 200) if mode == "RGB" else 1).save(file, form)
    return file.getvalue()


class TestSettings:
    """`min_pixels`, `max_pixels` and `detail` of a request, within the server's limits."""

    def size(self, tmp_path: Path, width: int, height: int, limits: MediaLimits | None = None, **asked: Any) -> int:
        shape, _ = prepared(processor(tmp_path, "qwen2", limits=limits), tmp_path, picture(width, height), **asked)
        return shape.shape[1] * shape.shape[2]

    def test_they_bound_the_pixels(self, tmp_path: Path) -> None:
        assert self.size(tmp_path, 700, 700) == 490_000
        assert 90_000 < self.size(tmp_path, 700, 700, max_pixels=100_000) <= 100_000
        assert 200_000 <= self.size(tmp_path, 70, 70, min_pixels=200_000) < 220_000
        # More than the model's own most, which is a default.
        assert 2_000_000 <= self.size(tmp_path, 700, 700, min_pixels=2_000_000) < 2_100_000

    def test_low_detail_is_256_tokens(self, tmp_path: Path) -> None:
        for family, factor in (("qwen2", 28), ("qwen3", 32)):
            shape, _ = prepared(processor(tmp_path, family), tmp_path, picture(900, 900), detail="low")
            assert shape.shape[1] * shape.shape[2] == 256 * factor**2
        usual = self.size(tmp_path, 900, 900)
        assert self.size(tmp_path, 900, 900, detail="high") == self.size(tmp_path, 900, 900, detail="auto") == usual
        assert self.size(tmp_path, 900, 900, detail="low", max_pixels=500_000) > 256 * 28**2

    def test_the_limits_count(self, tmp_path: Path) -> None:
        limits = MediaLimits(resized_pixels=100_000)
        assert 80_000 < self.size(tmp_path, 700, 700, limits) <= 100_000
        assert 80_000 < self.size(tmp_path, 700, 700, limits, max_pixels=10**9) <= 100_000
        with pytest.raises(InvalidRequest, match=r"100001, and this server allows 100000 .*max_resized_pixels"):
            self.size(tmp_path, 700, 700, limits, min_pixels=100_001)

    def test_a_picture_is_encoded_at_once(self, tmp_path: Path) -> None:
        """So it is resized to the tokens that a piece may have, as if the model's own most were so many pixels."""
        limits = MediaLimits(piece_tokens=100)
        for asked in ({}, {"max_pixels": 10**9}, {"min_pixels": 100 * 28**2}):
            assert self.size(tmp_path, 700, 700, limits, **asked) == 100 * 28**2
        allowed = self.size(tmp_path, 500, 900, max_pixels=100 * 28**2)
        assert self.size(tmp_path, 500, 900, limits) == allowed
        assert self.size(tmp_path, 100, 150, limits) == self.size(tmp_path, 100, 150)
        with pytest.raises(InvalidRequest, match=r"78401, and this server allows 78400 here .media.max_piece_tokens"):
            self.size(tmp_path, 700, 700, limits, min_pixels=100 * 28**2 + 1)
        with pytest.raises(InvalidRequest, match=r"allows 78400 .media.max_piece_tokens") as caught:
            self.size(tmp_path, 6000, 30, limits)
        assert caught.value.code == "media_too_large"

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({"min_pixels": 0}, "min_pixels must be at least 1, got 0"),
            ({"max_pixels": -5}, "max_pixels must be at least 1, got -5"),
            ({"min_pixels": 9, "max_pixels": 8}, "min_pixels is 9, more than max_pixels, 8"),
        ],
    )
    def test_what_cannot_be_is_refused(self, tmp_path: Path, asked: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidRequest, match=message) as caught:
            self.size(tmp_path, 50, 50, **asked)
        assert caught.value.param == min(asked, key=list(asked).index)

    def test_the_smallest_and_the_longest(self, tmp_path: Path) -> None:
        """One pixel is lifted to the model's least; a side may be 200 times the other, and no more."""
        assert self.size(tmp_path, 1, 1) == 56 * 56
        assert self.size(tmp_path, 1, 200) > 0
        with pytest.raises(InvalidRequest, match="201 x 1 pixels: the longer side may be at most 200 times"):
            self.size(tmp_path, 201, 1)


def test_a_large_picture_is_refused_by_its_header(tmp_path: Path) -> None:
    """Its pixels are not there to be decoded."""
    data = picture(3000, 1000, "BMP")[:200]
    made = processor(tmp_path, "qwen2", limits=MediaLimits(max_pixels=2_999_999))
    with pytest.raises(InvalidRequest, match="this has more pixels than this server allows, 2999999"):
        prepared(made, tmp_path, data)


def test_an_operator_may_allow_more_than_pillow_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's own limit is left as it was."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    made = processor(tmp_path, "qwen2", limits=MediaLimits(max_pixels=10_000))
    assert prepared(made, tmp_path, picture(100, 100))[0].pieces == 1
    assert Image.MAX_IMAGE_PIXELS == 100


def test_an_unreadable_orientation_is_none(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (80, 40)).save(file, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    shape, _ = prepared(processor(tmp_path, "qwen2"), tmp_path, file.getvalue())
    assert shape.shape[1] < shape.shape[2]
