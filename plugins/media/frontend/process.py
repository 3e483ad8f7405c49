"""The helper processes that prepare media, as the API process sees them: how one starts, and what one item comes to."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaItem
from pegboard.plugins.media.frontend.store import disk_full, full
from pegboard.plugins.media.frontend.worker import DIGEST_BYTES, FULL, NO_DISK, TOO_COMPLEX, Reply, Start, Work
from pegboard.toolkit.system.helper_child import HelperChild, HelperEnded
from pegboard.toolkit.system.helper_pool import HelperKind, HelperPool

if TYPE_CHECKING:
    from pegboard.plugins.media.frontend.stats import MediaStats
    from pegboard.plugins.media.frontend.store import MediaFile
    from pegboard.toolkit.media.inputs import MediaInput
    from pegboard.toolkit.system.helper_child import Look

logger = logging.getLogger(__name__)

MODULE = "pegboard.plugins.media.frontend.worker"
START_SECONDS = 60.0
"""What a helper gets for importing its libraries."""
LOST = "media_helper_lost"
MOST_REPLY = 2**20
"""Bytes of what a helper may say of an item."""


@dataclass(frozen=True, slots=True)
class PrepareJob:
    """An item: the file in which it was received, and the empty one for its pixels. It is expected to have so many
    pixels (`MediaProcessor.expected_pixels`).
    """

    media: MediaInput
    received: MediaFile
    prepared: MediaFile
    pixels: int = 0
    asker: str = ""


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """An item that is ready, and the file with its pixels."""

    item: MediaItem
    file: MediaFile


def make_pool(start: Start, stats: MediaStats, helpers: int, jobs: int) -> HelperPool[PrepareJob, PreparedItem]:
    """Return the pool whose helpers are what `start` says, each for so many jobs. Its futures raise InvalidRequest."""
    preparing = _Preparing(start, stats)
    kind = HelperKind("media", preparing.start, preparing.work, _lost, closing)
    return HelperPool(kind, helpers=helpers, jobs=jobs)


class _Preparing:
    """What the threads of a pool do with their helpers."""

    def __init__(self, start: Start, stats: MediaStats) -> None:
        self._start = start
        self._stats = stats
        self._most = 3 * start.limits.resized_pixels

    def start(self, look: Look) -> HelperChild:
        """Start a helper. Raises InvalidRequest (500) where that does not work; the log has the reason."""
        try:
            child = HelperChild(MODULE, str(os.getpid()), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        except OSError as error:
            raise self._unusable(str(error)) from error
        try:
            answer = child.ask(msgspec.msgpack.encode(self._start), START_SECONDS, look)
            reply = msgspec.msgpack.decode(answer, type=Reply)
            if reply.status:
                raise self._unusable(reply.error)
        except (HelperEnded, TimeoutError) as error:
            child.close()
            raise self._unusable(f"{error}; media.helper_bytes may be too small") from error
        except BaseException:
            child.close()
            raise
        return child

    def work(self, child: HelperChild, job: PrepareJob, look: Look) -> PreparedItem | InvalidRequest:
        """Prepare an item, or return why not. Raises that where the helper is of no more use, and HelperLost."""
        job.prepared.shrink(0)
        room = job.prepared.take_some(self._most)
        media = job.media
        work = Work(media.kind, job.received.name, job.prepared.name, room, media.settings, media.encoded)
        began = time.monotonic()
        seconds = self._start.seconds
        try:
            answer = child.ask(msgspec.msgpack.encode(work), 3 * seconds + 5, look, most=MOST_REPLY)
        except TimeoutError:
            # The kernel would have ended it, had it got more computing time. Another try would cost the others as much.
            raise _too_complex(HelperEnded(-signal.SIGPROF), seconds) from None
        except HelperEnded as ended:
            raise _too_complex(ended, seconds) from None
        finally:
            self._stats.seconds_of(time.monotonic() - began)
        return self._read(job, answer, room)

    def _read(self, job: PrepareJob, answer: bytes, room: int) -> PreparedItem | InvalidRequest:
        """Return what a helper's answer comes to. It is not believed: what runs there may have been taken over by what
        it reads.
        """
        try:
            reply = msgspec.msgpack.decode(answer, type=Reply)
            size = job.prepared.path.stat().st_size
        except msgspec.MsgspecError:
            raise _too_complex(HelperEnded(None), self._start.seconds) from None
        except OSError:
            # Removed meanwhile: nothing waits for it any more.
            return closing()
        job.prepared.shrink(size)
        if reply.code == FULL:
            return full() if room < self._most else self._too_large(job)
        if reply.code == NO_DISK:
            return disk_full(OSError(reply.error))
        if reply.status:
            error = InvalidRequest(reply.error, code=reply.code, status=reply.status)
            if reply.spent:
                raise error
            return error
        states = reply.encoded
        wanted = math.prod(reply.shape) if states is None else states.nbytes
        if size != wanted or len(reply.digest) != DIGEST_BYTES or (states is None) != (job.media.encoded is None):
            raise _too_complex(HelperEnded(None), self._start.seconds)
        return PreparedItem(_item(job, reply), job.prepared)

    def _too_large(self, job: PrepareJob) -> InvalidRequest:
        if job.media.encoded is None:
            most = self._start.limits.resized_pixels
            text = f"resized, this has more than the {most} pixels that one item may have (media.max_resized_pixels)"
        else:
            text = f"its states have more than {self._most} bytes, which are three times media.max_resized_pixels"
        return InvalidRequest(text, code="media_too_large")

    @staticmethod
    def _unusable(why: str) -> InvalidRequest:
        logger.error("the helper process for media cannot start: %s", why)
        return InvalidRequest("the process that prepares media cannot start", code="internal_error", status=500)


def _item(job: PrepareJob, reply: Reply) -> MediaItem:
    return MediaItem(
        kind=job.media.kind,
        digest=reply.digest,
        file=job.prepared.name,
        shape=reply.shape,
        grid=reply.grid,
        pieces=reply.pieces,
        times=reply.times,
        encoded=reply.encoded,
    )


def _too_complex(ended: HelperEnded, seconds: float) -> InvalidRequest:
    if ended.code == -signal.SIGPROF:
        text = f"decoding this takes longer than the {seconds:g} s that an item of its size may (media.prepare_seconds)"
    else:
        text = "decoding this ended the process that did it"
    return InvalidRequest(text, code=TOO_COMPLEX)


def placed(error: InvalidRequest, place: str) -> InvalidRequest:
    """Return an error with the item's place in the request; one of the server's has none."""
    if not place or error.status >= 500:
        return error
    return InvalidRequest(f"{place}: {error.message}", param=place, code=error.code, status=error.status)


def _lost(why: str) -> InvalidRequest:
    text = f"the process that prepares media was lost twice ({why}), through no fault of what was sent; try again"
    return InvalidRequest(text, code=LOST, status=503)


def closing() -> InvalidRequest:
    """Return the error of what is under way when the server stops."""
    return InvalidRequest("the server is shutting down, try another one", code="shutting_down", status=503)
