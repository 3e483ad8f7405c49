"""In the scheduler: which requests have an adapter, and which of them find it on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext, GateOptions
from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.stage import Column, Interest, Sent, Stage, Wait
from pegboard.plugins.adapters.api import COLUMN
from pegboard.plugins.adapters.gate import AdapterGate
from pegboard.plugins.adapters.messages import NAME, BatchSlots
from pegboard.plugins.adapters.slots import USE, Slots
from pegboard.plugins.adapters.store import AdapterStore
from pegboard.toolkit.http.model_names import ADAPTER

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import BatchExtras
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import StepView
    from pegboard.core.interfaces.step import AnySource, BaseStep, CoreServices
    from pegboard.plugins.adapters.options import AdapterSection
    from pegboard.plugins.adapters.store import Adapter


_EVERY = 0.1
"""Seconds between two looks how far loads are that no request waits for: each waits for the step under way."""


class Adapters(Stage):
    """Takes part in requests with an adapter. They are admitted once it has a slot."""

    name = NAME
    offers = (ADAPTER,)

    def __init__(self, section: AdapterSection) -> None:
        self.store = AdapterStore(section.preload, section.host_bytes, section.slots - 1)
        self.slots = Slots(section.slots, section.fair_after)
        self.store.ended = self.slots.clear
        self.columns = (Column(COLUMN.removeprefix(f"{NAME}."), _slot_of),)
        self._timeout = section.load_timeout
        self._looked = 0.0
        self._reqs: set[Req] = set()
        """All requests with an adapter."""
        self.core: CoreServices
        self.retractions = 0

    def sources(self, core: CoreServices) -> Iterable[AnySource]:
        self.core = core
        self.store.ask = lambda work: core.ask(self.name, work)
        self.store.refresh()
        if failed := self.store.failed:
            raise ConfigError([Problem(f"adapters.preload.{one.name}", one.error) for one in failed])
        return ()

    def gate(self, ctx: AdmissionGateContext) -> AdmissionGate:
        if ctx.kv is not None:
            raise ConfigError(Problem("gates", "adapters do not work with gates that bring KV (disaggregation) yet"))
        self.slots.clock = ctx.clock
        return AdapterGate(GateOptions(timeout=self._timeout), ctx, self.store)

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        feature = message.features.get(self.name)
        if feature is None:
            return None
        USE.of(req).adapter = self.store.use(msgspec.msgpack.decode(feature, type=str))
        self._reqs.add(req)
        return Interest(look=False)

    def unplaced(self, req: Req) -> None:
        self.slots.release(req)

    def gone(self, req: Req) -> None:
        self.slots.forget(req)
        adapter = USE.of(req).adapter
        self._reqs.discard(req)
        if adapter is not None:
            totals = self.store.totals_of(adapter.name)
            totals.requests += 1
            totals.prompt_tokens += req.input_len
            totals.generation_tokens += req.output_len
            totals.refused += bool(adapter.error)
            self.store.unuse(adapter)

    def unload(self, name: str, *, force: bool = False) -> Adapter:
        """Take an adapter from new requests; with `force` end those that have it, too. Raises InvalidRequest."""
        found = self.store.unload(name, leaving=force)
        if force:
            ended = self.store.named(name)
            reqs = [req for req in self._reqs if USE.of(req).adapter in ended]
            self.core.end(reqs, f"the adapter {name!r} was unloaded", code="adapter_unloaded", status=503)
        return found

    def must_settle(self, running: Sequence[Req], in_flight: BaseStep) -> bool:
        return bool(self.slots.overdue())

    def begin_plan(self) -> None:
        self.slots.begin_plan()
        for req in self.slots.overdue():
            self.retractions += self.core.retract(req)
        if self.store.stale or (self.store.loading and self.slots.clock() - self._looked >= _EVERY):
            self._looked = self.slots.clock()
            self.store.refresh()

    def skips(self, req: Req) -> bool:
        adapter = USE.of(req).adapter
        assert adapter is not None
        return self.slots.refused(req, adapter)

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        adapter = USE.of(req).adapter
        assert adapter is not None
        return take if self.slots.hold(req, adapter) else Wait.SKIP

    def pack(self, step: StepView, extras: BatchExtras) -> BatchSlots:
        numbers = extras.values[COLUMN]
        assert isinstance(numbers, np.ndarray)
        used = [slot for slot in np.unique(numbers).tolist() if slot]
        return BatchSlots(numbers, step.batch.extend_lens, {slot: self.slots.uid(slot) for slot in used})

    def send(self, req: Req, start: int, stop: int) -> Sent | None:
        """With the end of a request whose adapter has failed: its name, if that means no adapter any more."""
        if not req.finished:
            return None
        adapter = USE.of(req).adapter
        if adapter is None or not adapter.error or adapter.name in self.store.names:
            return None
        return Sent(adapter.name)

    def info(self) -> Mapping[str, object]:
        return {"names": {name: adapter.path for name, adapter in self.store.names.items()}}

    def figures(self) -> Mapping[str, float]:
        loaded = list(self.store.loaded)
        return {
            "loaded": sum(one.kept for one in loaded),
            "host_bytes": self.store.host_bytes,
            "adapter_evictions_total": self.store.evictions,
            "slots_in_use": self.slots.in_use,
            "waiting_for_slots": self.slots.waiting,
            "slot_retractions_total": self.retractions,
        }

    def idle_error(self) -> str | None:
        wrong = [one.name for one in self.store.loaded if one.users or one.holders]
        return f"adapters are in use without requests: {', '.join(wrong)}" if wrong else None


def _slot_of(req: Req) -> int:
    adapter = USE.of(req).adapter
    assert adapter is not None
    if req.rid not in adapter.holders and not req.finished:
        raise RuntimeError(f"the adapter {adapter.name!r} has no slot")
    return adapter.slot
