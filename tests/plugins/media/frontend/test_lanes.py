"""Items wait for none that takes much longer, nor for all of another client's; and whose fault a slow one is."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaSource
from pegboard.plugins.media.frontend.lanes import LANES, Lanes, lane_of
from pegboard.plugins.media.frontend.prepare import UNKNOWN_PIXELS, Preparer
from pegboard.plugins.media.frontend.process import PreparedItem, PrepareJob, closing, make_pool
from pegboard.plugins.media.frontend.sources import Sources
from pegboard.plugins.media.frontend.stats import MediaStats
from pegboard.plugins.media.frontend.store import MediaFile, MediaStore
from pegboard.toolkit.media.inputs import EncodedForm, MediaInput
from pegboard.toolkit.system import helper_process
from pegboard.toolkit.system.helper_process import HelperLost, Watch
from tests.fakes.toy_media import ppm
from tests.plugins.media.frontend.scene import picture, preparing, start_of, toy_model


def image(data: bytes, **more: Any) -> MediaInput:
    return MediaInput(kind="image", data=data, **more)


def test_a_small_picture_waits_for_no_large_one(tmp_path: Path) -> None:
    """One that takes a thousand seconds is under way, and more of them wait. Before, none passed them."""
    begun = tmp_path / "begun"
    begun.touch()
    large = [image(b"DRILL slow 1000 " + str(begun).encode() + b" " * i) for i in range(3)]

    def expect(source: MediaSource) -> int:
        return 2**26 if source.file.read_bytes().startswith(b"DRILL") else 64

    async def scene(one: Preparer) -> None:
        async def prepared(media: MediaInput) -> int:
            async with one.prepared([media]) as found:
                return len(found)

        running = [asyncio.ensure_future(prepared(media)) for media in large]
        while not begun.read_text():
            await asyncio.sleep(0.01)
        assert await prepared(image(ppm(picture()))) == 1
        assert not any(task.done() for task in running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    with preparing(tmp_path, expect=expect) as one:
        asyncio.run(scene(one))


class Fake(Lanes):
    """Notes what comes."""

    def __init__(self) -> None:
        self.jobs: list[PrepareJob] = []

    def submit(self, job: PrepareJob) -> Future[PreparedItem]:
        self.jobs.append(job)
        future: Future[PreparedItem] = Future()
        future.set_exception(closing())
        return future

    def close(self) -> None:
        """No helpers."""


def test_who_asks_and_what_it_costs_are_known(tmp_path: Path) -> None:
    lanes = Fake()

    def expect(source: MediaSource) -> int:
        size = source.file.stat().st_size
        return 1000 * size if size < 100 else 1 // 0

    preparer = Preparer(
        MediaStore(tmp_path / "pegboard-media-x", 2**20), Sources(2**20), lanes, MediaStats(), most=8, expect=expect
    )

    async def scene(media: MediaInput) -> None:
        with pytest.raises(InvalidRequest):
            async with preparer.prepared([media], "alice"):
                pass

    for media in (image(bytes(50)), image(bytes(200)), image(bytes(200), encoded=EncodedForm(grid=(1, 2, 2)))):
        asyncio.run(scene(media))
    preparer.close()
    assert [(job.asker, job.pixels) for job in lanes.jobs] == [
        ("alice", 50_000),
        ("alice", UNKNOWN_PIXELS),
        ("alice", 50),
    ]


def test_lanes_end_with_one_for_all_sizes() -> None:
    assert [lane_of(one) for one in (0, 4 * 2**20, 4 * 2**20 + 1, 32 * 2**20, 2**40)] == [0, 0, 1, 1, 2]
    assert LANES[-1].share == 1.0


# ---- whose fault it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("computed", "fault"), [(0.0, HelperLost), (0.9, HelperLost), (1.1, TimeoutError)])
def test_a_second_of_computing_is_enough_to_be_at_fault(
    computed: float, fault: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bomb in a helper that gets a fiftieth of a processor was an accident, before."""
    seen, clock = iter([10.0, 10.0 + computed]), iter([0.0, 100.0])
    monkeypatch.setattr(helper_process, "computed", lambda pid: next(seen))
    monkeypatch.setattr(helper_process, "time", Mock(monotonic=lambda: next(clock)))
    reading, writing = os.pipe()
    try:
        with pytest.raises(fault):
            Watch(os.getpid(), 65.0).wait(reading, select.POLLIN)
    finally:
        os.close(reading)
        os.close(writing)


def test_what_times_out_is_tried_once_and_is_the_senders_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stats, asked = MediaStats(), Mock(side_effect=TimeoutError)
    child = Mock(ask=asked)
    pool = make_pool(start_of(toy_model(tmp_path / "model"), tmp_path), stats, 1, 500)
    monkeypatch.setattr(pool, "_helper_of", lambda seat, look: child)
    file = Mock(spec=MediaFile, take_some=Mock(return_value=1))
    file.name = "x"
    try:
        with pytest.raises(InvalidRequest) as caught:
            pool.submit(PrepareJob(image(b"x"), file, file)).result(60)
    finally:
        pool.close()
    assert (caught.value.status, caught.value.code) == (400, "media_too_complex")
    assert "media.prepare_seconds" in caught.value.message
    assert (asked.call_count, pool.lost) == (1, 0)
    assert signal.SIGPROF.name not in caught.value.message
