"""Services: what the core offers stages, and the sources of steps that they bring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.batch import SplitPart
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.pipeline.logprobs import keep_first
from pegboard.core.pipeline.step import Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.step import BaseStep, BatchStep, TokenValues
    from pegboard.core.pipeline.components import Components
    from pegboard.core.pipeline.guards import GuardedHooks
    from pegboard.core.pipeline.lifecycle import Lifecycle
    from pegboard.core.pipeline.planner import Planner
    from pegboard.core.pipeline.recovery import Recovery


class Services:
    """The CoreServices of one scheduler. `commit` gives a step's tokens to its requests."""

    def __init__(
        self,
        components: Components,
        planner: Planner,
        requests: Lifecycle,
        recovery: Recovery,
        commit: Callable[[Step, BatchResult], None],
        batch_scheduled: GuardedHooks,
    ) -> None:
        self._planner = planner
        self._memory = components.memory
        self._executor = components.executor
        self._points = components.points
        self._gates = components.gates
        self._requests = requests
        self._recovery = recovery
        self._commit = commit
        self._batch_scheduled = batch_scheduled

    @property
    def decoding(self) -> bool:
        return bool(self._planner.running)

    def next_number(self) -> int:
        return next(self._planner.builder.numbers)

    @property
    def in_flight(self) -> BaseStep | None:
        return None if self._requests.loop is None else self._requests.loop.in_flight

    def slots(self, req: Req) -> NDArray[np.int64]:
        return self._memory.rows.host[req.kv.row, : req.kv.committed_len].astype(np.int64)

    def ask(self, stage: str, payload: object) -> object:
        return self._executor.ask(stage, payload)

    def note(self, number: int, what: str, error: Exception) -> None:
        self._recovery.note(number, what, error)

    def told(self, what: str, error: Exception) -> str:
        return self._recovery.told(what, error)

    def end(self, reqs: Iterable[Req], message: str, code: str = "", status: int = 500) -> None:
        self._recovery.end(reqs, message, code, status)

    def retract(self, req: Req) -> bool:
        planner = self._planner
        runs = req in planner.running or req is planner.chunked or req in planner.holding
        if not runs or self.in_flight is not None or planner.holds(req):
            return False
        planner.retract(req)
        return True

    def check_device(self, error: Exception) -> None:
        self._recovery.check_device(error)

    def split(self, whole: BatchStep, layers: int, *, first: bool, last: bool) -> BatchStep:
        step = _ours(whole)
        # What the row table owes the worker goes with the first part; later ones carry what came since.
        table = step.work.table if first else self._memory.rows.take_changes()
        work = replace(step.work, part=SplitPart(layers, first, last), table=table)
        if last:
            return replace(step, work=work)
        return replace(step, number=self.next_number(), work=work, sampled=[], final=False, whole=step)

    def join(self, whole: BatchStep) -> None:
        self._planner.running.join((req for req in _ours(whole).sampled if not req.finished), whole.number)

    def commit(self, step: BatchStep, result: BatchResult) -> None:
        self._commit(_ours(step), result)

    def halve(self, step: BatchStep, error: Exception) -> None:
        self._recovery.halve(_ours(step), error)

    def rewind(self, step: BatchStep) -> None:
        self._planner.rewind(_ours(step))

    def closed(self, step: BatchStep) -> None:
        self._planner.closed(_ours(step))

    def rename(self, req: Req, stage: str, namespace: str) -> None:
        if self._gates is not None:
            self._gates.rename(req, stage, namespace)

    def reserve(self, req: Req) -> bool:
        planner = self._planner
        if any(waiting.status is ReqStatus.RETRACTED for waiting in planner.waiting):
            return False  # what was taken from a running request is its own by right
        adder = planner.adder(mixed=False)
        if planner.chunked is not None:
            adder.count_chunked(planner.chunked)
        if not adder.reserve(req):
            return False
        planner.reserved.add(req)
        return True

    def reserved_slots(self, req: Req) -> NDArray[np.int32]:
        return self._memory.rows.host[req.kv.row, : req.input_len].copy()

    def give_back(self, req: Req, computed: int = 0) -> None:
        self._planner.reserved.discard(req)
        req.kv.committed_len = req.kv.scheduled_len = max(computed, req.kv.cache_len)
        self._memory.release(req)

    def begin_computed(self, req: Req, length: int, token: int, values: TokenValues) -> None:
        planner = self._planner
        planner.reserved.discard(req)
        req.output.cached_tokens = values.cached_tokens
        keep_first(req, values)
        self._points.adopt(req, values.rows)
        req.kv.committed_len = req.kv.scheduled_len = length
        req.move_to(ReqStatus.RUNNING)
        req.timing.ready = req.timing.first_scheduled = planned_at = planner.clock()
        step = planner.builder.prebuilt(req, planner.running)
        step.batch.planned_at = planned_at
        if self._batch_scheduled:
            self._batch_scheduled(step.batch)
        self._commit(step, BatchResult(np.array([token], np.int64)))

    def first_rows(self, req: Req) -> Mapping[str, bytes]:
        return self._points.first_rows(req)


def _ours(step: BatchStep) -> Step:
    assert isinstance(step, Step), "batches are made by the core"
    return step
