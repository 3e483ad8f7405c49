"""Reads by libraries that are told what to read and then asked how far it is: a thread per peer does both."""

from __future__ import annotations

import abc
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from pegboard.plugins.kv_handoff.api.pieces import parts
from pegboard.plugins.kv_handoff.api.transfer import Ranges, TransferError, TransferNews, TransferState

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock

logger = logging.getLogger(__name__)

TokenT = TypeVar("TokenT")

BUSY = 0.05
"""Seconds without an end after which the library is asked less often."""
OFTEN, SELDOM = 0.0002, 0.005
"""Seconds between two questions."""


class Unanswered(TransferError):
    """A part has ended because the peer does not answer. It tells nothing of what else is under way."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is read at once: `source` of the peer's regions into `target` of these here, under a lease."""

    source: Ranges
    target: Ranges
    lease: int


class Wire(abc.ABC, Generic[TokenT]):
    """A peer, as a library reads from it. All calls come from one thread, which may wait in them.

    After an error other than TransferError in any call but `open`, nothing more is begun.
    """

    @abc.abstractmethod
    def open(self) -> None:
        """Get to know the peer. Raises TransferError; then it may be called again, as after a part that failed."""

    def parts(self, whole: Part, limits: Limits) -> Iterator[Part]:
        """Yield a read as `begin` takes it: in parts within the limits, of which both sides are cut alike."""
        for source, target in parts(whole.source, whole.target, limits.part_bytes, limits.part_pieces):
            yield Part(source, target, whole.lease)

    def ready(self) -> bool:
        """Return whether another part may begin now."""
        return True

    @abc.abstractmethod
    def begin(self, part: Part) -> TokenT:
        """Begin to read a part. Raises TransferError where nothing is written."""

    @abc.abstractmethod
    def ended(self, token: TokenT) -> bool:
        """Return whether all its bytes are there. Raises TransferError once it has failed, and nothing more is written.
        Not asked again after either.
        """

    @abc.abstractmethod
    def close(self, under_way: Sequence[TokenT]) -> None:
        """Forget the peer. Parts are under way only where the whole engine closes."""


class Limits(NamedTuple):
    """How a library is used: parts of at most so many bytes and pieces, so many parts of a peer at once; and the
    seconds without an end after which the peer counts as stuck.
    """

    part_bytes: int
    part_pieces: int
    parts: int
    seconds: float


@dataclass(eq=False)
class Job:
    """A read. `stopped` is set by the engine's thread, the rest by the link's."""

    handle: int
    whole: Part
    stopped: bool = False
    reason: str = ""
    incomplete: bool = False
    under_way: int = 0
    parts: Iterator[Part] | None = field(default=None)

    @property
    def over(self) -> bool:
        """Whether no more parts are to begin."""
        return self.stopped or self.incomplete

    def fail(self, reason: str) -> None:
        """Take note that not all of it comes; why, is told of reads that were not abandoned."""
        self.incomplete = True
        if not self.stopped:
            self.reason = self.reason or reason

    def news(self) -> TransferNews:
        """Return its end."""
        if self.reason:
            return TransferNews(self.handle, TransferState.FAILED, self.reason)
        state = TransferState.GONE if self.incomplete else TransferState.DONE
        return TransferNews(self.handle, state)


class Link(Generic[TokenT]):
    """Reads from one peer, part by part, in the order of asking.

    Where no part ends for `Limits.seconds`, all reads fail, but those of which parts are under way only once the
    library says that these have ended; until one has, further reads fail at once.

    After an error of the wire that is not the contract's all reads fail. A read never ends if the wire cannot say
    whether a part of it may still be written.
    """

    def __init__(
        self, name: str, wire: Wire[TokenT], limits: Limits, clock: Clock, tell: Callable[[TransferNews], None]
    ) -> None:
        self._wire = wire
        self._limits = limits
        self._clock = clock
        self._tell = tell
        self._inbox: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._under_way: list[tuple[Job, TokenT]] = []
        self._unknown: list[TokenT | None] = []
        """Parts that may still be written, and of which the wire cannot say more; None for one that may have begun."""
        self._broken = ""
        """Why no more reads are begun."""
        self._bell = threading.Event()
        self._opened = self._stuck = self._forgotten = self._ending = False
        self._heard = clock()
        self.thread = threading.Thread(target=self._run, name=f"kv-{name}", daemon=True)
        self.thread.start()

    def submit(self, job: Job) -> None:
        """Read, after what was asked for before."""
        self._inbox.append(job)
        self._bell.set()

    def nudge(self) -> None:
        """Have it look for reads that have been stopped."""
        self._bell.set()

    def forget(self) -> None:
        """Let it end once nothing is under way. Its reads have been stopped."""
        self._forgotten = True
        self._bell.set()

    def end(self) -> None:
        """Let it end now, since the engine closes."""
        self._ending = True
        self._bell.set()

    # ---- its own thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._try_to_open()
        while not self._over():
            self._bell.clear()
            self._take()
            begun = self._begin()
            if not self._look() and not begun:
                self._give_up()
                self._rest()
        self._wire.close([*(token for _, token in self._under_way), *(one for one in self._unknown if one is not None)])
        self._under_way.clear()

    def _over(self) -> bool:
        """Return whether the thread ends: the engine closes, or the peer is forgotten and all reads have ended."""
        left = self._inbox or self._waiting or self._under_way or self._unknown
        return self._ending or (self._forgotten and not left)

    def _try_to_open(self) -> None:
        """Open before the first read asks for it, which tells why where that fails."""
        try:
            self._open()
        except TransferError as error:
            logger.debug("a peer cannot be reached yet: %s", error)

    def _open(self) -> None:
        if self._opened:
            return
        try:
            self._wire.open()
        except TransferError:
            raise
        except Exception as error:
            logger.exception("a peer cannot be opened")
            raise TransferError(f"the peer cannot be opened: {error!r}") from error
        self._opened = True

    def _take(self) -> None:
        """Take new reads over, and end those of which nothing is to begin any more."""
        while self._inbox:
            job = self._inbox.popleft()
            if self._stuck:
                job.fail(f"the peer has not answered for {self._limits.seconds:g} s")
            if self._broken:
                job.fail(self._broken)
            self._waiting.append(job)
        for job in [job for job in self._waiting if job.over]:
            self._waiting.remove(job)
            job.incomplete = True
            self._settle(job)

    def _begin(self) -> bool:
        """Begin as many parts as may be under way. Return whether there were any."""
        try:
            return self._begin_parts()
        except Exception as error:
            self._break(error)
            return False

    def _begin_parts(self) -> bool:
        begun = False
        while self._waiting and len(self._under_way) < self._limits.parts and self._wire.ready() and not self._ending:
            job = self._waiting[0]
            if job.parts is None:
                job.parts = self._wire.parts(job.whole, self._limits)
            part = None if job.over else next(job.parts, None)
            if part is None:
                self._waiting.popleft()
                job.incomplete |= job.over
                self._settle(job)
            else:
                begun |= self._begin_part(job, part)
        return begun

    def _begin_part(self, job: Job, part: Part) -> bool:
        try:
            self._open()
        except TransferError as error:
            # Trying again may take long, so it is left to reads that are asked for later.
            for one in self._waiting:
                one.fail(str(error))
            return False
        try:
            token = self._wire.begin(part)
        except TransferError as error:
            self._fail(job, error)
            return False
        except Exception:
            job.under_way += 1  # it may have begun, so its read never ends
            self._unknown.append(None)
            raise
        if not self._under_way:
            self._heard = self._clock()
        self._under_way.append((job, token))
        job.under_way += 1
        return True

    def _look(self) -> bool:
        """Ask for the parts under way. Return whether one has ended."""
        left, ended, answered = [], False, False
        for job, token in self._under_way:
            try:
                if not self._wire.ended(token):
                    left.append((job, token))
                    continue
                answered = True
            except TransferError as error:
                self._fail(job, error)
                answered |= not isinstance(error, Unanswered)
            except Exception as error:
                self._unknown.append(token)  # it may still be written, so its read never ends
                self._break(error)
                continue
            ended = True
            job.under_way -= 1
        before, self._under_way = self._under_way, left
        if ended:
            if answered or not left:
                self._heard, self._stuck = self._clock(), False
            for job in {id(job): job for job, _ in before}.values():
                self._settle(job)
        return ended

    def _fail(self, job: Job, error: TransferError) -> None:
        job.fail(str(error))
        self._opened = False

    def _break(self, error: Exception) -> None:
        """End all reads that can end: it is not known what else the wire would do to the KV."""
        if not self._broken:
            logger.error("reading from a peer goes wrong, and is given up", exc_info=error)
            self._broken = f"reading from the peer has gone wrong: {error!r}"
        for job in (*(job for job, _ in self._under_way), *self._waiting):
            job.fail(self._broken)

    def _settle(self, job: Job) -> None:
        """Tell of a read that has ended: nothing of it is under way, and nothing waits."""
        if not job.under_way and job not in self._waiting:
            self._tell(job.news())

    def _give_up(self) -> None:
        if self._under_way and not self._stuck and self._clock() - self._heard > self._limits.seconds:
            self._stuck = True
            for job in (*(job for job, _ in self._under_way), *self._waiting):
                job.fail(f"nothing has come for {self._limits.seconds:g} s")
            self._take()

    def _rest(self) -> None:
        if self._over():
            return  # a read that was stopped has ended just now
        if not self._under_way and not self._waiting:
            self._bell.wait()
        else:
            self._bell.wait(OFTEN if self._clock() - self._heard < BUSY else SELDOM)
