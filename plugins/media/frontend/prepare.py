"""Preparer: from what requests say of their media to items with pixels, through threads that receive them and helper
processes that decode them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaSource
from pegboard.plugins.media.frontend.fetch import MAX_URL
from pegboard.plugins.media.frontend.process import PreparedItem, PrepareJob, closing, placed
from pegboard.plugins.media.frontend.store import Gone, StoreFull
from pegboard.toolkit.system.log_lines import LimitedLog
from pegboard.toolkit.system.turn_threads import TurnThreads

if TYPE_CHECKING:
    from pegboard.plugins.media.frontend.lanes import Lanes
    from pegboard.plugins.media.frontend.sources import Sources
    from pegboard.plugins.media.frontend.stats import MediaStats
    from pegboard.plugins.media.frontend.store import MediaFile, MediaStore
    from pegboard.toolkit.media.inputs import MediaInput

logger = logging.getLogger(__name__)
_log = LimitedLog(logger, most=5, seconds=60.0)

FETCHERS, FETCHERS_EACH = 16, 12
"""Threads that wait for other machines, and how many of them at most for one asker."""
SMALL = 2**20
"""Characters or bytes of an item, up to which a thread of its own writes it down: none waits there for a large one."""
BYTE_SECONDS = 1e-8
"""What it takes to write down a byte, about."""
AT_ONCE = 4
"""Items of one submission that are under way at one time; the others wait, so that submissions take turns."""
UNKNOWN_PIXELS = 2**31
"""What an item is expected to cost where its processor fails to say."""
TOO_MANY = "too_many_media"
QUEUE_FULL = "media_queue_full"


class Preparer:
    """Prepares media: `at_once` items of a submission at one time, and `most` of all of them, those that wait for a
    thread or helper included. `expect` says how many pixels an item has (`MediaProcessor.expected_pixels`). Askers take
    turns everywhere. Thread-safe; owns what it is given, and ends it in `close`.
    """

    def __init__(
        self,
        store: MediaStore,
        sources: Sources,
        pool: Lanes,
        stats: MediaStats,
        *,
        most: int,
        at_once: int = AT_ONCE,
        expect: Callable[[MediaSource], int] = lambda source: 0,
    ) -> None:
        self.at_once = min(at_once, most)
        self.store = store
        self.sources = sources
        self.pool = pool
        self.stats = stats
        self._most = most
        self._expect = expect
        self._open = 0
        self._lock = threading.Lock()
        self._fetchers = TurnThreads(FETCHERS, "media-fetch", most_each=FETCHERS_EACH)
        self._readers = (TurnThreads(1, "media-read-small"), TurnThreads(1, "media-read"))

    @property
    def open(self) -> int:
        """Items that are being prepared, or wait for a thread or a helper."""
        return self._open

    @contextlib.asynccontextmanager
    async def prepared(self, media: Sequence[MediaInput], asker: str = "") -> AsyncIterator[list[PreparedItem]]:
        """Prepare items beside the event loop, in the turns of who asks; within it their files are there. Those that
        are needed for longer, by a request, are kept by it (`MediaFile.keep`).

        Raises InvalidRequest with the place of the item that cannot be prepared: 400 where that is its own fault, 503
        where there is no room for it now, 500. What is refused without reading it is refused before any other item is
        read.
        """
        lot = self._begin(media, asker)
        try:
            yield await asyncio.wrap_future(lot.done)
        finally:
            lot.close()

    @contextlib.contextmanager
    def prepared_now(self, media: Sequence[MediaInput]) -> Iterator[list[PreparedItem]]:
        """As `prepared`, waiting for it, for any number of items: no other request waits for those of a caller that
        waits for itself.
        """
        lot = self._begin(media, bounded=False)
        try:
            yield lot.done.result()
        finally:
            lot.close()

    def close(self) -> None:
        """End helpers, threads and files. What is under way fails. May be called twice."""
        for threads in (self._fetchers, *self._readers):
            threads.close()
        if self.sources.fetcher is not None:
            self.sources.fetcher.close()
        self.pool.close()
        self.store.close()

    def _begin(self, media: Sequence[MediaInput], asker: str = "", *, bounded: bool = True) -> _Lot:
        lot = _Lot(self, media, asker)
        if bounded and lot.size > self._most:
            self.stats.failed(TOO_MANY)
            text = (
                f"{lot.size} pictures and videos are more than the {self._most} that one request may have, all its "
                "prompts together; send fewer prompts at a time (media.max_queued)"
            )
            raise InvalidRequest(text, code=TOO_MANY)
        lot.check()
        with self._lock:
            if self._open + lot.first > self._most:
                self.stats.failed(QUEUE_FULL)
                text = "too many media wait to be prepared; try again later"
                raise InvalidRequest(text, code=QUEUE_FULL, status=503)
            self._open += lot.first
        try:
            lot.begin()
        except BaseException:
            lot.close()
            raise
        return lot

    # ---- for its lots ---------------------------------------------------------------------------------------------

    def receive(self, media: MediaInput, work: Callable[[], None], asker: str) -> Future[None]:
        """Have a thread receive an item. Raises InvalidRequest where there are none any more."""
        size = len(media.data) or len(media.url)
        threads = self._fetchers if self.sources.is_remote(media) else self._readers[size > SMALL]
        try:
            return threads.submit(work, asker, BYTE_SECONDS * size)
        except RuntimeError:
            raise closing() from None

    def expected_pixels(self, media: MediaInput, file: MediaFile) -> int:
        """Return about how many pixels' work a received item is. Reads little of the file."""
        if media.encoded is not None:
            # Copied and checked.
            return file.size // 4
        try:
            return max(0, int(self._expect(MediaSource(media.kind, file.path, media.settings))))
        except OSError:
            # It was dropped meanwhile.
            return UNKNOWN_PIXELS
        except Exception as error:
            _log.log(logging.WARNING, "a media processor cannot say what an item costs: %r", error)
            return UNKNOWN_PIXELS

    def ended(self, count: int) -> None:
        """Note that so many items fewer are being prepared."""
        with self._lock:
            self._open -= count


class _Lot:
    """The media of one submission; what is equal is prepared once. Some are begun at once, and another one whenever
    one is done. `done` has the items in their order, or the first error. `close` gives up what is not done, and drops
    the files. Thread-safe.
    """

    def __init__(self, preparer: Preparer, media: Sequence[MediaInput], asker: str) -> None:
        self.done: Future[list[PreparedItem]] = Future()
        self._preparer = preparer
        self._media = media
        self._asker = asker
        self._places: dict[Hashable, list[int]] = {}
        """Where equal items stand."""
        for index, one in enumerate(media):
            self._places.setdefault(_stated(one), []).append(index)
        self._lock = threading.Lock()
        self._waiting = collections.deque(self._places.values())
        self.first = min(len(self._places), preparer.at_once)
        """How many are begun at once."""
        self._open = 0
        """How many are under way."""
        self._found: dict[int, PreparedItem] = {}
        self._files: set[MediaFile] = set()
        self._by_content: dict[Hashable, Future[PreparedItem]] = {}
        self._work: list[Future[None] | Future[PreparedItem]] = []
        self._closed = False

    @property
    def size(self) -> int:
        """How many items are to be prepared."""
        return len(self._places)

    def check(self) -> None:
        """Raise InvalidRequest for what is refused without reading it."""
        for indexes in self._places.values():
            media = self._media[indexes[0]]
            try:
                self._preparer.sources.check(media)
            except InvalidRequest as error:
                self._preparer.stats.failed(error.code)
                raise placed(error, media.place) from None

    def begin(self) -> None:
        """Start receiving the first ones, which the preparer has counted. Does not block."""
        if not self._media:
            self.done.set_result([])
        with self._lock:
            self._open = self.first
            first = [self._waiting.popleft() for _ in range(self.first)]
        for indexes in first:
            self._start(indexes)

    def close(self) -> None:
        """Give up, or let go. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            files, self._files = self._files, set()
            work, self._work = self._work, []
            unfinished, self._open = self._open, 0
        for one in work:
            one.cancel()
        for file in files:
            file.drop()
        self._preparer.ended(unfinished)

    def _start(self, indexes: list[int]) -> None:
        media = self._media[indexes[0]]
        try:
            work = functools.partial(self._receive, media, indexes)
            self._watch(self._preparer.receive(media, work, self._asker))
        except InvalidRequest as error:
            self._fail(media, error)

    # ---- in the threads -------------------------------------------------------------------------------------------

    def _receive(self, media: MediaInput, indexes: list[int]) -> None:
        try:
            file = self._new_file()
            digest = self._preparer.sources.receive(media, file)
            shared = self._prepare_once((media.kind, media.settings, media.encoded, digest), media, file)
            shared.add_done_callback(functools.partial(self._settle, media, indexes))
        except Gone:
            # By this lot's end, where it is closed.
            self._fail(media, closing())
        except Exception as error:
            self._fail(media, error)

    def _prepare_once(self, content: Hashable, media: MediaInput, file: MediaFile) -> Future[PreparedItem]:
        """Return the future of what a received file becomes; that of an equal one, where there was one."""
        pixels = self._preparer.expected_pixels(media, file)
        job = PrepareJob(media, file, self._new_file(), pixels, self._asker)
        with self._lock:
            known = self._by_content.get(content)
            if known is None:
                mine = self._by_content[content] = self._preparer.pool.submit(job)
        if known is not None:
            self._drop(job.received)
            self._drop(job.prepared)
            return known
        self._watch(mine)
        mine.add_done_callback(functools.partial(self._came, job))
        return mine

    def _came(self, job: PrepareJob, future: Future[PreparedItem]) -> None:
        """Note what a helper has made of a file."""
        received = job.received.size
        self._drop(job.received)
        if not future.cancelled() and future.exception() is None:
            self._preparer.stats.prepared(job.media.kind, received, job.prepared.size)

    def _settle(self, media: MediaInput, indexes: list[int], shared: Future[PreparedItem]) -> None:
        error = closing() if shared.cancelled() else shared.exception()
        if error is not None:
            self._fail(media, error)
            return
        with self._lock:
            self._found.update((index, shared.result()) for index in indexes)
            complete = len(self._found) == len(self._media)
        self._go_on()
        if complete:
            with contextlib.suppress(InvalidStateError):
                self.done.set_result([self._found[i] for i in range(len(self._media))])

    def _go_on(self) -> None:
        """Start the next one, now that one is done; where there is none, fewer are under way."""
        with self._lock:
            if self._closed:
                return
            indexes = self._waiting.popleft() if self._waiting else None
            if indexes is None:
                self._open -= 1
        if indexes is None:
            self._preparer.ended(1)
        elif not self.done.done():
            self._start(indexes)

    def _fail(self, media: MediaInput, error: BaseException) -> None:
        """End with an error, unless this has ended already."""
        if self._closed:
            return
        if isinstance(error, StoreFull):
            error = self._blamed(error)
        if isinstance(error, InvalidRequest):
            self._preparer.stats.failed(error.code)
            error = placed(error, media.place)
        with contextlib.suppress(InvalidStateError):
            self.done.set_exception(error)

    def _blamed(self, error: StoreFull) -> InvalidRequest:
        """Return the error where there is no room: this submission's own fault where nothing else takes any."""
        store = self._preparer.store
        with self._lock:
            alone = store.holds_only(self._files)
        if not alone:
            return error
        text = f"the media of this request need more than the {store.most} bytes that there are"
        return InvalidRequest(f"{text} (media.max_bytes_in_flight)", code="media_too_large")

    def _watch(self, work: Future[None] | Future[PreparedItem]) -> None:
        """Remember what is under way; without it nothing comes any more."""
        with self._lock:
            if not self._closed:
                self._work.append(work)
        work.add_done_callback(lambda future: self._fail(self._media[0], closing()) if future.cancelled() else None)
        if self._closed:
            work.cancel()

    def _new_file(self) -> MediaFile:
        file = self._preparer.store.create()
        with self._lock:
            if not self._closed:
                self._files.add(file)
                return file
        file.drop()
        raise Gone

    def _drop(self, file: MediaFile) -> None:
        """Drop one file before the others."""
        with self._lock:
            if file not in self._files:
                return
            self._files.remove(file)
        file.drop()


def _stated(media: MediaInput) -> Hashable:
    """Return what is equal for items that are stated alike. Long addresses are not compared: that takes a while, and
    their contents are.
    """
    content = media.url if len(media.url) <= MAX_URL else id(media.url), id(media.data)
    return media.kind, media.settings, media.encoded, *content
