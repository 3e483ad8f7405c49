"""Gates that bring KV of requests from elsewhere, or take it there."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext, GateState, Verdict
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.options import OptionsT
from pegboard.core.interfaces.req import NO_ROW
from pegboard.plugins.kv_handoff.stage import NAME, KVHandoff

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.step import BaseStep, CoreServices
    from pegboard.plugins.kv_handoff.arrived import Arrived


@dataclass(frozen=True, slots=True)
class KVReservation:
    """Memory of a blocked request. `slots` int32 [length] are those of its tokens, in their order; the gate must not
    keep an array of its own beyond the request's time at it. The first `start` are cached and full, and shared with
    other requests; the others are the gate's to fill.
    """

    slots: NDArray[np.int32]
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class KVVerdict(Verdict):
    """A verdict that blocks a request and asks for memory (`reserve`), or opens, with what has `arrived` in that."""

    reserve: bool = False
    arrived: Arrived | None = None

    def __post_init__(self) -> None:
        if self.arrived is not None and self.state is not GateState.OPEN:
            raise ValueError(f"only a verdict that opens has something that arrived, not {self!r}")

    @classmethod
    def asking(cls, reason: str, progress: float | None = None) -> Self:
        """Block a request, and ask for memory."""
        return cls(GateState.BLOCKED, reason, progress, reserve=True)


class HandoffGate(AdmissionGate[OptionsT]):
    """A gate that brings KV, takes it elsewhere, or both. Its provider declares the capability `brings_kv`, and its
    plugin requires `kv_handoff`.

    It implements `judge`, `news` and `forget` in place of `enter`, `poll` and `cancel`. A request that is blocked by a
    `KVVerdict` with `reserve` gets memory when there is room: `reserved` says where. It goes on once a verdict opens.
    Of requests that the gate `follows` it hears where their KV lies.
    """

    def __init__(self, options: OptionsT, ctx: AdmissionGateContext) -> None:
        super().__init__(options, ctx)
        found = ctx.stages.get(NAME)
        self.handoff = found if isinstance(found, KVHandoff) else None
        if self.handoff is not None:
            self.handoff.serve(self)
        self._asking: set[str] = set()
        """Rids of those that want memory and have none."""
        self._quiet_after: dict[str, BaseStep | None] = {}
        """Rids of those that have memory and do not know it yet: the step that was under way at its allocation."""
        self._arrived: dict[str, Arrived] = {}

    @classmethod
    def supports(cls, options: OptionsT, ctx: AdmissionGateContext) -> str | None:
        return None if ctx.kv is None or NAME in ctx.stages else f"plugins.{NAME} is off, and this gate needs it"

    # ---- to be implemented -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def judge(self, req: Req) -> Verdict:
        """Judge a request that has come to the gate, as `AdmissionGate.enter`."""

    def news(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        """Return news of requests that this gate blocks, as `AdmissionGate.poll`."""
        return {}

    def reserved(self, req: Req, reservation: KVReservation) -> None:
        """Learn where a blocked request's KV goes to. Called once, after a verdict that asked for it, when no step
        under way can touch the slots any more. The reservation ends when the request goes on, or with `forget`. What
        this raises fails the request alone.
        """
        raise Unsupported(f"the gate {type(self).__name__}", "reserve")

    def forget(self, req: Req) -> bool | None:  # optional: a gate may keep nothing of a request
        """Forget a request that has ended before it went through, as `AdmissionGate.cancel`. True says that its
        reserved memory may still be written to: its pages stay out of use until `released` names it.
        """
        return None

    def follows(self, req: Req) -> bool:
        """Return whether the gate wants to know where the KV of a request lies that has just arrived."""
        return False

    def computed(self, req: Req, slots: NDArray[np.int32]) -> None:
        """Learn that the KV of a request's first tokens lies in these slots int32 [n]. Called after each step that has
        computed some of its prompt, for requests that the gate `follows`. It stays there until a call with fewer (none,
        where memory was taken from the request), or until the request ends and this gate does not hold it.
        """
        raise Unsupported(f"the gate {type(self).__name__}", "follows")

    # ---- the gate of the core --------------------------------------------------------------------------------------

    def enter(self, req: Req) -> Verdict:
        return self._noted(req.rid, self.judge(req))

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict | Exception]:
        found: dict[str, Verdict | Exception] = {
            rid: self._noted(rid, verdict) for rid, verdict in self.news(blocked).items()
        }
        core = None if self.handoff is None else self.handoff.core
        if core is None or not (self._asking or self._quiet_after):
            return found
        waiting = [req for req in blocked if not _goes(found.get(req.rid))]
        self._reserve(waiting, core)
        in_flight = core.in_flight
        for req in waiting:
            if req.rid not in self._quiet_after or (in_flight is not None and self._quiet_after[req.rid] is in_flight):
                continue
            del self._quiet_after[req.rid]
            slots = core.reserved_slots(req)
            try:
                self.reserved(req, KVReservation(slots, req.kv.cache_len, req.input_len))
            except Exception as error:
                found[req.rid] = error
        return found

    def passed(self, req: Req) -> bool:
        self._quiet_after.pop(req.rid, None)
        arrived = self._arrived.pop(req.rid, None)
        return self.handoff is not None and self.handoff.join(req, arrived)

    def cancel(self, req: Req) -> bool | None:
        self._asking.discard(req.rid)
        self._quiet_after.pop(req.rid, None)
        self._arrived.pop(req.rid, None)
        return self.forget(req)

    def _noted(self, rid: str, verdict: Verdict) -> Verdict:
        """Note what a verdict asks for or brings."""
        self._asking.discard(rid)
        if isinstance(verdict, KVVerdict):
            if verdict.reserve:
                self._asking.add(rid)
            if verdict.arrived is not None:
                self._arrived[rid] = verdict.arrived
        return verdict

    def _reserve(self, blocked: Sequence[Req], core: CoreServices) -> None:
        """KVLayers memory for those that ask for it, as far as there is room, those first that came first."""
        for req in blocked:
            if req.rid in self._asking and req.kv.row == NO_ROW:
                if not core.reserve(req):
                    return
                self._quiet_after[req.rid] = core.in_flight


def _goes(verdict: object) -> bool:
    """Return whether a verdict ends a request's time at the gate."""
    return isinstance(verdict, Verdict) and verdict.state is not GateState.BLOCKED
