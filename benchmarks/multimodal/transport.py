"""How pixels reach the encoder: uint8 in a file that the message names, or float32 patches in the message itself.

From a resized picture in one process to the encoder's patches in another, both ends in this one. What both ways have in
common is left out: decoding, resizing, the digest.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import zmq

from benchmarks.multimodal.models import seeing_model
from pegboard.plugins.media.api import MediaItem, MediaPiece
from pegboard.plugins.media.states import read_piece
from pegboard.plugins.mm_qwen_vl.patches import grid_of, patches_of
from pegboard.plugins.mm_qwen_vl.pixel_spec import HALF, PixelSpec
from pegboard.plugins.mm_qwen_vl.vision_spec import VisionSpec
from pegboard.toolkit.model.model_config import read_model_config
from pegboard.tools.bench.images import ImageSize

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIZES = (ImageSize(256, 256), ImageSize(1024, 1024), ImageSize(2048, 2048))


class Inline(msgspec.Struct):
    """A message with a picture's patches, float32 [patches, numbers] as bytes, neither written nor read by a copy."""

    grid: tuple[int, int, int]
    numbers: int
    patches: memoryview


@dataclass(frozen=True)
class Sent:
    """One picture's way: bytes in messages and files, and seconds of the processor."""

    size: int
    cpu: float


class Line:
    """A socket from one process to another, both ends here."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        address = f"ipc://{directory / 'socket'}"
        self._to = self._context.socket(zmq.PUSH)
        self._to.bind(address)
        self._from = self._context.socket(zmq.PULL)
        self._from.connect(address)

    def through(self, data: bytes) -> bytes:
        """Send a message, and receive it."""
        self._to.send(data)
        found: bytes = self._from.recv(copy=True)
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)


class Transport:
    """Both ways, for pictures of one model."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.spec = VisionSpec.from_config(read_model_config(model))
        self.pixels = PixelSpec.from_directory(model, "image", HALF)
        self._directory = directory
        self._line = Line(directory)

    def by_file(self, pixels: NDArray[np.uint8]) -> tuple[torch.Tensor, int]:
        """Return the patches as the encoder has them, and the bytes that were written and sent."""
        item = self._item(pixels)
        file = self._directory / item.file
        file.write_bytes(pixels.data)
        data = self._line.through(msgspec.msgpack.encode(item))
        told = msgspec.msgpack.decode(data, type=MediaItem)
        piece = MediaPiece(told, 0, read_piece(self._directory, told, 0))
        found = patches_of(self.spec, self.pixels, piece, grid_of(self.spec, told, 0), torch.device("cpu"))
        file.unlink()
        return found, pixels.nbytes + len(data)

    def inline(self, pixels: NDArray[np.uint8]) -> tuple[torch.Tensor, int]:
        """Return the same patches, made where the picture was resized."""
        spec, scales = self.spec, self.pixels
        _, rows, columns = self._item(pixels).grid
        merge, patch = spec.merge, spec.patch
        mean, std = np.array(scales.mean, np.float32), np.array(scales.std, np.float32)
        values = (pixels.astype(np.float32) * np.float32(scales.scale) - mean) / std
        blocks = values.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        turned = blocks.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
        shape = (*turned.shape[:5], spec.temporal, *turned.shape[6:])
        patches = np.ascontiguousarray(np.broadcast_to(turned, shape)).reshape(rows * columns, -1)
        message = Inline((1, rows, columns), patches.shape[1], patches.view(np.uint8).data.cast("B"))
        data = self._line.through(msgspec.msgpack.encode(message))
        told = msgspec.msgpack.decode(data, type=Inline)
        with warnings.catch_warnings():
            # It is only read.
            warnings.simplefilter("ignore", UserWarning)
            found = torch.frombuffer(told.patches, dtype=torch.float32)
        return found.view(-1, told.numbers), len(data)

    def _item(self, pixels: NDArray[np.uint8]) -> MediaItem:
        height, width, _ = pixels.shape
        grid = (1, height // self.spec.patch, width // self.spec.patch)
        return MediaItem("image", bytes(32), "picture", (1, height, width, 3), grid)

    def close(self) -> None:
        self._line.close()


def measure(folder: Path, size: str = "small", sizes: Sequence[ImageSize] = SIZES, times: int = 15) -> dict[str, Any]:
    """Return the figures of each size of picture. Ways take turns; medians, and of ratios the smallest and largest."""
    # Threads that wait for each other count as time of the processor, too.
    torch.set_num_threads(1)
    transport = Transport(seeing_model(folder, size), folder)
    random = np.random.default_rng(0)
    try:
        return {str(one): _compared(transport, random, one, times) for one in sizes}
    finally:
        transport.close()


def _compared(transport: Transport, random: np.random.Generator, size: ImageSize, times: int) -> dict[str, Any]:
    found: dict[str, list[Sent]] = {"file": [], "message": []}
    for number in range(times + 2):
        pixels = random.integers(0, 256, (size.height, size.width, 3), np.uint8)
        ways = {"file": transport.by_file, "message": transport.inline}
        sent = {name: _timed(way, pixels) for name, way in ways.items()}
        (one, _), (other, _) = sent.values()
        if not torch.allclose(one, other, atol=1e-5):
            raise RuntimeError("the two ways bring other patches")
        if number >= 2:
            for name, (_, what) in sent.items():
                found[name].append(what)
    ratios = [one.cpu / other.cpu for one, other in zip(found["file"], found["message"], strict=True)]
    return {
        "cpu_ms": {name: statistics.median(one.cpu for one in sent) * 1000 for name, sent in found.items()},
        "bytes": {name: sent[0].size for name, sent in found.items()},
        "cpu_ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "bytes_ratio": found["file"][0].size / found["message"][0].size,
    }


def _timed(
    way: Callable[[NDArray[np.uint8]], tuple[torch.Tensor, int]], pixels: NDArray[np.uint8]
) -> tuple[torch.Tensor, Sent]:
    began = time.process_time()
    patches, size = way(pixels)
    return patches, Sent(size, time.process_time() - began)
