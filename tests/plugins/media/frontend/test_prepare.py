"""Preparing media with real helper processes: what comes of good ones, of bad ones, and of helpers that are lost."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import functools
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest

from pegboard.conformance.rig.media_toy import ToyProcessor
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.media.api import MediaContext, MediaItem, MediaLimits, MediaSource
from pegboard.plugins.media.frontend import worker
from pegboard.plugins.media.frontend.prepare import Preparer
from pegboard.plugins.media.frontend.sources import Sources
from pegboard.plugins.media.frontend.store import MediaFile
from pegboard.plugins.media.frontend.worker import Work
from pegboard.toolkit.media.inputs import MediaInput, MediaSettings
from tests.fakes.toy_media import ppm, toy_settings
from tests.plugins.media.frontend.scene import MOST, files, picture, preparing
from tests.plugins.media.frontend.web import endless, fetcher, web, whole

PATIENCE = 60.0


def image(data: bytes, place: str = "") -> MediaInput:
    return MediaInput(kind="image", data=data, place=place)


def drill(what: str, place: str = "here") -> MediaInput:
    return image(b"DRILL " + what.encode(), place)


GOOD = image(ppm(picture()))


def until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.01)
    raise AssertionError(f"in vain: {what}")


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preparer]:
    """One for what needs no settings of its own. Each test leaves it as it was."""
    with preparing(tmp_path_factory.mktemp("media")) as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_is_left(preparer: Preparer) -> Iterator[None]:
    yield
    assert (preparer.store.bytes, preparer.store.files, preparer.open) == (0, 0, 0)
    until(lambda: not files(preparer), "an empty folder")


def item_of(preparer: Preparer, media: MediaInput) -> MediaItem:
    with preparer.prepared_now([media]) as [one]:
        return one.item


def error_of(preparer: Preparer, *media: MediaInput) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught, preparer.prepared_now(media):
        pass
    return caught.value


def is_well(preparer: Preparer) -> bool:
    return item_of(preparer, GOOD).shape == (1, 8, 8, 3)


def test_pixels_and_what_is_said_of_them(preparer: Preparer, tmp_path: Path) -> None:
    frames = np.stack([picture(20, 30, seed) for seed in range(3)])
    toy = ToyProcessor(NoOptions(), MediaContext(tmp_path, {"toy_media": toy_settings()}))
    received = tmp_path / "received"
    received.write_bytes(ppm(frames))
    out = io.BytesIO()
    shape = toy.prepare(MediaSource("video", received), out)
    url = "data:video/x;base64," + base64.b64encode(ppm(frames)).decode()
    with preparer.prepared_now([MediaInput(kind="video", url=url)]) as [found]:
        item = found.item
        assert (item.kind, item.shape, item.grid, item.pieces, item.times) == (
            "video", shape.shape, shape.grid, shape.pieces, shape.times,
        )  # fmt: skip
        path = preparer.store.directory / item.file
        assert path.read_bytes() == out.getvalue()
        assert path.stat().st_mode & 0o777 == 0o600
        assert files(preparer) == [item.file], "what was received is gone"
        assert preparer.store.bytes == len(out.getvalue())
    figures = preparer.stats.figures()
    assert figures["prepared_bytes"] == len(out.getvalue())


def test_digests_tell_apart_what_differs(preparer: Preparer) -> None:
    """In a pixel, in dimensions, in kind, in times; and nothing else."""
    pixels = picture(16, 16)
    other = pixels.copy()
    other[3, 3, 1] ^= 1
    flat = np.zeros((2, 8, 16, 3), np.uint8)
    several = [
        image(ppm(pixels)),
        image(ppm(other)),
        MediaInput(kind="video", data=ppm(pixels)),
        image(ppm(np.zeros((8, 32, 3), np.uint8))),
        image(ppm(np.zeros((32, 8, 3), np.uint8))),
        image(ppm(np.zeros((16, 16, 3), np.uint8))),
        MediaInput(kind="video", data=ppm(flat)),
    ]
    digests = [item_of(preparer, one).digest for one in several]
    assert {len(one) for one in digests} == {32}
    assert len(set(digests)) == len(several)
    assert digests == [item_of(preparer, one).digest for one in several]


def test_equal_items_are_prepared_once(preparer: Preparer) -> None:
    data = ppm(picture(seed=5))
    url = "data:;base64," + base64.b64encode(data).decode()
    before = sum(preparer.stats.items.values())
    several = [image(data), image(bytes(data)), MediaInput(kind="image", url=url), MediaInput(kind="image", url=url[:])]
    several.append(MediaInput(kind="image", data=data, settings=MediaSettings(detail="low")))
    with preparer.prepared_now(several) as found:
        assert len({one.item.file for one in found}) == 2
        assert found[0].item == found[1].item == found[2].item == found[3].item
        assert len(files(preparer)) == 2
    assert sum(preparer.stats.items.values()) - before == 2


def test_nothing_to_prepare(preparer: Preparer) -> None:
    with preparer.prepared_now([]) as found:
        assert found == []


def test_files_stay_for_those_that_keep_them(preparer: Preparer) -> None:
    with preparer.prepared_now([GOOD]) as [found]:
        found.file.keep()
    assert files(preparer) == [found.item.file]
    found.file.drop()


@pytest.mark.parametrize(
    ("media", "status", "code"),
    [
        (image(b"nothing known", "here"), 400, "invalid_media"),
        (image(ppm(picture())[:-1], "here"), 400, "invalid_media"),
        (MediaInput(kind="image", url="data:;base64,!", place="here"), 400, "invalid_media_address"),
        (MediaInput(kind="image", url="http://open.test/", place="here"), 400, "media_source_not_allowed"),
        (drill("refuse"), 400, "as_asked"),
        (drill("raise"), 400, "invalid_media"),
        (drill("die"), 400, "media_too_complex"),
        (drill("leave"), 400, "media_too_complex"),
        (drill("eat"), 400, "media_too_complex"),
        (drill("nest"), 400, "media_too_complex"),
        (drill("rave"), 400, "media_too_complex"),
        (drill("flood"), 400, "media_too_complex"),
        (drill("lie"), 500, "internal_error"),
        (drill("nothing"), 500, "internal_error"),
    ],
)
def test_bad_ones(preparer: Preparer, media: MediaInput, status: int, code: str) -> None:
    before = preparer.stats.failures[code]
    error = error_of(preparer, GOOD, media)
    assert (error.status, error.code) == (status, code), error.message
    if status == 400:
        assert error.param == "here"
        assert error.message.startswith("here: ")
    assert str(preparer.store.directory) not in error.message
    assert preparer.stats.failures[code] == before + 1
    assert is_well(preparer)


def test_one_that_talks(preparer: Preparer) -> None:
    assert item_of(preparer, drill("print")).shape == (1, 8, 8, 3)


def test_more_pixels_than_the_limits_allow(tmp_path: Path) -> None:
    with preparing(tmp_path, limits=MediaLimits(resized_pixels=2**20)) as one:
        error = error_of(one, drill("pour"))
        assert (error.status, error.code) == (400, "media_too_large")
        assert is_well(one)


def test_more_pixels_than_there_is_room_for(tmp_path: Path) -> None:
    with preparing(tmp_path, room=2**21) as one:
        held = one.store.create()
        for size, status, code in ((1, 503, "media_store_full"), (0, 400, "media_too_large")):
            held.shrink(size)
            for media in (drill("pour"), image(bytes(2**21 + 1), "here")):
                error = error_of(one, media)
                assert (error.status, error.code) == (status, code)
                assert "media.max_bytes_in_flight" in error.message
                assert error.param == (None if size else "here")
                assert one.store.bytes == size
        held.drop()
        assert is_well(one)


@pytest.mark.parametrize("what", ["hang", "hang in C"])
def test_one_that_takes_too_long(tmp_path: Path, what: str) -> None:
    with preparing(tmp_path, seconds=4.0) as one:
        # Of a small one, an eighth.
        error = error_of(one, drill(what))
        assert (error.status, error.code) == (400, "media_too_complex")
        assert "0.5 s" in error.message
        assert is_well(one)


@pytest.mark.parametrize("start", [{"factory": "pegboard.nothing:Here"}, {"memory": 2**25}, {"options": {"a": 1}}])
def test_helpers_that_cannot_start(tmp_path: Path, start: dict[str, Any]) -> None:
    with preparing(tmp_path, **start) as one:
        error = error_of(one, GOOD)
        assert (error.status, error.code) == (500, "internal_error")
        assert one.pool.pids() == []
        assert files(one) == []


def test_a_helper_makes_way_for_a_new_one_after_some_jobs(tmp_path: Path) -> None:
    with preparing(tmp_path, jobs=2) as one:
        pids = set()
        for _ in range(5):
            assert is_well(one)
            pids.update(one.pool.pids())
        assert len(pids) == 3
        assert one.pool.lost == 0


class Slow:
    """An item that takes a while, and the helpers that have begun with it."""

    def __init__(self, tmp_path: Path, seconds: float = 1.0) -> None:
        self.begun = tmp_path / "begun"
        self.begun.touch()
        self.media = drill(f"slow {seconds} {self.begun}")

    def pids(self, after: int = 0) -> list[int]:
        return [int(line) for line in self.begun.read_text().split()][after:]


def strike(slow: Slow, number: int, times: int) -> None:
    """Send a signal to as many helpers, each once it is at work."""
    for count in range(times):
        os.kill(until(functools.partial(_others, slow, count), "a helper at work")[0], number)


def _others(slow: Slow, known: int) -> list[int]:
    return slow.pids()[known:]


@contextlib.contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_one_accident_costs_time_only(tmp_path: Path, number: int) -> None:
    slow = Slow(tmp_path)
    with preparing(tmp_path) as one, beside(lambda: strike(slow, number, 1)):
        assert item_of(one, slow.media).shape == (1, 8, 8, 3)
        assert one.pool.lost == 1
        assert len(slow.pids()) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_two_are_the_servers_fault(tmp_path: Path, number: int) -> None:
    slow = Slow(tmp_path)
    with preparing(tmp_path) as one, beside(lambda: strike(slow, number, 2)):
        error = error_of(one, slow.media)
        assert (error.status, error.code) == (503, "media_helper_lost")
        assert is_well(one)


def test_one_that_was_killed_while_idle(preparer: Preparer) -> None:
    assert is_well(preparer)
    [pid] = preparer.pool.pids()
    os.kill(pid, signal.SIGKILL)
    assert is_well(preparer)
    assert preparer.pool.pids() != [pid]


class Noting(Sources):
    """Notes what is received."""

    received: ClassVar[list[MediaInput]] = []

    def receive(self, media: MediaInput, file: MediaFile) -> bytes:
        self.received.append(media)
        return super().receive(media, file)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (MediaInput(kind="image", url="ftp://open.test/", place="here"), "invalid_media_address"),
        (MediaInput(kind="image", url="data:image/png;base64", place="here"), "invalid_media_address"),
        (MediaInput(kind="image", place="here"), "invalid_media_address"),
        (MediaInput(kind="image", url="https://open.test/", place="here"), "media_source_not_allowed"),
        (MediaInput(kind="image", url="file:///etc/passwd", place="here"), "media_source_not_allowed"),
        (MediaInput(kind="image", url="data:," + "%20" * 2000, place="here"), "media_too_large"),
        (image(bytes(1001), "here"), "media_too_large"),
    ],
)
def test_what_is_refused_unread_is_refused_first(tmp_path: Path, wrong: MediaInput, code: str) -> None:
    """Before anything else of the same request is read."""
    Noting.received.clear()
    several = [image(ppm(picture(seed=seed))) for seed in range(8)]
    with preparing(tmp_path, sources=Noting(1000)) as one:
        error = error_of(one, *several, wrong)
        assert (error.status, error.code, error.param) == (400, code, "here")
        assert one.stats.failures == {code: 1}
        assert (one.open, one.store.files) == (0, 0)
        assert is_well(one)
        assert Noting.received == [GOOD]


def test_a_request_with_many_lets_others_in_between(tmp_path: Path) -> None:
    """It has few under way at one time, neither takes the queue nor holds it up, and keeps its order."""
    slow, endless = Slow(tmp_path, 2), Slow(tmp_path, 1000)
    shapes = [(8 * (1 + seed % 3), 8 * (1 + seed // 3)) for seed in range(20)]
    many = [image(ppm(picture(*shape))) for shape in shapes]

    async def scene(one: Preparer) -> None:
        async def prepared(*media: MediaInput) -> list[tuple[int, ...]]:
            async with one.prepared(media) as found:
                return [item.item.shape for item in found]

        running = asyncio.ensure_future(prepared(slow.media, *many, endless.media))
        while not slow.pids():
            await asyncio.sleep(0.01)
        assert one.open == 3
        assert await prepared(*many[:4]) == [(1, *shape, 3) for shape in shapes[:4]]
        assert not one.stats.failures
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert one.open == 0
        assert await prepared(*many, *many) == 2 * [(1, *shape, 3) for shape in shapes]
        assert one.open == 0

    with preparing(tmp_path, most=22, at_once=3) as one:
        asyncio.run(scene(one))


def test_one_request_has_a_bound_of_its_own(tmp_path: Path) -> None:
    several = [image(ppm(picture(seed=seed))) for seed in range(4)]

    async def scene(one: Preparer) -> None:
        async def prepared(*media: MediaInput) -> int:
            async with one.prepared(media) as found:
                return len(found)

        assert await prepared(*several[:3], *several[:3]) == 6
        with pytest.raises(InvalidRequest) as caught:
            await prepared(*several)
        assert (caught.value.status, caught.value.code) == (400, "too_many_media")
        assert "media.max_queued" in caught.value.message
        assert one.stats.failures == {"too_many_media": 1}
        assert sum(one.stats.items.values()) == 3

    with preparing(tmp_path, most=3) as one:
        asyncio.run(scene(one))
        with one.prepared_now(several) as found:
            assert len(found) == 4, "no other request waits for it"


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    several = [image(ppm(picture(seed=seed))) for seed in range(3)]

    async def scene(one: Preparer) -> None:
        async def prepared(*media: MediaInput) -> int:
            async with one.prepared(media) as found:
                return len(found)

        assert await prepared(*several) == 3
        running = [asyncio.ensure_future(prepared(slow.media))]
        while not slow.pids():
            await asyncio.sleep(0.01)
        # Waits for the only helper.
        running.append(asyncio.ensure_future(prepared(several[0])))
        await asyncio.sleep(0)
        assert one.open == 2
        with pytest.raises(InvalidRequest) as caught:
            await prepared(*several[:2])
        assert (caught.value.status, caught.value.code) == (503, "media_queue_full")
        assert list(await asyncio.gather(*running, prepared(several[1]))) == [1, 1, 1]
        assert one.open == 0

    with preparing(tmp_path, most=3) as one:
        asyncio.run(scene(one))


def test_one_that_nothing_waits_for_any_more(tmp_path: Path) -> None:
    """Its files go at once, and its helper does not work on for it."""
    slow = Slow(tmp_path, 1000)

    async def scene(one: Preparer) -> None:
        async def prepare(*media: MediaInput) -> None:
            async with one.prepared(media):
                raise AssertionError("it is never ready")

        tasks = [asyncio.ensure_future(prepare(GOOD, slow.media)) for _ in range(3)]
        while not slow.pids():
            await asyncio.sleep(0.01)
        [pid] = one.pool.pids()
        assert files(one)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (one.store.files, one.store.bytes, one.open) == (0, 0, 0)
        # Large ones are removed beside the loop.
        until(lambda: not files(one), "an empty folder")
        async with one.prepared([GOOD]) as found:
            assert len(found) == 1
        assert one.pool.pids() != [pid]
        assert one.pool.lost == 0

    with preparing(tmp_path) as one:
        asyncio.run(scene(one))


def _note(errors: list[InvalidRequest], one: Preparer, media: MediaInput) -> None:
    errors.append(error_of(one, media))


def test_fetched_ones(tmp_path: Path) -> None:
    """They are prepared like others, and what cannot be fetched has its place in the request."""
    data = ppm(picture(seed=7))
    with web() as site:
        site.answers.update(
            {"/a": whole(data), "/b": whole(data), "/slow": endless(b"HTTP/1.1 200 OK\r\n\r\n", b"", 0.05)}
        )
        sources = Sources(2**20, fetcher(site, max_bytes=2**20))
        with preparing(tmp_path, sources=sources) as one:
            several = [MediaInput(kind="image", url=site.url(path), place="p") for path in ("/a", "/a", "/b")]
            with one.prepared_now([*several, image(data)]) as found:
                assert len({item.item.file for item in found}) == 1
            assert len(site.seen) == 2, "an address that is named twice is fetched once"
            error = error_of(one, MediaInput(kind="image", url=site.url("/a", "closed.test"), place="p"))
            assert (error.message, error.param) == ("p: this address cannot be fetched", "p")

            async def leave() -> None:
                async with asyncio.timeout(0.5), one.prepared([MediaInput(kind="image", url=site.url("/slow"))]):
                    raise AssertionError("it never comes")

            with pytest.raises(TimeoutError):
                asyncio.run(leave())
            until(lambda: not files(one), "an empty folder")


def test_closing_fails_what_is_under_way(tmp_path: Path) -> None:
    slow = Slow(tmp_path, 1000)
    errors: list[InvalidRequest] = []
    with preparing(tmp_path) as one:
        waiting = [threading.Thread(target=_note, args=(errors, one, media)) for media in (slow.media, GOOD)]
        waiting[0].start()
        until(slow.pids, "a helper at work")
        waiting[1].start()
        until(lambda: one.open == 2, "one that waits")
        one.close()
        for thread in waiting:
            thread.join(PATIENCE)
        assert [(error.status, error.code) for error in errors] == [(503, "shutting_down")] * 2
        errors.append(error_of(one, GOOD))
        assert errors[-1].status == 503


def test_without_a_thread_the_next_item_has_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuses(self: threading.Thread) -> None:
        if self.name == "media-0":
            raise RuntimeError("can't start new thread")
        start(self)

    with preparing(tmp_path) as preparer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuses)
            error = error_of(preparer, GOOD)
            assert (error.status, error.code) == (503, "no_thread")
        assert is_well(preparer)


def test_a_file_that_is_gone_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its client has left meanwhile."""
    processor = ToyProcessor(NoOptions(), MediaContext(tmp_path, {"toy_media": toy_settings()}, MediaLimits()))
    (tmp_path / "prepared").touch()
    reply = worker.prepare(processor, Work("image", "received", "prepared", MOST, MediaSettings()), tmp_path)
    assert (reply.status, reply.code) == (503, "media_helper_lost")
    assert not caplog.records


def test_a_full_disk_is_the_servers_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper says so, and in its answer nothing blames the picture."""
    processor = ToyProcessor(NoOptions(), MediaContext(tmp_path, {"toy_media": toy_settings()}, MediaLimits()))
    (tmp_path / "received").write_bytes(ppm(picture()))
    (tmp_path / "prepared").touch()
    for number, code in ((errno.ENOSPC, worker.NO_DISK), (errno.EFBIG, worker.FULL)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", Mock(side_effect=OSError(number, os.strerror(number))))
            reply = worker.prepare(processor, Work("image", "received", "prepared", MOST, MediaSettings()), tmp_path)
        assert (reply.status, reply.code) == (503, code)
