"""Guards: plugin code that raises harms itself alone. What can go on without it, goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.req import Req

if TYPE_CHECKING:
    from pegboard.core.interfaces.schedule_policy import SchedulePolicy

logger = logging.getLogger(__name__)

MAX_FAILURES = 10
"""A hook that has raised this often in a row is not called any more."""


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
            named = [req for req in _requests(self._policy.victims(list(running))) if req in running]
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
