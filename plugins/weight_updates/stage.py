"""In the scheduler: which weights each request is computed with, and whether there are any."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext, GateOptions
from pegboard.core.interfaces.errors import ConfigError, InvalidRequest, Problem
from pegboard.core.interfaces.req import NO_ROW, WHOLE_PREFIX, ReqSlot
from pegboard.core.interfaces.stage import Interest, Sent, Stage
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.plugins.weight_updates.gate import EpochGate
from pegboard.plugins.weight_updates.messages import NAME
from pegboard.toolkit.http.weight_version import BROKEN, DEFAULT, STARTED_WITH, VERSION

if TYPE_CHECKING:
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.step import AnySource, CoreServices
    from pegboard.plugins.weight_updates.messages import Work


@dataclass(slots=True)
class _Weights:
    """Of a request: in which `epoch` its KV is shared, the version that its first tokens came from if that was another
    one, and what its client was told last.
    """

    epoch: str = ""
    first: str = ""
    told: str = DEFAULT


_WEIGHTS = ReqSlot(_Weights)


class WeightUpdates(Stage):
    """Takes part in all requests. `end` finishes one for a reason."""

    name = NAME
    offers = ("weights.disk", "weights.tensor", "memory.release")

    def __init__(self, end: Callable[[Req, FinishReason], None]) -> None:
        self.ask: Callable[[Work], object]
        """Has work done where batches run, between two of them."""
        self._rename: Callable[[Req, str, str], None]
        self.version = DEFAULT
        self.epoch = ""
        """Names the weights where prefixes are kept; "" stands for those of the start."""
        self.broken = ""
        """Why the weights have no meaning, "" where they have one."""
        self.updates = 0
        self._alive: dict[str, Req] = {}
        self._end = end

    def sources(self, core: CoreServices) -> Iterable[AnySource]:
        self.ask = lambda work: core.ask(self.name, work)
        self._rename = core.rename
        return ()

    def gate(self, ctx: AdmissionGateContext) -> AdmissionGate:
        if ctx.kv is not None:
            text = "weight_updates do not work with gates that bring KV (disaggregation) yet"
            raise ConfigError(Problem("gates", text))
        return EpochGate(GateOptions(), ctx, lambda: self.epoch)

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        if self.broken:
            raise InvalidRequest(self.broken, code=BROKEN, status=503)
        self._alive[req.rid] = req
        _WEIGHTS.of(req).epoch = self.epoch
        return Interest(look=False)

    def reusable(self, req: Req) -> int:
        """Return 0 for one that was left in place: what it has put into the cache is of several weights."""
        return WHOLE_PREFIX if _WEIGHTS.of(req).epoch == self.epoch else 0

    def gone(self, req: Req) -> None:
        self._alive.pop(req.rid, None)

    def send(self, req: Req, start: int, stop: int) -> Sent | None:
        known = _WEIGHTS.of(req)
        if known.told == self.version and not (req.finished and self.version != DEFAULT):
            return None
        known.told = self.version
        told = {VERSION: self.version}
        return Sent(told | {STARTED_WITH: known.first} if known.first else told)

    def updated(self, version: str) -> None:
        """Note that the weights are other ones now, all of them new."""
        for req in self._alive.values():
            known = _WEIGHTS.of(req)
            if req.output_len and not known.first and version != self.version:
                known.first = self.version
        self.version, self.broken = version, ""
        self.updates += 1
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Have nothing found any more that was kept of prefixes until now, by the cache or by another stage."""
        self.epoch = uuid.uuid4().hex
        for req in self._alive.values():
            # One with memory keeps its place in the cache, where no other request looks any more.
            if req.kv.row == NO_ROW and not req.finished:
                self._rename(req, self.name, self.epoch)
                _WEIGHTS.of(req).epoch = self.epoch

    def broke(self, reason: str, what: str = "an update of the weights has failed, send another one") -> None:
        """Note that the weights have no meaning: `what` has happened for a `reason`. All requests end with status
        503.
        """
        self.broken = f"{what}: {reason}"
        for req in list(self._alive.values()):
            self._end(req, FinishReason(FinishType.ABORT, message=self.broken, status=503, code=BROKEN))

    def info(self) -> Mapping[str, object]:
        return {"version": self.version}

    def figures(self) -> Mapping[str, float]:
        return {"updates_total": self.updates, "broken": bool(self.broken)}
