"""Both roles of the gate, as the contract's suite sees them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from pegboard.conformance.admission_gate import ManualClock, gated_request
from pegboard.core.interfaces.admission_gate import AdmissionGate, GateState, Verdict
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.disagg.gate import DisaggGate
from pegboard.plugins.kv_handoff.api import HandoffGate, KVReservation
from pegboard.plugins.kv_handoff.api.transfer import TransferState
from pegboard.plugins.kv_handoff.suite.gate import HandoffGateContract, asks
from tests.plugins.disagg.servers import DONE
from tests.plugins.disagg.world import ADDRESS, Setup, World

ROOMS = itertools.count(1)


def said(room: int | None = None) -> dict[str, dict[str, object]]:
    room = next(ROOMS) if room is None else room
    return {"disagg": {"bootstrap_host": ADDRESS.host, "bootstrap_port": ADDRESS.port, "bootstrap_room": room}}


class TestDecode(HandoffGateContract):
    """Behind it the prefill server of a world, which works whenever the gate looks."""

    provider = "disagg"
    options = {"role": "decode"}
    world: World

    @pytest.fixture
    def behind(self) -> World:
        world = World(Setup(memory=(60, 24)))
        self.world, self.reading = world, False
        world.decode.handoff.core = None  # the suite gives memory

        def look() -> None:
            world.connect()
            world.deliver_all()
            world.step("prefill")
            world.deliver_all()
            if self.reading:
                world.end_read(0, True)

        world.decode.end.before = look
        return world

    @pytest.fixture
    def clock(self, behind: World) -> ManualClock:
        return behind.clock

    @pytest.fixture
    def gate(self, behind: World) -> HandoffGate:
        return behind.decode.made

    def blocked_request(self, gate: AdmissionGate) -> Req:
        return gated_request(said())

    def clear(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        """Give prefill the request, and memory to this one: the suite's `wait_until_open` does the rest."""
        self._compute(req)
        self.reading = True
        for _ in range(50):
            verdict = gate.poll([req]).get(req.rid)
            if isinstance(verdict, Verdict) and asks(verdict):
                break
        assert isinstance(gate, HandoffGate)
        self.give_memory(gate, req)

    def around(self, gate: AdmissionGate) -> Sequence[object]:
        """The network of the world remembers what was sent."""
        return [self.world.net]

    def said_otherwise(self, params: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        """Connections to prefill servers stay, and in the world each port is one."""
        return said()

    def give_memory(self, gate: HandoffGate, req: Req) -> None:
        owner = self.world.decode.memory.owner
        slots = [slot for slot in range(3, len(owner)) if owner[slot] is None][: req.input_len]
        for slot in slots:
            owner[slot] = f"slot {slot}"
        gate.reserved(req, KVReservation(np.array(slots, np.int32), 0, req.input_len))

    def reserving_request(self, gate: HandoffGate) -> Req:
        req = gated_request(said())
        self._compute(req)
        self.world.decode.memory.owner[16:22] = ["reserved"] * 6
        return req

    def bring(self, gate: HandoffGate, clock: ManualClock, req: Req) -> None:
        self.reading = True

    def stop_writing(self, gate: HandoffGate, clock: ManualClock, req: Req) -> None:
        for read in self.world.reads():
            self.world.decode.transfer.end(read, TransferState.GONE)

    def _compute(self, req: Req) -> None:
        room = next(ROOMS)
        there = Req(f"there-{room}", req.prompt_ids.copy(), SamplingParams(max_new_tokens=4), params=req.params)
        self.world.prefill.arrive(there)


class ComputedAtOnce(DisaggGate):
    """A gate of a server that has computed a prompt, and the token after it, when it comes."""

    def judge(self, req: Req) -> Verdict:
        verdict = super().judge(req)
        if verdict.state is GateState.OPEN and req.output_len:
            self.computed(req, np.arange(16, 16 + req.input_len, dtype=np.int32))
        return verdict


class TestPrefill(HandoffGateContract):
    provider = "disagg"
    options = {"role": "prefill"}
    world: World
    before: Req | None

    @pytest.fixture
    def clock(self) -> ManualClock:
        self.world = World(Setup(share=0.01))
        return self.world.clock

    @pytest.fixture
    def gate(self, clock: ManualClock) -> HandoffGate:
        made = self.world.prefill.made
        self.before = None
        return ComputedAtOnce(made.options, made.ctx, self.world.prefill.end)

    def blocked_request(self, gate: AdmissionGate) -> Req:
        """One that waits for others to be taken, since a hundredth of the pool is a prompt at most."""
        if self.before is None:
            self.before = gated_request(said())
            assert gate.enter(self.before).state is GateState.OPEN
        return gated_request(said())

    def clear(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        if self.before is not None:
            gate.finished(self.before)
            self.before = None

    def held_request(self, gate: AdmissionGate) -> Req:
        req = gated_request(said())
        req.tokens.append(7)
        req.output.finish_reason = DONE
        return req

    def let_go(self, gate: AdmissionGate, clock: ManualClock, req: Req) -> None:
        clock.advance(31.0)

    def followed_request(self, gate: HandoffGate) -> Req:
        return gated_request(said())
