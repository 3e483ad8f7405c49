"""The helper processes that prepare media, as the API process sees them: how one starts, and what one item comes to."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.media import MediaItem
from pegboard.core.pipeline.frontend.media.store import full
from pegboard.core.pipeline.frontend.media.worker import FULL, TOO_COMPLEX, Reply, Start, Work
from pegboard.core.toolkit.system.helper_child import HelperChild, HelperEnded
from pegboard.core.toolkit.system.helper_pool import HelperKind, HelperPool
from pegboard.core.toolkit.system.helper_process import HelperLost

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import MediaInput
    from pegboard.core.pipeline.frontend.media.stats import MediaStats
    from pegboard.core.pipeline.frontend.media.store import MediaFile
    from pegboard.core.toolkit.system.helper_child import Look

logger = logging.getLogger(__name__)

MODULE = "pegboard.core.pipeline.frontend.media.worker"
START_SECONDS = 60.0
"""What a helper gets for importing its libraries."""
LOST = "media_helper_lost"


@dataclass(frozen=True, slots=True)
class PrepareJob:
    """An item: the file in which it was received, and the empty one for its pixels."""

    media: MediaInput
    received: MediaFile
    prepared: MediaFile


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """An item that is ready, and the file with its pixels."""

    item: MediaItem
    file: MediaFile


def make_pool(start: Start, stats: MediaStats, *, helpers: int = 1, jobs: int = 500) -> HelperPool[PrepareJob, Reply]:
    """Return the pool whose helpers are what `start` says, each for so many jobs. Its futures raise InvalidRequest, and
    have replies, which `item_of` reads.
    """
    preparing = _Preparing(start, stats)
    return HelperPool(
        HelperKind("media", preparing.start, preparing.work, _lost, spent=lambda reply: reply.spent),
        helpers=helpers,
        jobs=jobs,
    )


def item_of(job: PrepareJob, reply: Reply) -> PreparedItem:
    """Return what a job has come to. Raises InvalidRequest where that is an error."""
    if reply.status:
        raise InvalidRequest(reply.error, code=reply.code, status=reply.status)
    item = MediaItem(
        kind=job.media.kind,
        digest=reply.digest,
        file=job.prepared.name,
        shape=reply.shape,
        grid=reply.grid,
        pieces=reply.pieces,
        times=reply.times,
    )
    return PreparedItem(item, job.prepared)


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

    def work(self, child: HelperChild, job: PrepareJob, look: Look) -> Reply:
        """Prepare an item. Raises InvalidRequest where that ends the helper, and HelperLost."""
        job.prepared.shrink(0)
        room = job.prepared.take_some(self._most)
        settings = job.media.settings
        work = Work(job.media.kind, job.received.name, job.prepared.name, room, settings)
        began = time.monotonic()
        seconds = self._start.seconds
        try:
            answer = child.ask(msgspec.msgpack.encode(work), 3 * seconds + 5, look)
        except TimeoutError:
            # The process ends by itself after so much computing time: it did not get that.
            raise HelperLost("it got too little computing time") from None
        except HelperEnded as ended:
            raise _too_complex(ended, seconds) from None
        finally:
            self._stats.seconds_of(time.monotonic() - began)
        reply = msgspec.msgpack.decode(answer, type=Reply)
        job.prepared.shrink(reply.size)
        if reply.code == FULL:
            raise full() if room < self._most else _too_many_pixels(self._start.limits.resized_pixels)
        return reply

    @staticmethod
    def _unusable(why: str) -> InvalidRequest:
        logger.error("the helper process for media cannot start: %s", why)
        return InvalidRequest("the process that prepares media cannot start", code="internal_error", status=500)


def _too_complex(ended: HelperEnded, seconds: float) -> InvalidRequest:
    if ended.code == -signal.SIGPROF:
        text = f"decoding this takes longer than the {seconds:g} s that it may (media.prepare_seconds)"
    else:
        text = "decoding this ended the process that did it"
    return InvalidRequest(text, code=TOO_COMPLEX)


def _too_many_pixels(most: int) -> InvalidRequest:
    text = f"resized, this has more than the {most} pixels that one item may have (media.max_resized_pixels)"
    return InvalidRequest(text, code="media_too_large")


def _lost(why: str) -> InvalidRequest:
    text = f"the process that prepares media was lost twice ({why}), through no fault of what was sent; try again"
    return InvalidRequest(text, code=LOST, status=503)
