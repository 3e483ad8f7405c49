"""In the scheduler: requests wait for pages, steps say where their tokens go, prefixes end where windows are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.stage import Interest, Stage, Wait
from pegboard.plugins.windows.messages import NAME, Ask, GroupWork, Memory, WindowWork
from pegboard.toolkit.system.taking_part import takes_part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.admission_gate import AdmissionGateContext
    from pegboard.core.interfaces.batch import BatchExtras
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import StepResult, StepView
    from pegboard.core.interfaces.step import AnySource, CoreServices
    from pegboard.plugins.windows.pages import WindowPages


class Windows(Stage):
    """Takes part in all requests of a model that has groups for windows."""

    name = NAME

    def __init__(self, make: Callable[[Memory], WindowPages]) -> None:
        self._make = make
        self.pages: WindowPages
        """Made with as many pages as the pool has."""
        self._planned: dict[str, list[int]] = {}
        """By request, the pages of each group that it gets if this plan takes it in."""
        self._promised: list[int] = []
        """Their sums, by group."""
        self._changes: dict[int, list[NDArray[np.int64]]] = {}
        """By step, the places of the row tables that are new, as long as it is not known that they have arrived."""

    def sources(self, core: CoreServices) -> Iterable[AnySource]:
        memory = core.ask(self.name, Ask())
        assert isinstance(memory, Memory)
        self.pages = self._make(memory)
        self.begin_plan()
        return ()

    def gate(self, ctx: AdmissionGateContext) -> None:
        for stage in ctx.stages.values():
            if isinstance(stage, Stage) and (why := _objection(stage)):
                remedy = "set it to false, or switch the stage off"
                raise ConfigError(Problem("memory.window_pages", f"the stage {stage.name!r} {why}; {remedy}"))
        if ctx.kv is not None:
            raise ConfigError(Problem("gates", "with memory.window_pages no KV comes from elsewhere (disaggregation)"))
        if ctx.cache is not None and ctx.cache.loader:
            text = "keeps KV beyond the device, which memory.window_pages excludes; choose another one"
            raise ConfigError(Problem("prefix_cache.use", text))

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest(look=False)

    def unplaced(self, req: Req) -> None:
        self.pages.release(req)

    # ---- a plan ----------------------------------------------------------------------------------------------------
    def begin_plan(self) -> None:
        self._planned.clear()
        self._promised = [0] * len(self.pages.groups)

    def resumable(self, req: Req, length: int) -> int:
        return self.pages.found(req, length)

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        before = self._planned.pop(req.rid, None)
        if before is not None:
            self._promised = [one - own for one, own in zip(self._promised, before, strict=True)]
        take, pages = self.pages.room(req, start, take, self._promised)
        if take <= 0:
            return Wait.SHORT
        self._planned[req.rid] = pages
        self._promised = [one + own for one, own in zip(self._promised, pages, strict=True)]
        return take

    # ---- a step ----------------------------------------------------------------------------------------------------
    def pack(self, step: StepView, extras: BatchExtras) -> WindowWork:
        batch, rows = step.batch, step.work.rows
        new = self.pages.extend(batch.reqs, rows, batch.prefix_lens, batch.seq_lens)
        if (before := self._changes.get(step.number)) is not None:  # it runs again
            new = [np.concatenate(parts) for parts in zip(before, new, strict=True)]
        self._changes[step.number] = new
        ends = np.cumsum(batch.extend_lens)
        first = np.repeat(rows * self.width + batch.prefix_lens - ends + batch.extend_lens, batch.extend_lens)
        places = first + np.arange(first.shape[0])
        changed = [np.unique(np.concatenate(found)) for found in zip(*self._changes.values(), strict=True)]
        tables = [group.table.reshape(-1) for group in self.pages.groups]
        return WindowWork(
            tuple(
                GroupWork(table[places].astype(np.int64), own, table[own])
                for table, own in zip(tables, changed, strict=True)
            )
        )

    @property
    def width(self) -> int:
        """Positions of a row."""
        return self.pages.groups[0].table.shape[1]

    def commit(self, step: StepView, result: StepResult) -> None:
        for number in [number for number in self._changes if number <= step.number]:
            del self._changes[number]
        batch, rows = step.batch, step.work.rows
        here = np.array([req.kv is kv for req, kv in zip(batch.reqs, step.kvs, strict=True)], np.bool_)
        if here.all():
            self.pages.computed(batch.reqs, rows, batch.prefix_lens, batch.seq_lens)
        else:
            reqs = [req for req, there in zip(batch.reqs, here, strict=True) if there]
            self.pages.computed(reqs, rows[here], batch.prefix_lens[here], batch.seq_lens[here])

    # ---- what is told ----------------------------------------------------------------------------------------------
    def figures(self) -> Mapping[str, float]:
        groups = self.pages.groups
        return {
            "window_pages": sum(group.count for group in groups),
            "window_pages_of_requests": sum(group.held for group in groups),
            "free_window_pages": sum(len(group.free) for group in groups),
            "window_tails": len(self.pages.tails),
            "resumed_windows_total": self.pages.resumed,
        }

    def idle_error(self) -> str | None:
        return self.pages.idle_error()


def _objection(stage: Stage) -> str | None:
    """Return why another stage does not work with pages by windows; None: it does."""
    if stage.lookback:
        return "computes the last token of a cached prefix again, for which the pages of its window may be gone"
    if takes_part(Stage, stage, "ahead"):
        return "brings tokens ahead, and a window's pages may be gone when they are rejected"
    return None
