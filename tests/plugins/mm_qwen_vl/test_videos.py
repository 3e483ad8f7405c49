"""Videos: frames, sizes and times as transformers' processors have them, and pixels from real files.

`videos.npz` was recorded by record_videos.py from transformers' own video processors, which need torchvision.
"""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaLimits, MediaShape, MediaSource
from pegboard.plugins.mm_qwen_vl.frames import choose_frames, frame_times
from pegboard.plugins.mm_qwen_vl.settings import ModelSettings, read_settings
from pegboard.plugins.mm_qwen_vl.sizes import video_size
from pegboard.toolkit.media.inputs import MediaSettings
from tests.plugins.mm_qwen_vl.clips import CLIPS, clip_frames, video_file, without_its_first_picture
from tests.plugins.mm_qwen_vl.models import GENEROUS, NORMAL, config, processor

RECORDED = np.load(Path(__file__).with_name("videos.npz"))
FAMILIES = ("qwen2_5", "qwen3")


def recorded(family: str, name: str) -> NDArray[Any]:
    found: NDArray[Any] = RECORDED[f"{'qwen3' if family == 'qwen3' else 'qwen2'}_{name}"]
    return found


def settings(family: str, **vision: Any) -> ModelSettings:
    return read_settings(config(family, **vision), Path("/nowhere"))


def samplings(family: str) -> Iterator[tuple[int, float, MediaSettings, list[int], NDArray[Any]]]:
    """The recorded videos: frames, rate, what was asked for, the frames taken, and their times."""
    at = begun = 0
    for (total, rate, fps, count), length in zip(recorded(family, "cases"), recorded(family, "lengths"), strict=True):
        pieces = -(-length // 2) if family == "qwen3" else 1
        steps = recorded(family, "steps")[at : at + length].astype(int)
        times = recorded(family, "times")[begun : begun + pieces]
        at, begun = at + length, begun + pieces
        asked = MediaSettings(fps=fps or None, num_frames=int(count) or None)
        yield int(total), rate, asked, np.cumsum(steps).tolist(), times


@pytest.mark.parametrize("family", FAMILIES)
def test_500_videos_are_sampled_as_by_transformers(family: str) -> None:
    model, beyond = settings(family), 0
    for total, rate, asked, taken, times in samplings(family):
        own = choose_frames(total, rate, model, asked, GENEROUS)
        assert list(own) == [one for one in taken if one < total], f"{total} frames at {rate}, {asked}"
        # Rounding, transformers sometimes takes a frame after the last one, with which it then fails.
        beyond += taken[-1] == total
        if taken[-1] < total:
            found = frame_times(own, total, rate, model)
            if family == "qwen3":
                assert [f"{one:.1f}" for one in found] == [f"{one / 10:.1f}" for one in np.cumsum(times.astype(int))]
            else:
                assert found == tuple(times)
    assert beyond <= 5


@pytest.mark.parametrize("family", FAMILIES)
def test_500_videos_are_resized_as_by_transformers(family: str) -> None:
    model, refused = settings(family), 0
    for frames, height, width, least, most, cap, *size in recorded(family, "sizes").tolist():
        video = dataclasses.replace(
            model.video,
            pixels=dataclasses.replace(model.video.pixels, min_pixels=least, max_pixels=most),
            cap_tokens=(768 if family == "qwen3" else 128_000) if cap else None,
        )
        changed = dataclasses.replace(model, video=video)
        if size == [0, 0]:
            with pytest.raises(InvalidRequest, match="at most 200 times"):
                video_size((height, width), frames, changed, MediaSettings(), GENEROUS)
            refused += 1
        else:
            assert list(video_size((height, width), frames, changed, MediaSettings(), GENEROUS)) == size
    assert 0 < refused < 50


class Prepared:
    """A video that was prepared: its shape, and its frames."""

    def __init__(self, directory: Path, family: str, data: bytes, limits: MediaLimits | None = None, **asked: Any):
        file = directory / "video"
        file.write_bytes(data)
        out = io.BytesIO()
        # Bounds that leave frames of whole patches as they are.
        free = {"video_preprocessor_config.json": {"size": {"shortest_edge": 1, "longest_edge": 2**30}}}
        made = processor(directory, family, free, limits=limits)
        self.shape: MediaShape = made.prepare(MediaSource("video", file, MediaSettings(**asked)), out)
        self.frames = np.frombuffer(out.getvalue(), np.uint8).reshape(self.shape.shape)


def moving(frames: int, height: int = 224, width: int = 224) -> NDArray[np.uint8]:
    """Frames that all differ, in a size that no family changes."""
    rng = np.random.default_rng(frames)
    return rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


class TestDecoding:
    """The frames of a file that loses nothing, bit by bit."""

    @pytest.mark.parametrize("family", ["qwen2", "qwen3"])
    def test_the_frames_of_the_rule_are_taken(self, tmp_path: Path, family: str) -> None:
        """30 frames in 3 seconds: 6 frames."""
        clip = moving(30)
        taken = [0, 5, 10, 15, 20, 25] if family == "qwen2" else [0, 6, 12, 17, 23, 29]
        found = Prepared(tmp_path, family, video_file(clip))
        assert np.array_equal(found.frames, clip[taken])
        assert found.shape.pieces == found.shape.grid[0] == 3

    def test_the_last_frame_fills_the_last_patch(self, tmp_path: Path) -> None:
        clip = moving(9)
        found = Prepared(tmp_path, "qwen3", video_file(clip), num_frames=5)
        assert np.array_equal(found.frames, clip[[0, 2, 4, 6, 8, 8]])
        assert found.shape.times == pytest.approx((0.1, 0.5, 0.8))

    def test_one_frame(self, tmp_path: Path) -> None:
        clip = moving(1)
        for family in ("qwen2", "qwen2_5", "qwen3"):
            found = Prepared(tmp_path, family, video_file(clip))
            assert np.array_equal(found.frames, clip[[0, 0]])
            assert found.shape.pieces == 1

    def test_num_frames_and_fps(self, tmp_path: Path) -> None:
        file = video_file(moving(40, 56, 56))
        assert Prepared(tmp_path, "qwen3", file, num_frames=7).shape.shape[0] == 8
        assert Prepared(tmp_path, "qwen2", file, num_frames=7).shape.shape[0] == 8
        assert Prepared(tmp_path, "qwen3", file, num_frames=500).shape.shape[0] == 40
        assert Prepared(tmp_path, "qwen2", file, fps=5).shape.shape[0] == 20
        assert Prepared(tmp_path, "qwen2", file, MediaLimits(max_frames=9), fps=5).shape.shape[0] == 8
        assert Prepared(tmp_path, "qwen3", file, MediaLimits(max_frames=10), fps=1e300).shape.shape[0] == 10

    @pytest.mark.parametrize(
        ("container", "codec", "pixels", "says"),
        [
            ("mp4", "libx264", "yuv420p", True),
            ("matroska", "ffv1", "bgr0", False),
            ("asf", "msmpeg4", "yuv420p", False),
        ],
    )
    def test_files_that_do_not_say_how_long_they_are(
        self, tmp_path: Path, container: str, codec: str, pixels: str, says: bool
    ) -> None:
        import av

        data = video_file(moving(25, 64, 64), container=container, codec=codec, pixels=pixels)
        with av.open(io.BytesIO(data)) as file:
            assert bool(file.streams.video[0].frames) is says
        assert Prepared(tmp_path, "qwen3", data).shape.times == pytest.approx((0.3, 1.5, 2.4))

    def test_packets_without_a_picture(self, tmp_path: Path) -> None:
        """99 packets, of which 95 can be decoded: the last picture stands for the others. Of 39 only 34 are too few."""
        found = Prepared(tmp_path, "qwen3", without_its_first_picture(100, 5), num_frames=99).frames
        assert len(found) == 100
        assert all(np.array_equal(one, found[94]) for one in found[95:])
        assert not np.array_equal(found[93], found[94])
        with pytest.raises(InvalidRequest, match="of this video's 39 frames only 34 can be read"):
            Prepared(tmp_path, "qwen3", without_its_first_picture(40, 8))

    @pytest.mark.parametrize("turn", [90, 180, -90])
    def test_rotation(self, tmp_path: Path, turn: int) -> None:
        clip = moving(4, 112, 224)
        data = video_file(clip, container="mp4", codec="libx264rgb", pixels="rgb24", rotation=turn)
        found = Prepared(tmp_path, "qwen2", data)
        assert np.array_equal(found.frames, np.rot90(clip, turn // 90, axes=(1, 2)))

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("name", CLIPS)
    def test_patches_are_near_those_of_torchvision(self, tmp_path: Path, family: str, name: str) -> None:
        """With the sizes and frames of transformers. Its pixels come from torchvision's resizing, up to one step of 256
        away from Pillow's: 1 / 255 / 0.26.
        """
        file = tmp_path / "clip"
        file.write_bytes(video_file(clip_frames(name), CLIPS[name][1]))
        out = io.BytesIO()
        shape = processor(tmp_path, family).prepare(MediaSource("video", file), out)
        assert list(shape.grid) == recorded(family, f"{name}_grid").tolist()
        pixels = np.frombuffer(out.getvalue(), np.uint8).reshape(shape.shape)
        own = normal_patches(pixels, family)
        expected = recorded(family, f"{name}_patches")
        assert np.abs(own[:: max(1, len(own) // 40), ::7] - expected).max() < 0.03


def normal_patches(pixels: NDArray[np.uint8], family: str) -> NDArray[Any]:
    """Frames as transformers' patches: in blocks of 2 x 2, two frames in each."""
    patch, merge = 16 if family == "qwen3" else 14, 2
    mean, std = (np.array(one, np.float32) for one in NORMAL[family])
    normal = (pixels.astype(np.float32) / 255 - mean) / std
    frames, height, width, _ = pixels.shape
    rows, columns = height // patch // merge, width // patch // merge
    cut = normal.reshape(frames // 2, 2, rows, merge, patch, columns, merge, patch, 3)
    return cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(frames // 2 * rows * columns * merge**2, -1)


class TestLimits:
    def test_too_long(self, tmp_path: Path) -> None:
        data = video_file(moving(30))
        with pytest.raises(InvalidRequest, match=r"this video takes 3.0 seconds, and this server allows 2.5"):
            Prepared(tmp_path, "qwen3", data, MediaLimits(max_seconds=2.5))
        with pytest.raises(InvalidRequest, match="more than 25 frames"):
            Prepared(tmp_path, "qwen3", data, MediaLimits(max_seconds=0.1))

    def test_too_many_pixels(self, tmp_path: Path) -> None:
        data = video_file(moving(8, 112))
        with pytest.raises(InvalidRequest, match="224 x 112 pixels, and this server allows 25087"):
            Prepared(tmp_path, "qwen3", data, MediaLimits(max_pixels=112 * 224 - 1))
        with pytest.raises(InvalidRequest, match="in 8 frames, this has at least 8192 pixels"):
            Prepared(tmp_path, "qwen3", data, MediaLimits(resized_pixels=8 * 32 * 32 - 1), num_frames=8)

    def test_frames_that_are_encoded_together_count(self, tmp_path: Path) -> None:
        data = video_file(moving(8))
        for family, factor in (("qwen2", 28), ("qwen2_5", 28), ("qwen3", 32)):
            usual = Prepared(tmp_path, family, data, num_frames=8).shape.shape
            limits = MediaLimits(piece_tokens=12)
            shape = Prepared(tmp_path, family, data, limits, num_frames=8).shape.shape
            assert usual[1] * usual[2] > 12 * factor**2 >= shape[1] * shape[2] >= 8 * factor**2
            assert shape[0] == usual[0], "no frame is lost"

    def test_all_frames_together_count(self, tmp_path: Path) -> None:
        data = video_file(moving(8))
        for family in ("qwen2", "qwen3"):
            shape = Prepared(tmp_path, family, data, MediaLimits(resized_pixels=100_000), num_frames=8).shape.shape
            assert 50_000 < shape[0] * shape[1] * shape[2] <= 100_000

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({"fps": 2.0, "num_frames": 4}, "give fps or num_frames, not both"),
            ({"fps": 0.0}, r"fps must be above 0, got 0.0"),
            ({"fps": float("nan")}, r"fps must be above 0, got nan"),
            ({"num_frames": 769}, "num_frames must be from 1 to 768 on this server, got 769"),
            ({"num_frames": 0}, "num_frames must be from 1 to 768 on this server, got 0"),
        ],
    )
    def test_what_cannot_be_sampled(self, tmp_path: Path, asked: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidRequest, match=message) as caught:
            Prepared(tmp_path, "qwen3", video_file(moving(4)), **asked)
        assert caught.value.param in asked

    def test_pixels_are_asked_for_by_the_frame(self, tmp_path: Path) -> None:
        data = video_file(moving(8))
        for family in ("qwen2", "qwen3"):
            shape = Prepared(tmp_path, family, data, max_pixels=10_000, num_frames=8).shape.shape
            assert 5_000 < shape[1] * shape[2] <= 10_000


def test_a_server_without_the_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = video_file(moving(4))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidRequest, match=r"its extra pegboard\[video\] is not installed") as caught:
        Prepared(tmp_path, "qwen3", data)
    assert caught.value.code == "unsupported"
