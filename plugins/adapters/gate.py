"""The gate of requests with an adapter: they wait while it is loaded, and their KV is the adapter's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext, GateOptions, GateState, Verdict
from pegboard.plugins.adapters.slots import USE

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.adapters.store import AdapterStore

_EVERY = 0.01
"""Seconds between two questions how far loads are: each waits for the step under way."""


class AdapterGate(AdmissionGate[GateOptions]):
    """Is open once the adapter is there. A digest of its files keeps its KV apart."""

    def __init__(self, options: GateOptions, ctx: AdmissionGateContext, store: AdapterStore) -> None:
        super().__init__(options, ctx)
        self._store = store
        self._asked = 0.0

    def concerns(self, req: Req) -> bool:
        return USE.peek(req) is not None

    def enter(self, req: Req) -> Verdict:
        return _verdict(req)

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict | Exception]:
        now = self.ctx.clock()
        if now - self._asked >= _EVERY:
            self._asked = now
            self._store.refresh()
        return {req.rid: _verdict(req) for req in blocked}


def _verdict(req: Req) -> Verdict:
    adapter = USE.of(req).adapter
    assert adapter is not None
    if adapter.error:
        return Verdict.failed(adapter.error, code="adapter_failed", param="model")
    if not adapter.kept:
        return Verdict.blocked(f"the adapter {adapter.name!r} is being loaded")
    return Verdict(GateState.OPEN, namespace=adapter.digest)
