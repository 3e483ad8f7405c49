"""Guards: plugin code that raises harms itself alone. What can go on without it, goes on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.prefix_cache import PrefixMatch
from pegboard.core.interfaces.req import Req

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.keys import PrefixKey
    from pegboard.core.interfaces.prefix_cache import CacheHandle, PrefixCache
    from pegboard.core.interfaces.schedule_policy import SchedulePolicy

logger = logging.getLogger(__name__)

MAX_FAILURES = 10
"""A hook that has raised this often in a row is not called any more."""

MAX_LOAD_FAILURES = 10
"""After so many loads of promised prefixes that failed, no more are tried."""


class GuardedHooks:
    """The implementations of one step hook. One that raises is logged and called again the next time, up to a limit."""

    def __init__(self, name: str, hooks: Sequence[Callable[..., object]] = ()) -> None:
        self.name = name
        self.failures = 0
        """Calls that raised, since the start."""
        self._hooks = tuple(hooks)
        self._in_a_row = [0] * len(self._hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def __call__(self, *arguments: object) -> None:
        for index, hook in enumerate(self._hooks):
            try:
                hook(*arguments)
            except Exception:
                self._failed(index, hook)
            else:
                if self._in_a_row[index]:
                    self._in_a_row[index] = 0

    def _failed(self, index: int, hook: Callable[..., object]) -> None:
        self.failures += 1
        self._in_a_row[index] += 1
        name = getattr(hook, "__qualname__", repr(hook))
        if self._in_a_row[index] == 1:
            logger.exception("the hook %s (%s) raised; the step goes on without it", self.name, name)
        if self._in_a_row[index] == MAX_FAILURES:
            logger.error("the hook %s (%s) raised %d times in a row: it is off now", self.name, name, MAX_FAILURES)
            self._hooks = (*self._hooks[:index], _nothing, *self._hooks[index + 1 :])


def _requests(answer: Iterable[Req]) -> list[Req]:
    """Return the answer as a list. Raises TypeError for what is none, or holds something that is not a request."""
    found = list(answer)
    if not set(map(type, found)) <= {Req}:
        raise TypeError("the answer holds what is not a request")
    return found


def _nothing(*arguments: object) -> None:
    """In the place of a hook that is off."""


class GuardedPolicy:
    """A schedule policy whose mistakes cost order and nothing else: what raises is answered as the queue stands."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self._policy = policy
        self.failures = 0
        """Calls that raised, since the start."""

    @property
    def preempts(self) -> bool:
        """Whether `preempt` may answer anything at all."""
        try:
            return bool(self._policy.preempts)
        except Exception:
            self._failed("preempts", "no request gives way")
            return False

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> Sequence[Req]:
        try:
            found = _requests(self._policy.order(list(waiting), list(running)))
        except Exception:
            self._failed("order", "first come, first served")
            return list(waiting)
        if len(found) < len(waiting):
            # What it forgot comes last, and does not wait for ever.
            found = list(dict.fromkeys([*found, *waiting]))
        return found

    def victims(self, running: Sequence[Req]) -> Sequence[Req]:
        """Name one at least: the last one that joined, where the policy names none."""
        try:
            here = set(running)
            named = [req for req in _requests(self._policy.victims(list(running))) if req in here]
        except Exception:
            self._failed("victims", "last come, first to go")
            named = []
        return named or list(reversed(running))

    def preempt(self, req: Req, running: Sequence[Req]) -> Sequence[Req]:
        try:
            return list(dict.fromkeys(_requests(self._policy.preempt(req, list(running)))))
        except Exception:
            self._failed("preempt", "no request gives way")
            return ()

    def _failed(self, what: str, instead: str) -> None:
        self.failures += 1
        if self.failures == 1 or self.failures % 1000 == 0:
            name = type(self._policy).__name__
            logger.exception("%s.%s raised (%d times so far); instead: %s", name, what, self.failures, instead)


_NOTHING = PrefixMatch(np.empty(0, np.int64), None)


class GuardedCache:
    """A prefix cache whose mistakes cost time: what raises is answered as if it had nothing. `insert`, `extend` and
    `evict`, in which pages change hands, are called by the memory manager, which knows the books.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.name = type(cache).__name__
        self._cache = cache
        self.resumable: Callable[[Req, int], int] | None = None
        """Says behind how many tokens of a cached prefix stages can go on; where some stage has a say."""
        self._failed: Counter[str] = Counter()

    @property
    def failures(self) -> int:
        """Calls that raised, since the start, and loads that did not bring what they should."""
        return self._failed.total()

    def match(self, req: Req) -> PrefixMatch:
        """Find and lock what is cached of a request, as far as stages can go on behind it."""
        found = self._match(req, req.matchable_key())
        if (ask := self.resumable) is None or not (length := len(found) + found.promised):
            return found
        if (usable := ask(req, length)) >= length:
            return found
        self.unlock(found.handle, req)
        found = self._match(req, req.key(usable)) if usable else _NOTHING
        if len(found) + found.promised == usable:
            return found
        if found.handle is not None:
            self.unlock(found.handle, req)
        return _NOTHING

    def _match(self, req: Req, key: PrefixKey) -> PrefixMatch:
        try:
            found = self._cache.match(key)
            self._cache.lock(found.handle)
        except Exception:
            self.failed("match", f" {req}; all of it is computed")
            found = _NOTHING
        if found.promised and self._failed["load"] >= MAX_LOAD_FAILURES:
            return PrefixMatch(found.slots, found.handle)
        return found

    def unlock(self, handle: CacheHandle, req: Req) -> None:
        try:
            self._cache.unlock(handle)
        except Exception:
            self.failed("unlock", f" the prefix of {req}; it stays cached")

    def load(self, req: Req, slots: NDArray[np.int64]) -> bool:
        """Have what is promised of a request's prefix loaded into these slots; False where that cannot be."""
        try:
            req.kv.load = self._cache.load(req.kv.handle, slots)
        except Exception:
            self.failed("load", f" what the host has of {req}; after {MAX_LOAD_FAILURES} times it is not asked")
            return False
        return True

    def loaded(self, load: object, ok: bool) -> None:
        try:
            self._cache.loaded(load, ok)
        except Exception:
            self.failed("loaded")

    def load_failed(self) -> None:
        """Count a load that did not bring what it should."""
        self._failed["load"] += 1

    def poll(self) -> None:
        """Let the cache take the results of its moves."""
        if self._cache.busy:
            try:
                self._cache.poll()
            except Exception:
                self.failed("poll")

    def stats(self) -> dict[str, float]:
        try:
            return dict(self._cache.stats())
        except Exception:
            self.failed("stats")
            return {}

    def failed(self, call: str, what: str = "") -> None:
        """Note an exception that is being handled; of each call the log has one in a thousand."""
        self._failed[call] += 1
        times = self._failed[call]
        if times == 1 or times % 1000 == 0:
            text = f"{call}{what} ({times} times so far)"
            logger.exception("the prefix cache %r failed to %s", self.name, text)
