"""Videos, decoded with PyAV: the frames that a model's rule takes, one at a time.

A first pass over the packets, without decoding, counts frames: many formats do not say how many they have, and a
truncated file says too many. The second decodes as far as the last frame that is taken, and converts those only. PyAV
is imported when a video is prepared, in a helper process.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import av
import numpy as np
from av.buffer import Buffer
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaLimits, MediaShape, MediaSource
from pegboard.plugins.mm_qwen_vl.damage import check_source, decoding
from pegboard.plugins.mm_qwen_vl.frames import check_sampling, choose_frames, frame_times
from pegboard.plugins.mm_qwen_vl.settings import ModelSettings
from pegboard.plugins.mm_qwen_vl.sizes import Size, video_size
from pegboard.toolkit.media.inputs import MediaSettings

# Lists and playlists, which name other files, are not among them.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,asf,mpegts,mpeg,ogg,gif"
_CODECS = (
    "h264,hevc,vp8,vp9,av1,libdav1d,libaom-av1,mpeg4,mpeg1video,mpeg2video,mjpeg,h263,theora,prores,ffv1,flv,gif,"
    "msmpeg4,msmpeg4v2,wmv1,wmv2,wmv3,vc1"
)
_MOST_PER_SECOND = 240
"""Frames a second of the longest video allowed: with `max_seconds`, the most frames that are counted."""
_RATE = 24.0
"""Frames per second of a video that does not say, as in transformers."""
_READABLE = 0.9
"""Part of a video's frames that must be readable. Some formats have packets without a picture of their own."""


@dataclass(frozen=True, slots=True)
class _Clip:
    """A video's frames, and how many of them there are in a second."""

    frames: int
    rate: float


def prepare_video(source: MediaSource, out: BinaryIO, model: ModelSettings, limits: MediaLimits) -> MediaShape:
    """Write the pixels of a video's sampled frames to `out`, and return their shape: whole temporal patches, the last
    one filled with the last frame. Raises InvalidRequest for what is not a video, for one without frames, and for what
    the limits do not allow.
    """
    check_sampling(source.settings, limits)
    with source.file.open("rb") as file:
        clip = _surveyed(file, limits)
        indices = choose_frames(clip.frames, clip.rate, model, source.settings, limits)
        writer = _Writer(out, len(indices), model, source.settings, limits)
        file.seek(0)
        with contextlib.closing(_sampled(file, indices, clip.frames, limits)) as frames:
            for pixels in frames:
                writer.write(pixels)
    return writer.shape(frame_times(indices, clip.frames, clip.rate, model))


class _Writer:
    """Resizes frames and writes them."""

    def __init__(
        self, out: BinaryIO, frames: int, model: ModelSettings, asked: MediaSettings, limits: MediaLimits
    ) -> None:
        self._out = out
        self._frames = frames
        self._model = model
        self._asked = asked
        self._limits = limits
        self._size: Size = (0, 0)
        self._last = b""
        self._written = 0

    def write(self, pixels: NDArray[np.uint8]) -> None:
        """Resize and write a frame [height, width, 3]. The first one decides on the size of all."""
        if not self._last:
            source = (pixels.shape[0], pixels.shape[1])
            self._size = video_size(source, self._frames, self._model, self._asked, self._limits)
        with decoding("video"):
            image = Image.fromarray(pixels).resize(self._size[::-1], resample=self._model.video.pixels.resample)
            self._last = image.tobytes()
        self._repeat(1)

    def shape(self, times: tuple[float, ...]) -> MediaShape:
        """Write what is missing, and return the shape of all that was written. The last frame stands for those that
        cannot be read, and fills the last temporal patch.
        """
        geometry = self._model.geometry
        pieces = -(-self._frames // geometry.temporal_patch_size)
        frames = pieces * geometry.temporal_patch_size
        self._repeat(frames - self._written)
        grid = (pieces, self._size[0] // geometry.patch_size, self._size[1] // geometry.patch_size)
        return MediaShape((frames, *self._size, 3), grid, pieces, times)

    def _repeat(self, times: int) -> None:
        for _ in range(times):
            self._out.write(self._last)
        self._written += times


def _sampled(
    file: BinaryIO, indices: Sequence[int], total: int, limits: MediaLimits
) -> Generator[NDArray[np.uint8], None, None]:
    """Decode the frames at `indices` [height, width, 3], one at a time. The last ones may be missing, of a video that
    can be read nearly to its end.
    """
    reformatter = VideoReformatter()
    wanted, read = deque(indices), 0
    with decoding("video"), _opened(file, limits) as (container, stream):
        for frame in container.decode(stream):
            if read == wanted[0]:
                check_source(frame.width, frame.height, limits)
                pixels = reformatter.reformat(frame, format="rgb24").to_ndarray()
                yield upright(np.asarray(pixels, dtype=np.uint8), frame)
                wanted.popleft()
                if not wanted:
                    return
            read += 1
        if read < _READABLE * total:
            raise InvalidRequest(
                f"of this video's {total} frames only {read} can be read: it is truncated or damaged",
                code="invalid_media",
            )


def upright(pixels: NDArray[np.uint8], frame: VideoFrame) -> NDArray[np.uint8]:
    """Return a frame [height, width, 3] as its display matrix says: quarter turns and reflections, and no others.

    The matrix has nine int32 (a b u, c d v, x y w); a point (p, q) is shown at (a p + c q, b p + d q).
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if not isinstance(matrix, Buffer) or matrix.buffer_size != 36:
        return pixels
    a, b, _, c, d = np.frombuffer(bytes(matrix), dtype=np.int32)[:5].tolist()
    if a == d == 0 and b and c:
        pixels, a, d = pixels.transpose(1, 0, 2), c, b
    elif b or c or not a or not d:
        return pixels
    return np.ascontiguousarray(pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])


def _surveyed(file: BinaryIO, limits: MediaLimits) -> _Clip:
    """Count a video's frames without decoding them. Raises InvalidRequest for one that has none, or too many."""
    most = int(limits.max_seconds * _MOST_PER_SECOND) + 1
    with decoding("video"), _opened(file, limits) as (container, stream):
        check_source(stream.codec_context.width, stream.codec_context.height, limits)
        frames = hidden = 0
        for packet in container.demux(stream):
            frames += bool(packet.size)
            hidden += bool(packet.size and packet.is_discard)
            if frames > most:
                raise InvalidRequest(f"this video has more than {most} frames", code="media_too_large")
        if frames <= hidden:
            raise InvalidRequest("this video has no frames", code="invalid_media")
        if frames < stream.frames:
            raise InvalidRequest(
                f"of this video's {stream.frames} frames only {frames} are there: it is truncated", code="invalid_media"
            )
        clip = _Clip(frames - hidden, _rate(container, stream, frames))
    if clip.frames / clip.rate > limits.max_seconds:
        raise InvalidRequest(
            f"this video takes {clip.frames / clip.rate:.1f} seconds, and this server allows {limits.max_seconds:g}",
            code="media_too_large",
        )
    return clip


def _rate(container: InputContainer, stream: VideoStream, frames: int) -> float:
    """Return the frames per second: as the stream says, or by how long it takes."""
    for rate in (stream.average_rate, stream.guessed_rate):
        if rate and rate > 0:
            return float(rate)
    microseconds = container.duration or 0
    return frames * 1e6 / microseconds if microseconds > 0 else _RATE


@contextlib.contextmanager
def _opened(file: BinaryIO, limits: MediaLimits) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video. Nothing but this file is read, and no frame above the limits is decoded."""
    options = {"format_whitelist": _FORMATS, "codec_whitelist": _CODECS, "protocol_whitelist": "none"}
    with av.open(file, mode="r", options=options, metadata_errors="replace") as container:
        streams = [one for one in container.streams.video if not one.disposition & Disposition.attached_pic]
        if not streams or streams[0].codec_context is None:
            raise InvalidRequest("this file has no video, or none that can be decoded", code="invalid_media")
        context = streams[0].codec_context
        # Coded sizes are padded to whole blocks.
        context.options = {**context.options, "max_pixels": str(limits.max_pixels * 5 // 4 + 2**16)}
        context.thread_count = 1
        yield container, streams[0]
