"""Files that are not what they seem, or too much: each with the kind that a client would call it."""

from __future__ import annotations

import io
import json
import math
import resource
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaContext, MediaSource
from pegboard.plugins.mm_qwen_vl.options import QwenVLProcessorOptions
from pegboard.plugins.mm_qwen_vl.processor import QwenVLProcessor
from pegboard.toolkit.media.inputs import MediaKind, MediaSettings
from tests.plugins.mm_qwen_vl.clips import video_file
from tests.plugins.mm_qwen_vl.models import config

Bad = tuple[str, MediaKind, bytes, dict[str, Any]]
"""A name, a kind, a file, and what the request says about it."""


def corpus() -> Iterator[Bad]:
    """Yield every bad file."""
    yield from _no_pictures()
    yield from _truncated_pictures()
    yield from _bombs()
    yield from _no_videos()
    yield from _bad_videos()
    yield from _bad_requests()


def _saved(form: str, width: int = 60, height: int = 40, mode: str = "RGB") -> bytes:
    """A picture of noise; WebP without loss."""
    file = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(file, form, lossless=True)
    return file.getvalue()


def _no_pictures() -> Iterator[Bad]:
    noise = np.random.default_rng(2).bytes(4000)
    texts = {
        "nothing": b"",
        "one byte": b"\xff",
        "noise": noise,
        "zeros": bytes(4000),
        "text": b"Hello.\n" * 500,
        "a page": b"<!doctype html><html><body>404</body></html>",
        "drawing": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect/></svg>',
        "paper": b"%PDF-1.7\n" + noise,
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\n",
        "archive": b"PK\x03\x04" + noise,
        "half a signature": b"\x89PNG\r\n",
        "heic": b"\0\0\0\x18ftypheic" + noise,
        "avif": b"\0\0\0\x1cftypavif" + noise,
    }
    for name, data in texts.items():
        yield f"{name} as picture", "image", data, {}
    for form in ("TIFF", "PPM", "ICO", "TGA", "PCX", "DDS"):
        yield f"{form} as picture", "image", _saved(form), {}
    yield "video as picture", "image", video_file(np.zeros((3, 32, 32, 3), np.uint8)), {}


def _truncated_pictures() -> Iterator[Bad]:
    for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
        data = _saved(form)
        for part in (0.02, 0.3, 0.9):
            yield f"{form} truncated at {part}", "image", data[: int(len(data) * part)], {}
    for form, at in (("PNG", 60), ("WEBP", 30)):
        data = _saved(form)
        yield f"damaged {form}", "image", data[:at] + bytes(170) + data[at + 170 :], {}


def _png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A grey PNG of one bit, which comes to little for any size: rows of zeros, or these chunks in their place."""
    rows = zlib.compress(bytes(min((width // 8 + 1) * height, 2**24)), 9)
    found = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    for name, data in ((b"IHDR", header), *chunks, (b"IDAT", rows), (b"IEND", b"")):
        found += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return found


def _gif(width: int, height: int, left: int = 0, frame: tuple[int, int] = (1, 1)) -> bytes:
    screen = struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    picture = b"," + struct.pack("<HHHHB", left, 0, *frame, 0) + b"\x02\x02D\x01\0;"
    return b"GIF89a" + screen + picture


def _bombs() -> Iterator[Bad]:
    yield "100 megapixels", "image", _png(10_000, 10_000), {}
    yield "a square without end", "image", _png(2**31 - 1, 2**31 - 1), {}
    yield "GIF of 65535 squared", "image", _gif(65_535, 65_535), {}
    yield "GIF whose frame is larger", "image", _gif(10, 10, 60_000, (60_000, 60_000)), {}
    yield "text that unpacks", "image", _png(9, 9, (b"zTXt", b"x\0\0" + zlib.compress(bytes(2**27), 9))), {}
    yield "profile that unpacks", "image", _png(9, 9, (b"iCCP", b"x\0\0" + zlib.compress(bytes(2**27), 9)))[:-30], {}
    yield "BMP of 30000 squared", "image", _sized_bmp(30_000, 30_000), {}
    yield "BMP without a height", "image", _sized_bmp(10, 0), {}
    jpeg = bytearray(_saved("JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", 65_500, 65_500)
    yield "JPEG of 65500 squared", "image", bytes(jpeg), {}
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xfe\x3f\0" * 2 + _saved("WEBP")[12:]
    yield "WebP of 16383 squared", "image", b"RIFF" + struct.pack("<I", len(body)) + body, {}
    yield "1 x 10000", "image", _saved("PNG", 1, 10_000), {}
    yield "10000 x 1", "image", _saved("GIF", 10_000, 1, "P"), {}
    yield "201 x 1", "image", _saved("BMP", 201, 1, "L"), {}


def _sized_bmp(width: int, height: int) -> bytes:
    data = bytearray(_saved("BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def _no_videos() -> Iterator[Bad]:
    noise = np.random.default_rng(3).bytes(4000)
    texts = {
        "nothing": b"",
        "noise": noise,
        "text": b"Hello.\n" * 500,
        "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "list of files": b"ffconcat version 1.0\nfile /etc/passwd\n",
        "session": b"v=0\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
        "manifest": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period/></MPD>',
        "header alone": b"\0\0\0\x18ftypisom\0\0\0\0isommp42\0\0\0\x08mdat",
        "sound": _sound(),
        "picture": _saved("JPEG"),
        "PNG": _saved("PNG"),
    }
    for name, data in texts.items():
        yield f"{name} as video", "video", data, {}


def _sound() -> bytes:
    """A second of silence: a video file without frames."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=8000)
        assert isinstance(stream, av.AudioStream)
        stream.layout = "mono"
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        silence.sample_rate = 8000
        out.mux(stream.encode(silence))
        out.mux(stream.encode())
    return file.getvalue()


def _bad_videos() -> Iterator[Bad]:
    noise = np.random.default_rng(4).integers(0, 256, (30, 64, 64, 3), dtype=np.uint8)
    mp4 = video_file(noise, container="mp4", codec="libx264", pixels="yuv420p")
    # The index first, as files for the web have it: without that, nothing of a truncated one could be read.
    index = mp4.index(b"moov") - 4
    data = mp4.index(b"mdat") - 4
    moved = _with_index_first(mp4, index, data)
    for part in (0.1, 0.5, 0.9):
        yield f"MP4 truncated at {part}", "video", mp4[: int(len(mp4) * part)], {}
        yield f"MP4 with its index truncated at {part}", "video", moved[: int(len(moved) * part)], {}
    yield "MP4 without data", "video", mp4[:data] + mp4[index:], {}
    avi = video_file(noise, container="avi", codec="mjpeg", pixels="yuvj420p")
    yield "AVI truncated", "video", avi[: len(avi) // 2], {}
    mkv = video_file(noise)
    yield "Matroska truncated in its header", "video", mkv[:200], {}
    start = mkv.index(b"\x1f\x43\xb6\x75") + 40
    yield "Matroska of zeros", "video", mkv[:start] + bytes(len(mkv) - start), {}
    slow = np.zeros((10_000, 16, 16, 3), np.uint8)
    yield "10000 frames in 10000 seconds", "video", video_file(slow, 1.0, codec="mpeg4", pixels="yuv420p"), {}
    yield "GIF of 65535 squared as video", "video", _gif(65_535, 65_535), {}
    yield "32 x 9600", "video", video_file(noise[:4].reshape(4, -1, 2, 3)[:, :600]), {}


def _with_index_first(mp4: bytes, index: int, data: int) -> bytes:
    """An MP4 file with its index before its data, and the places in it moved accordingly."""
    moov = bytearray(mp4[index:])
    at = moov.index(b"stco") + 8
    (count,) = struct.unpack_from(">I", moov, at)
    for i in range(count):
        (place,) = struct.unpack_from(">I", moov, at + 4 + 4 * i)
        struct.pack_into(">I", moov, at + 4 + 4 * i, place + len(moov))
    return mp4[:data] + bytes(moov) + mp4[data:index]


def _bad_requests() -> Iterator[Bad]:
    picture, clip = _saved("PNG"), video_file(np.zeros((4, 32, 32, 3), np.uint8))
    yield "no pixels at most", "image", picture, {"max_pixels": 0}
    yield "more at least than at most", "image", picture, {"min_pixels": 100, "max_pixels": 99}
    yield "more than the server allows", "image", picture, {"min_pixels": 2**40}
    yield "10000 frames", "video", clip, {"num_frames": 10_000}
    yield "frames and a rate", "video", clip, {"num_frames": 4, "fps": 1.0}
    yield "a rate below 0", "video", clip, {"fps": -1.0}
    yield "a rate that is none", "video", clip, {"fps": math.nan}


def write_corpus(directory: Path) -> int:
    """Write every bad file, with a list of them, and return how many they are."""
    listed = []
    for number, (name, kind, data, asked) in enumerate(corpus()):
        (directory / f"secret-{number}").write_bytes(data)
        listed.append((name, kind, asked))
    (directory / "list.json").write_text(json.dumps(listed), "utf-8")
    return len(listed)


def main(directory: Path, most: int) -> None:
    """Prepare every bad file in this process, whose memory is limited, and write what came of each as JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    processor = QwenVLProcessor(QwenVLProcessorOptions(), MediaContext(directory, config("qwen3")))
    for number, (name, kind, asked) in enumerate(json.loads((directory / "list.json").read_text("utf-8"))):
        found: dict[str, Any] = {"name": name, "error": "", "message": "", "status": 0}
        source = MediaSource(kind, directory / f"secret-{number}", MediaSettings(**asked))
        out = Discarding()
        try:
            processor.prepare(source, out)
        except InvalidRequest as error:
            found.update(error="InvalidRequest", message=error.message, status=error.status)
        except Exception as error:
            found.update(error=type(error).__name__, message=str(error))
        found["kilobytes"] = _most_memory()
        sys.stdout.write(json.dumps(found) + "\n")


def _most_memory() -> int:
    """Kilobytes that this process has taken at most. `getrusage` begins with those of the process that started it."""
    status = Path("/proc/self/status").read_text("utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


class Discarding(io.BytesIO):
    """A file that keeps nothing, so that memory is that of the processor."""

    def write(self, data: Any, /) -> int:
        return memoryview(data).nbytes


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
