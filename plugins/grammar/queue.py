"""GrammarQueue: which grammar is compiled next, so that slow ones do not hold up the others."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.sampling import Grammar
    from pegboard.plugins.grammar.api import CompiledGrammar

LATE_SECONDS = 5.0
"""After so long a wait a late job may go before new ones."""


@dataclass(slots=True, eq=False)
class GrammarJob:
    """A grammar to be compiled, and the key of the client that sent it. `late` once it has used up its first slice,
    `late_since` when; `since` when it was first queued, `taken` when a worker had it last. The future can be cancelled
    until it has a result.
    """

    grammar: Grammar
    owner: str = ""
    future: Future[CompiledGrammar] = field(default_factory=Future)
    late: bool = False
    since: float = field(default_factory=time.monotonic)
    late_since: float = 0.0
    taken: float = 0.0


class _Lane:
    """Jobs by owner; each owner in turn gives one."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[GrammarJob]] = OrderedDict()

    def __len__(self) -> int:
        self._forget_cancelled()
        return sum(map(len, self._jobs.values()))

    def put(self, job: GrammarJob) -> None:
        self._jobs.setdefault(job.owner, deque()).append(job)

    def take(self) -> GrammarJob | None:
        self._forget_cancelled()
        if not self._jobs:
            return None
        owner, jobs = self._jobs.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._jobs[owner] = jobs
        return job

    def all(self) -> list[GrammarJob]:
        self._forget_cancelled()
        return [job for jobs in self._jobs.values() for job in jobs]

    def remove(self, job: GrammarJob) -> None:
        self._jobs[job.owner].remove(job)
        self._forget_cancelled()

    def _forget_cancelled(self) -> None:
        for owner, jobs in list(self._jobs.items()):
            kept = deque(job for job in jobs if not job.future.cancelled())
            if kept:
                self._jobs[owner] = kept
            else:
                del self._jobs[owner]


class GrammarQueue:
    """Two lanes. New grammars go first, the owners in turn. One that has not been compiled within a short slice gives
    way when a new one waits, and starts again in the late lane, for as long as it may take; late ones never have all
    the workers, unless there is only one. One that has waited for `LATE_SECONDS` goes before new ones, which then have
    the workers for as long as it took. Thread-safe.

    A job that has waited for `timeout` seconds is given out before all others: all that is left is to say so.
    """

    def __init__(self, workers: int, timeout: float = float("inf"), clock: Clock = time.monotonic) -> None:
        self._workers = workers
        self._timeout = timeout
        self._clock = clock
        self._late_again = float("-inf")
        """Until then new ones go first."""
        self._most_late = max(1, workers - 1)
        self._changed = threading.Condition()
        self._new, self._late = _Lane(), _Lane()
        self._running = self._running_late = 0
        self._leaving = 0
        """Jobs that have been told to give way and are not back yet; they count as running."""
        self._closed = False

    def put(self, job: GrammarJob) -> int:
        """Queue a new job. How many threads the new jobs and those under way can make use of."""
        with self._changed:
            self._new.put(job)
            self._changed.notify_all()
            return len(self._new) + self._running

    def take(self) -> GrammarJob | None:
        """Return the next job, as soon as there is one; None once the queue is closed."""
        with self._changed:
            while not self._closed:
                job = self._next()
                if job is not None:
                    job.taken = self._clock()
                    self._running += 1
                    self._running_late += job.late
                    return job
                self._changed.wait()
            return None

    def gives_way(self, job: GrammarJob) -> bool:
        """Return whether a job whose first slice is over has to leave its worker to a new one. If so, `put_back`
        follows.
        """
        with self._changed:
            if job.late or len(self._new) <= self._workers - self._running + self._leaving:
                return False
            self._leaving += 1
            return True

    def put_back(self, job: GrammarJob) -> None:
        """Queue a job again that has given way."""
        with self._changed:
            self._leaving -= 1
            self._running -= 1
            job.late, job.late_since = True, self._clock()
            self._late.put(job)
            self._changed.notify_all()

    def done(self, job: GrammarJob) -> None:
        """End a job that was taken from here; not one that was put back."""
        with self._changed:
            self._running -= 1
            self._running_late -= job.late
            if job.late:
                now = self._clock()
                self._late_again = now + (now - job.taken)
            self._changed.notify_all()

    def push_out(self, owner: str) -> GrammarJob | None:
        """Make room for a job of `owner`: take the newest one out that waits, of the owner with most. None where that
        is this very one, or would have fewer than this one then.
        """
        with self._changed:
            waiting = [*self._late.all(), *self._new.all()]
            owners = Counter(job.owner for job in waiting)
            if not owners:
                return None
            most, number = owners.most_common(1)[0]
            if number <= owners[owner] + 1:
                return None
            job = [job for job in waiting if job.owner == most][-1]
            (self._late if job.late else self._new).remove(job)
            return job

    def close(self) -> list[GrammarJob]:
        """Give out nothing more; the jobs that were left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            left = []
            for lane in (self._new, self._late):
                while (job := lane.take()) is not None:
                    left.append(job)
            return left

    def _next(self) -> GrammarJob | None:
        now = self._clock()
        late = self._late.all()
        for lane, jobs in ((self._new, self._new.all()), (self._late, late)):
            overdue = [job for job in jobs if now - job.since > self._timeout]
            if overdue:
                lane.remove(overdue[0])
                return overdue[0]
        late_may = bool(late) and self._running_late < self._most_late
        if late_may and now >= self._late_again and now - min(job.late_since for job in late) >= LATE_SECONDS:
            return self._late.take()
        return self._new.take() or (self._late.take() if late_may else None)
