"""How long encoding takes on a device beside the host, and errors that show only when it is waited on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pegboard.core.interfaces.batch import StageWork
from pegboard.core.pipeline.executor import Done, LocalExecutor
from pegboard.plugins.media.api import MediaItem, MediaStates, PieceKey
from pegboard.plugins.media.states import EncodedMedia
from pegboard.plugins.media.timing import DeviceTimer, HostTimer, timer_of
from pegboard.plugins.media.work import NAME, EncodePiece, EncodeWork
from tests.plugins.media.media_harness import Album, MediaModel, media_harness, model_of, submit


class Device:
    """Does what was launched, in order, once the host waits for it."""

    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.now = 0.0
        self.waits = 0

    def launch(self, milliseconds: float) -> None:
        self.queue.append(milliseconds)

    def event(self) -> Event:
        return Event(self)


class Event:
    """As torch.Event with `enable_timing`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: float | None = None

    def record(self, stream: Any, /) -> None:
        assert stream is None
        self.device.queue.append(self)

    def synchronize(self) -> None:
        self.device.waits += 1
        while self.at is None:
            one = self.device.queue.pop(0)
            if isinstance(one, Event):
                one.at = self.device.now
            else:
                self.device.now += one

    def elapsed_time(self, other: Event, /) -> float:
        assert self.at is not None, "read before it has happened"
        assert other.at is not None, "read before it has happened"
        return other.at - self.at


def picture(directory: Path, count: int) -> EncodeWork:
    """Work on so many pictures of one pixel and token."""
    pieces = []
    for i in range(count):
        item = MediaItem("image", bytes([i]) * 32, str(i), (1, 1, 1, 3), (1, 1, 1))
        (directory / item.file).write_bytes(b"abc")
        pieces.append(EncodePiece(PieceKey("", item.digest, 0), item, 1))
    return EncodeWork(tuple(pieces))


@pytest.mark.parametrize("beside", [False, True])
def test_what_the_device_takes_counts_and_nothing_waits_for_it(beside: bool, tmp_path: Path) -> None:
    """Neither the batch before nor the one after counts."""
    device = Device()

    def encode(pieces: Any) -> list[MediaStates]:
        device.launch(250 * len(pieces))
        return [MediaStates(torch.zeros(1, 4)) for _ in pieces]

    encoder: Any = SimpleNamespace(levels=0, encode=encode)
    media = EncodedMedia(encoder, 4, torch.float32, tmp_path, lambda: DeviceTimer(device.event))

    def launch(work: Any) -> Any:
        device.launch(1000)
        return Done(None)

    run: Any = launch
    executor = LocalExecutor(run, stages={NAME: media.encode}, thread=beside)
    batch: Any = None
    executor.submit(batch)
    found = executor.submit(StageWork(NAME, picture(tmp_path, 2)))
    executor.submit(batch)
    executor.close()
    assert device.waits == 0, "the host waits while it could plan the next step"
    assert len(media) == 2
    assert found.result() == 0.5
    assert (device.waits, device.now) == (1, 1500.0), "it waited for more than what it asked about"


def test_a_device_that_computes_at_once_is_timed_by_the_host() -> None:
    assert timer_of(torch.device("cpu")) is HostTimer
    assert HostTimer().stop().result() >= 0


@pytest.mark.gpu
def test_the_events_of_a_gpu() -> None:
    timer = timer_of(torch.device("cuda"))()
    x = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        x = x @ x
    seconds = timer.stop().result()
    assert seconds > 20 * 2 * 8192**3 / 2e15


class FailsLate(MediaModel):
    """Encodes, but the first time the device says only afterwards that it has not."""

    late = True

    def encode(self, work: Any) -> Any:
        if not self.late:
            return super().encode(work)
        self.late = False
        self.tries += 1

        def result() -> float:
            raise RuntimeError("said only now")

        return SimpleNamespace(result=result)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_an_error_that_comes_late_is_recovered_from(loop: str, tmp_path: Path) -> None:
    album, harness = Album(tmp_path), media_harness(tmp_path, loop=loop, chunk=16, model=FailsLate)
    asked = {str(i): album.prompt(album.words(i), album.item(i, 2, 2), album.words(3)) for i in range(4)}
    for rid, prompt in asked.items():
        submit(harness, rid, prompt)
    harness.run()
    assert all(harness.tokens(rid) == prompt.answer(8) for rid, prompt in asked.items())
    assert harness.scheduler.counters.failed_batches == 1
    assert model_of(harness).tries > 1
