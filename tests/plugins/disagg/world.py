"""A prefill and a decode server, the network between them, and their clients, in virtual time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from pegboard.conformance.admission_gate import ManualClock
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.status import ReqStatus
from pegboard.plugins.disagg.events import Address
from pegboard.plugins.kv_handoff.api.transfer import TransferState
from tests.plugins.disagg.servers import Broken, Decode, Prefill, Server
from tests.plugins.disagg.wire import Net, Read, VirtualTransfer

ADDRESS = Address("127.0.0.1", 8998)


@dataclass
class Setup:
    """What differs between worlds."""

    pages: tuple[int, int] = (4, 3)
    memory: tuple[int, int] = (20, 24)
    on_loss: str = "fail"
    share: float = 0.5
    max_rooms: int = 4096


class World:
    """Both servers, the network between them, and what clients have asked."""

    def __init__(self, setup: Setup | None = None, broken: Broken | None = None) -> None:
        self.setup, self.broken = setup or Setup(), broken or Broken()
        self.clock, self.net = ManualClock(), Net()
        self.instances = itertools.count(1)
        self.rooms = itertools.count(1)
        self.transfers: dict[str, VirtualTransfer] = {}
        self.answers: dict[str, dict[str, str]] = {"prefill": {}, "decode": {}}
        self.asked: dict[str, float] = {}
        self.killed: set[str] = set()
        self.up = True
        self.prefill, self.decode = self._prefill(), self._decode()

    def _prefill(self) -> Prefill:
        setup = self.setup
        return Prefill(self, setup.pages[0], setup.memory[0], max_held_share=setup.share, max_rooms=setup.max_rooms)

    def _decode(self) -> Decode:
        setup = self.setup
        return Decode(self, setup.pages[1], setup.memory[1], on_loss=setup.on_loss, max_rooms=setup.max_rooms)

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    def server(self, role: str) -> Server:
        return self.prefill if role == "prefill" else self.decode

    # ---- what clients do ------------------------------------------------------------------------------------------

    def post(
        self,
        length: int,
        where: str = "both",
        *,
        room: int | None = None,
        seed: int = 0,
        alike: bool = True,
        principal: str = "",
    ) -> None:
        """Post a prompt to both servers, or to one of them only, with this API key."""
        room = next(self.rooms) if room is None else room
        seed = seed or next(self.instances)
        said = {"bootstrap_host": ADDRESS.host, "bootstrap_port": ADDRESS.port, "bootstrap_room": room}
        ids = np.arange(length, dtype=np.int64) % 5 + 10 * seed
        for server in self.servers:
            if where in ("both", server.role):
                other = ids if alike or server is self.prefill else ids + 1
                rid = f"{server.role}-{room}-{seed}"
                self.asked[rid] = self.clock()
                sampling, params = SamplingParams(max_new_tokens=4), {"disagg": said}
                server.arrive(Req(rid, other, sampling, params=params, arrived=0.0, principal=principal))

    def abort(self, role: str, number: int) -> None:
        server = self.server(role)
        if server.reqs and server.stopped_at is None:
            server.abort(list(server.reqs.values())[number % len(server.reqs)])

    def replace(self, number: int) -> None:
        """A client gives up, and posts another prompt of the same length in the same room."""
        if self.decode.reqs and self.decode.stopped_at is None and self.prefill.stopped_at is None:
            old = list(self.decode.reqs.values())[number % len(self.decode.reqs)]
            room = old.params["disagg"]["bootstrap_room"]
            for server in self.servers:
                for req in [req for req in server.reqs.values() if req.params["disagg"]["bootstrap_room"] == room]:
                    server.abort(req)
            for wire in self.net.wires:
                while wire.to_prefill and "prefill" not in wire.told:
                    self.net.deliver(wire, "prefill")
            self.post(old.input_len, room=room)

    # ---- what servers do ------------------------------------------------------------------------------------------

    def step(self, role: str) -> None:
        server = self.server(role)
        if server.stopped_at is None:
            server.step()

    def work(self) -> None:
        """Let everything go on a little."""
        self.connect()
        self.deliver_all()
        self.step("prefill")
        self.deliver_all()
        self.step("decode")

    def retract(self, number: int) -> None:
        running = [req for req in self.prefill.reqs.values() if req.status is ReqStatus.RUNNING]
        if running:
            self.prefill.retract(running[number % len(running)])

    def stop(self, role: str) -> None:
        """Stop a server for a while, as SIGSTOP does."""
        server = self.server(role)
        if server.stopped_at is None:
            server.stopped_at = self.clock()

    def go_on(self) -> None:
        for server in self.servers:
            server.stopped_at = None

    def kill(self, role: str) -> None:
        """Kill a server, and start it anew."""
        old = self.server(role)
        self.killed |= {rid for rid in self.asked if rid.startswith(role) and rid not in self.answers[role]}
        for wire in [wire for wire in self.net.wires if old.end in (wire.decode, wire.prefill)]:
            self.net.lose(wire, "decode")
            self.net.lose(wire, "prefill")
        for buffer in old.memory.buffers:
            buffer[:] = 0xEE
        old.transfer.reads.clear()
        old.transfer.dead = True
        if role == "prefill":
            self.prefill = self._prefill()
        else:
            self.decode = self._decode()

    # ---- what the network does ------------------------------------------------------------------------------------

    def connect(self, works: bool = True) -> None:
        end = self.decode.end
        for address in sorted(end.dialled):
            if works and self.up:
                self.net.open(end, self.prefill.end, address)
            else:
                self.net.refuse(end, address, "refused")

    def deliver(self, number: int) -> None:
        ways = [(wire, role) for wire in self.net.wires for role in ("prefill", "decode")]
        if ways:
            self.net.deliver(*ways[number % len(ways)])

    def deliver_all(self) -> None:
        for wire in list(self.net.wires):
            while wire.to_decode and "decode" not in wire.told:
                self.net.deliver(wire, "decode")
            while wire.to_prefill and "prefill" not in wire.told:
                self.net.deliver(wire, "prefill")

    def repeat(self, number: int) -> None:
        if self.net.wires:
            self.net.repeat(self.net.wires[number % len(self.net.wires)], number)

    def lose(self, number: int) -> None:
        """Let one end of a connection learn that it is broken; the other one learns of it later."""
        if self.net.wires:
            self.net.lose(self.net.wires[number // 2 % len(self.net.wires)], ("decode", "prefill")[number % 2])

    def reads(self) -> list[Read]:
        return list(self.decode.transfer.reads.values())

    def read(self, number: int, part: float) -> None:
        if found := self.reads():
            self.decode.transfer.copy(found[number % len(found)], part)

    def end_read(self, number: int, well: bool) -> None:
        if found := self.reads():
            read = found[number % len(found)]
            if read.abandoned:
                state = TransferState.GONE
            else:
                state = TransferState.DONE if well and not read.source.dead else TransferState.FAILED
            self.decode.transfer.end(read, state)

    # ---- time -----------------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Let time pass. Who does not answer for 6 s is lost, and so is a dial after 5 s."""
        self.clock.advance(seconds)
        for wire in list(self.net.wires):
            for server, other in ((self.prefill, "decode"), (self.decode, "prefill")):
                if server.stopped_at is not None and self.clock() - server.stopped_at >= 6.0:
                    self.net.lose(wire, other, silent=True)
            if wire.broken and seconds >= 1.0:
                self.net.lose(wire, "decode")
                self.net.lose(wire, "prefill")
        if seconds >= 5.0:
            self.connect(works=False)

    def settle(self) -> None:
        """Let everything come to an end by itself: nothing more is asked, and time goes on."""
        self.go_on()
        for turn in range(400):
            self.connect()
            self.deliver_all()
            for server in self.servers:
                server.crowd(0)
                server.step()
                server.made.stats()  # an operator looks: what an idle server has heard is taken note of
            if turn % 3 == 0:
                self.end_read(turn, turn % 7 != 0)
            self.wait(0.7)

    def check(self) -> None:
        """Assert what holds at any time."""
        for server in self.servers:
            assert not any(server.keeper.failures_by.values()), "a gate has raised"
            assert not server.keeper.overdue or server is self.decode, "KV was held for too long"
            pages = [page for pages in server.pages.values() for page in pages]
            assert sorted([*pages, *server.free]) == list(range(1, len(pages) + len(server.free) + 1))
            if server.stopped_at is None:
                for req in server.reqs.values():
                    waited = self.clock() - server.since[req.rid]
                    assert req.status is not ReqStatus.BLOCKED or waited < 200.0, f"{req.rid} waits for {waited} s"

    def check_settled(self) -> None:
        """Assert that everything was answered and nothing is left."""
        self.check()
        for role, answers in self.answers.items():
            missing = {rid for rid in self.asked if rid.startswith(role)} - set(answers) - self.killed
            assert not missing, f"no answer for {sorted(missing)}"
        for server in self.servers:
            assert not server.left, f"the {server.role} server still has {server.left}"
