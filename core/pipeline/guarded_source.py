"""GuardedSource: a source of steps that a stage brings, set aside once it raises."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.step import BaseStep, BatchStep, Settle, StepSource
from pegboard.core.pipeline.memory import MemoryCorrupted
from pegboard.core.pipeline.recovery import DeviceFailed
from pegboard.toolkit.system.blame import DELIBERATE, in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pegboard.core.interfaces.batch import PrefillItem
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import Stage
    from pegboard.core.interfaces.step import AnySource, CoreServices
    from pegboard.core.pipeline.points import Points

logger = logging.getLogger(__name__)

T = TypeVar("T")

FATAL = (DeviceFailed, MemoryCorrupted)
"""What the core raises to end the engine, through a source's call of it, too."""


class GuardedSource(StepSource[BaseStep, object]):
    """Passes calls on to a source, until one raises.

    A source that raises while it plans, or about work of its stage's own, is set aside. It plans no more; the requests
    of that step and those that the stage takes part in end, and the stage takes no others. What a source raises about a
    batch ends the engine, since only the source knows which of the batch's tokens count; the log says whose it is.
    """

    def __init__(self, source: AnySource, stage: Stage, points: Points) -> None:
        self.inner = source
        self.turn, self.first = source.turn, source.first
        self._stage = stage
        self._points = points
        self._aside = False
        self._began = False
        """Whether it has ever taken a prefill over."""
        self._raised: Exception | None = None
        """What `takes` has raised, until the next plan."""

    def next(self, in_flight: BaseStep | None) -> BaseStep | Settle | None:
        if self._raised is not None:
            error, self._raised = self._raised, None
            self._set_aside("takes", error, ())
        step = self._plan("next", lambda: self._step(in_flight), None)
        if isinstance(step, BaseStep):
            step.source = self
        return step

    def _step(self, in_flight: BaseStep | None) -> BaseStep | Settle | None:
        step: object = self.inner.next(in_flight)
        if step is None or isinstance(step, BaseStep | Settle):
            return step
        raise TypeError(f"next() answers {step!r}, which is not a step")

    @property
    def under_way(self) -> BaseStep | None:
        step: BaseStep | None = self._plan("under_way", lambda: self.inner.under_way, None)
        if step is not None:
            step.source = self
        return step

    def holds(self, req: Req) -> bool:
        return self._plan("holds", lambda: self.inner.holds(req), False)

    def takes(self, items: Sequence[PrefillItem]) -> bool:
        try:
            return not self._aside and self.inner.takes(items)
        except FATAL:
            raise
        except Exception as error:
            # The requests of this prefill are in no queue now, so none may end before the next plan.
            self._aside, self._raised = True, error
            return False

    def begin(self, step: BaseStep) -> BaseStep:
        self._began = True
        first = self._call("begin", lambda: self.inner.begin(step), step, step)
        first.source = self
        return first

    def process_result(self, step: BaseStep, result: object) -> None:
        self._call("process_result", lambda: self.inner.process_result(step, result), None, step)

    def failed(self, step: BaseStep, error: Exception) -> None:
        self._call("failed", lambda: self.inner.failed(step, error), None, step)

    def undo(self, step: BaseStep) -> None:
        self._call("undo", lambda: self.inner.undo(step), None, step)

    def behind_failed(self, step: BaseStep, failed: BaseStep, own_error: Exception | None) -> None:
        self._call("behind_failed", lambda: self.inner.behind_failed(step, failed, own_error), None, step)

    def _plan(self, what: str, call: Callable[[], T], nothing: T) -> T:
        return nothing if self._aside else self._call(what, call, nothing)

    def _call(self, what: str, call: Callable[[], T], nothing: T, step: BaseStep | None = None) -> T:
        try:
            return call()
        except FATAL:
            raise
        except Exception as error:
            if isinstance(step, BatchStep) or self._has_batch():
                logger.critical("%s: %s of a source raised about a batch; the engine cannot go on", self.owner, what)
                raise
            self._set_aside(what, error, () if step is None else step.reqs)
            return nothing

    def _set_aside(self, what: str, error: Exception, reqs: Sequence[Req]) -> None:
        self._aside = True
        points, flag = self._points, self._stage.flag
        points.broken[flag] = reason = points.failure(self._stage, f"sources().{what}", error)
        logger.error("%s: this source is not asked any more", self.owner)
        served = [req for req in points.alive.values() if req.flags & flag]
        for req in (*reqs, *served):
            if not req.finished:
                points.end(req, reason)

    @property
    def owner(self) -> str:
        """Return whose source it is."""
        return whose(self._stage, self._points)

    def _has_batch(self) -> bool:
        """Return whether a batch is under way that takes several launches; True where the source cannot say."""
        try:
            return self._began and self.inner.under_way is not None
        except Exception:
            return True


def whose(stage: Stage, points: Points) -> str:
    """Return what people are told of a stage: its name, and its plugin's where that is known."""
    return str(points.culprits.known(stage) or f"the stage {stage.name!r}")


def brought_sources(points: Points, core: CoreServices) -> list[AnySource]:
    """Return the sources of steps that stages bring, each behind a guard. Raises PluginError for what is none, and
    where a stage raises.
    """
    found: list[AnySource] = []
    for stage in points.bringing:
        try:
            brought: Iterable[object] = list(stage.sources(core))
        except DELIBERATE:
            raise
        except Exception as error:
            raise PluginError(f"{whose(stage, points)}: sources() raised {in_words(error)}") from error
        for source in brought:
            if not isinstance(source, StepSource):
                raise PluginError(f"{whose(stage, points)}: sources() brings {source!r}, which is not a StepSource")
            found.append(GuardedSource(source, stage, points))
    return found
