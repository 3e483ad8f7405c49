"""Points: where stages take part in requests and steps. See `plan_points` for those of a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pegboard.core.interfaces.batch import BatchExtras
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.req import SINGLE, WHOLE_PREFIX
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.flags import CONSTRAINED, HISTORY, SHIFTED, SPECIAL
from pegboard.core.pipeline.plan_points import PlanPoints
from pegboard.core.pipeline.reports import Reports
from pegboard.toolkit.system.blame import in_words
from pegboard.toolkit.system.culprits import Culprits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import Column, Stage
    from pegboard.core.interfaces.stops import CompiledStops, Ending
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.core.pipeline.step import Step

logger = logging.getLogger(__name__)

Features = dict[str, msgspec.Raw]
Rows = dict[str, list[msgspec.Raw]]


class Points(PlanPoints):
    """The stages of one scheduler. `end` finishes a request for a reason; `connect` sets it."""

    def __init__(self, stages: Sequence[Stage] = (), culprits: Culprits | None = None) -> None:
        super().__init__(stages, culprits)
        self.end: Callable[[Req, FinishReason], None] = _nobody_ends
        self.columns: tuple[tuple[Stage, Column], ...] = tuple((one, col) for one in stages for col in one.columns)
        self.bringing = self._at("sources")
        self._arriving = self._at("arrive")
        self._reusing = self._at("reusable")
        self._resuming = self._at("resumable")
        self._finishing = self._at("finishers")
        self._stopping = self._at("compile_stops")
        self._unplacing = self._at("unplaced")
        self._going = self._at("gone")
        self._packing = self._at("pack")
        self._arrived = self._at("arrived")
        self._committing = self._at("commit")
        self._closing = self._at("closed")
        self._sending = self._at("send")
        self._adopting = self._at("adopt")
        self.reports = Reports(stages, self._log)
        self._ending = _flags(self._finishing) | _flags(self._stopping)
        self._looking = self._ending | _flags(self._sending)
        self._unsent: list[tuple[Req, FinishReason]] = []
        self.alive: Mapping[str, Req] = {}
        """All requests, once there is a scheduler."""
        self.broken: dict[int, FinishReason] = {}
        """Why stages, by their flags, serve no request any more."""

    @property
    def offers(self) -> tuple[str, ...]:
        """What requests may ask of an engine with these stages."""
        return tuple(offer for stage in self.stages for offer in stage.offers)

    def connect(
        self, end: Callable[[Req, FinishReason], None], memory: MemoryManager, alive: Mapping[str, Req]
    ) -> None:
        """Take what ends requests, and all that are alive; listen where their memory is taken."""
        self.end, self.alive = end, alive
        if self._unplacing or self._reusing:
            memory.unplaced = self.unplaced
        if self._resuming:
            memory.guarded.resumable = self.resumable

    # ---- a request -------------------------------------------------------------------------------------------------

    def arrive(self, req: Req, message: TokenizedRequest) -> None:
        """Ask the stages whether they take part in a request. Raises what one of them raises; those before it have been
        told that the request is gone then. Raises InvalidRequest for what is meant for a stage that is not here.
        """
        try:
            for stage in self._arriving:
                interest = stage.arrive(req, message)
                if interest is not None:
                    if (broken := self.broken.get(stage.flag)) is not None:
                        raise InvalidRequest(broken.message, code=broken.code, status=broken.status)
                    req.flags |= stage.flag | HISTORY * interest.history | SINGLE * interest.single
                    req.flags |= SPECIAL * bool((self._looking if interest.look else self._ending) & stage.flag)
                    req.flags |= (CONSTRAINED | SPECIAL | HISTORY) * interest.constrained
            if req.positions is not None:
                req.flags |= SHIFTED
            for name in message.features:
                if not any(stage.name == name for stage in self.stages):
                    raise InvalidRequest(f"this engine has no stage {name!r}", code="unsupported")
        except BaseException:
            self.gone(req)
            raise
        self.wait(req)

    def wait(self, req: Req) -> None:
        """Note how much of a cached prefix may be used for a request that has no memory."""
        least = WHOLE_PREFIX
        for stage in self._reusing:
            if req.flags & stage.flag:
                try:
                    least = min(least, max(0, stage.reusable(req)))
                except Exception as error:
                    self._log(stage, "reusable", error)
                    least = 0
        req.reusable = least

    def resumable(self, req: Req, length: int) -> int:
        """Return behind how many tokens of a cached prefix all stages can go on, each asked of what others say."""
        agreed = 0
        while length and agreed < len(self._resuming):
            for stage in self._resuming:
                found = length
                if length and req.flags & stage.flag:
                    try:
                        found = min(length, max(0, stage.resumable(req, length)))
                    except Exception as error:
                        self._log(stage, "resumable", error)
                        found = 0
                agreed, length = (agreed + 1, length) if found == length else (1, found)
        return length

    def finishers(self, req: Req) -> list[Ending]:
        """Return the stages' reasons to end a request."""
        found: list[Ending] = []
        for stage in self._finishing:
            if req.flags & stage.flag:
                try:
                    found += [_Guarded(self, stage, one) for one in stage.finishers(req)]
                except Exception as error:
                    found.append(_Broken(self.failure(stage, "finishers", error)))
        return found

    def stop_texts(self, req: Req, make: Callable[[Sequence[CompiledStops]], Ending]) -> list[Ending]:
        """Return what ends a request by its text, made of what its stages bring, if it has any: one ending."""
        found: list[CompiledStops] = []
        last: Stage | None = None
        for stage in self._stopping:
            if req.flags & stage.flag:
                try:
                    one = stage.compile_stops(req.sampling)
                    if one is not None:
                        found.append(one)
                        last = stage
                except Exception as error:
                    return [_Broken(self.failure(stage, "compile_stops", error))]
        if last is not None:
            return [_Guarded(self, last, make(found))]
        return [make(())] if req.sampling.stop else []

    def unplaced(self, req: Req) -> None:
        """Tell that the memory of a request is about to be taken."""
        self._notify(self._unplacing, "unplaced", req)
        if not req.finished:
            self.wait(req)

    def gone(self, req: Req) -> None:
        """Tell that a request is at its very end."""
        self._notify(self._going, "gone", req)

    def _notify(self, stages: tuple[Stage, ...], point: str, req: Req) -> None:
        for stage in stages:
            if req.flags & stage.flag:
                try:
                    getattr(stage, point)(req)
                except Exception as error:
                    self._log(stage, point, error)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def pack(self, step: Step) -> None:
        """Put into a step what stages bring along: into the whole of a split one, whose parts share it. Raises what one
        of them raises.
        """
        if not self.stages:
            return
        if step.whole is not None:
            step = step.whole  # a part of a split prefill, which shares extras, payloads and notes with it
        step.packed = True
        extras = BatchExtras(len(step.batch.reqs), step.work.input_ids.shape[0], step.work.extras)
        for place, (stage, column) in enumerate(self.columns):
            if step.flags_any & stage.flag:
                kept = step.columns[place] if step.columns else numbers_of(stage, column, step.batch.reqs)
                name = f"{stage.name}.{column.name}"
                if column.per == "request":
                    extras.per_request(name, kept)
                else:
                    extras.per_token(name, kept.repeat(step.batch.extend_lens))
        for stage in self._packing:
            if step.flags_any & stage.flag and (payload := stage.pack(step, extras)) is not None:
                step.work.payloads[stage.name] = payload

    def arrived(self, step: Step, result: BatchResult) -> None:
        """Hand over what a step computed, before its tokens are appended."""
        if self._arrived and step.flags_any and step.packed:
            before = sum(req.finished for req in step.batch.reqs)
            self._hand_over(self._arrived, "arrived", step, result)
            step.touched = step.touched or sum(req.finished for req in step.batch.reqs) > before

    def commit(self, step: Step, result: BatchResult) -> None:
        """Tell that the tokens of a step have been appended."""
        if self._committing and step.flags_any:
            self._hand_over(self._committing, "commit", step, result)
        if self._unsent:
            self.end_unsent()

    def end_unsent(self) -> None:
        """End the requests for which stages could not say what to send."""
        unsent, self._unsent = self._unsent, []
        for req, reason in unsent:
            if not req.finished:
                self.end(req, reason)

    def _hand_over(self, stages: tuple[Stage, ...], point: str, step: Step, result: BatchResult) -> None:
        for stage in stages:
            if not step.flags_any & stage.flag:
                continue
            try:
                getattr(stage, point)(step, result)
            except Exception as error:
                reason = self.failure(stage, point, error)
                for req, kv in zip(step.batch.reqs, step.kvs, strict=True):
                    if req.flags & stage.flag and not req.finished and req.kv is kv:
                        self.end(req, reason)

    def closed(self, step: Step) -> None:
        """Tell that a step is through or undone. Halves are not told by themselves, and a step is told once."""
        whole = step if step.whole is None else step.whole
        if not whole.packed or whole.closed:
            return
        whole.closed = True
        for stage in self._closing:
            if whole.flags_any & stage.flag:
                try:
                    stage.closed(whole)
                except Exception as error:
                    self._log(stage, "closed", error)

    def send(self, req: Req, start: int, stop: int) -> tuple[Features | None, Rows | None]:
        """Return what stages add to an output with tokens [start, stop) of a request."""
        if not self._sending:
            return None, None
        features: Features = {}
        rows: Rows = {}
        for stage in self._sending:
            if not req.flags & stage.flag:
                continue
            try:
                sent = stage.send(req, start, stop)
                if sent is None:
                    continue
                if sent.whole is not None:
                    features[stage.name] = encoded(sent.whole)
                if sent.rows:
                    rows[stage.name] = _one_each([encoded(row) for row in sent.rows], stop - start)
            except Exception as error:
                reason = self.failure(stage, "send", error)
                if req.finished:
                    req.output.finish_reason = reason
                self._unsent.append((req, reason))
        return features or None, rows or None

    def first_rows(self, req: Req) -> dict[str, bytes]:
        """Return what stages send with the first token of a request."""
        rows = self.send(req, 0, 1)[1] if req.output_len else None
        return {name: bytes(some[0]) for name, some in (rows or {}).items()}

    def adopt(self, req: Req, rows: Mapping[str, bytes]) -> None:
        """Give stages what they had sent elsewhere with the first token of a request."""
        for stage in self._adopting:
            if req.flags & stage.flag:
                row = rows.get(stage.name)
                try:
                    stage.adopt(req, None if row is None else msgspec.Raw(row))
                except Exception as error:
                    self._unsent.append((req, self.failure(stage, "adopt", error)))

    # ---- what raises -----------------------------------------------------------------------------------------------

    def failure(self, stage: Stage, point: str, error: Exception) -> FinishReason:
        """Return what a request ends with for which a stage raised."""
        culprit = self.culprits.of(error) or self.culprits.known(stage)
        self._log(stage, point, error)
        text = f"the stage {stage.name!r} failed: {in_words(error)}" if culprit is None else culprit.tell(error)
        return FinishReason(FinishType.ABORT, message=text, status=500, code="plugin_failed")


def encoded(value: object) -> msgspec.Raw:
    """Return a value as it travels; what has been encoded already stays as it is."""
    return value if isinstance(value, msgspec.Raw) else msgspec.Raw(msgspec.msgpack.encode(value))


def numbers_of(stage: Stage, column: Column, reqs: Sequence[Req]) -> NDArray[np.generic]:
    """Return a column's numbers [requests]. Raises what `of` raises."""
    return np.array([column.of(req) if req.flags & stage.flag else 0 for req in reqs], column.dtype)


@dataclass(frozen=True, slots=True)
class _Guarded:
    """A stage's reason to end; the request fails where it raises."""

    points: Points
    stage: Stage
    ending: Ending

    def after(self, req: Req, token: int) -> FinishReason | None:
        try:
            return self.ending.after(req, token)
        except Exception as error:
            return self.points.failure(self.stage, "finishers", error)


@dataclass(frozen=True, slots=True)
class _Broken:
    """Ends a request whose finishers could not be made."""

    reason: FinishReason

    def after(self, req: Req, token: int) -> FinishReason | None:
        return self.reason


def _one_each(rows: list[msgspec.Raw], tokens: int) -> list[msgspec.Raw]:
    if len(rows) != tokens:
        raise ValueError(f"expected {tokens} rows, one for each token of the output, got {len(rows)}")
    return rows


def _flags(stages: Iterable[Stage]) -> int:
    return reduce(or_, (stage.flag for stage in stages), 0)


def _nobody_ends(req: Req, reason: FinishReason) -> None:
    raise RuntimeError("stages cannot end requests before there is a scheduler")
