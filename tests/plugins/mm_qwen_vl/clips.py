"""Videos that tests make: frames from arithmetic, and files that hold them exactly."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray

CLIPS = {"short": (9, 10.0), "wide": (45, 15.0)}
"""Clips by name: frames, and how many of them a second has."""
_SIZES = {"short": (48, 64), "wide": (90, 200)}


def clip_frames(name: str) -> NDArray[np.uint8]:
    """The frames [frames, height, width, 3] of a clip: noise that is the same everywhere, over a gradient."""
    frames, height, width = (CLIPS[name][0], *_SIZES[name])
    at = np.arange(frames * height * width * 3, dtype=np.uint64)
    noise = ((at * np.uint64(2654435761)) >> np.uint64(13)) % np.uint64(64)
    slope = np.linspace(0, 191, width).astype(np.uint64)[None, None, :, None]
    return (noise.reshape(frames, height, width, 3) + slope).astype(np.uint8)


def video_file(
    frames: NDArray[np.uint8],
    rate: float = 10.0,
    *,
    container: str = "matroska",
    codec: str = "ffv1",
    pixels: str = "bgr0",
    rotation: int = 0,
) -> bytes:
    """A file with these frames. FFV1 in `bgr0` loses nothing, nor does libx264rgb here, which has rotations."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=Fraction(rate).limit_denominator(1001), options={"qp": "0"})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], pixels
        if rotation:
            stream.set_display_rotation(rotation)
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()


def without_its_first_picture(frames: int, distance: int) -> bytes:
    """A file without its first packet: up to the next whole picture, `distance` frames on, nothing can be decoded."""
    whole, file = io.BytesIO(), io.BytesIO()
    with av.open(whole, "w", format="matroska") as out:
        stream = out.add_stream(
            "libx264", rate=10, options={"g": str(distance), "keyint_min": str(distance), "bf": "0"}
        )
        assert isinstance(stream, av.VideoStream)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            grey = np.full((64, 64, 3), number * 2, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        out.mux(stream.encode())
    whole.seek(0)
    with av.open(whole, "r") as source, av.open(file, "w", format="matroska") as out:
        copy = out.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(video=0) if packet.size]
        for packet in packets[1:]:
            packet.stream = copy
            out.mux(packet)
    return file.getvalue()
