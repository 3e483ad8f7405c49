"""Servers in virtual time: a gate, the scheduler's gate keeper and a small memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.admission_gate import AdmissionGateContext, KVAccess
from pegboard.core.interfaces.req import NO_ROW, Req
from pegboard.core.interfaces.status import FinishReason, FinishType, ReqStatus
from pegboard.core.interfaces.step import TokenValues
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.plugins.disagg.gate import DisaggGate
from pegboard.plugins.disagg.options import DisaggOptions
from pegboard.plugins.kv_handoff.api.transfer import KVTransfer
from pegboard.plugins.kv_handoff.stage import NAME, KVHandoff
from tests.plugins.disagg.wire import End, Memory, VirtualTransfer

if TYPE_CHECKING:
    from tests.plugins.disagg.world import World

DONE = FinishReason(FinishType.LENGTH)
ABORTED = FinishReason(FinishType.ABORT, message="aborted", status=499)
OTHERS = "others"
VOCAB = 1000


def value_of(req: Req, position: int) -> int:
    """Return what KV of a token is: it depends on all tokens up to it."""
    return zlib.crc32(req.tokens.view(0, position + 1).tobytes())


def token_of(req: Req) -> int:
    return value_of(req, req.input_len - 1) % VOCAB


@dataclass
class Broken:
    """How the servers of a world are to be wrong: what each part of them is."""

    prefill: type[DisaggGate] = DisaggGate
    decode: type[DisaggGate] = DisaggGate
    prefill_end: Callable[[End], None] = lambda end: None
    decode_end: Callable[[End], None] = lambda end: None
    transfer: type[VirtualTransfer] = VirtualTransfer


class Handoff(KVHandoff):
    """The stage of a server, which stands for the core as well."""

    def __init__(self, server: Server) -> None:
        super().__init__(VOCAB)
        self._server = server
        self.core: Any = server

    def transfer(self, pool: object) -> KVTransfer:
        return self._server.transfer


class Server:
    """What both have in common: memory in pages, requests, a gate behind the keeper. It may be stopped for a while. To
    the gate's stage it is the core.
    """

    role: str
    in_flight = None

    def __init__(self, world: World, page_size: int, pages: int, **options: object) -> None:
        self.world, self.page_size = world, page_size
        self.memory = Memory((pages + 1) * page_size)
        self.free = list(range(1, pages + 1))
        self.transfer = world.broken.transfer(self.memory, world.clock, world.transfers)
        self.end = End(world.net, f"{self.role}-{next(world.instances):08d}".encode(), self.role)
        getattr(world.broken, f"{self.role}_end")(self.end)
        world.transfers[self.end.instance.hex()] = self.transfer
        pool: Any = self.memory
        self.handoff = Handoff(self)
        ctx = AdmissionGateContext(world.clock, kv=KVAccess(page_size, pool, b"same", {}), stages={NAME: self.handoff})
        made: type[DisaggGate] = getattr(world.broken, self.role)
        self.made = made(DisaggOptions.model_validate({"role": self.role, **options}), ctx, self.end)
        self.keeper = GateKeeper([("disagg", self.made)], world.clock)
        self.reqs: dict[str, Req] = {}
        self.pages: dict[str, list[int]] = {}
        self.since: dict[str, float] = {}
        self.stopped_at: float | None = None

    def allocate(self, rid: str, tokens: int) -> bool:
        """Give a request pages until it has so many tokens' worth."""
        had = self.pages.setdefault(rid, [])
        missing = -(-tokens // self.page_size) - len(had)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            page = self.free.pop(0)
            had.append(page)
            for slot in self.slots_of(page):
                assert self.memory.owner[slot] is None
                self.memory.owner[slot] = rid
        return True

    def free_pages(self, rid: str) -> None:
        """Free what a request has; others write to it at once."""
        for page in self.pages.pop(rid, []):
            for slot in self.slots_of(page):
                assert self.memory.owner[slot] == rid
                self.memory.owner[slot] = None
                self.memory.cached.discard(slot)
                self.put(slot, 0xDEAD)
            self.free.append(page)

    def put(self, slot: int, value: int) -> None:
        """Write a token's KV."""
        self.memory.put(slot, value)

    def slots_of(self, page: int) -> range:
        return range(page * self.page_size, (page + 1) * self.page_size)

    def slots(self, rid: str, tokens: int) -> np.ndarray:
        every = [slot for page in self.pages[rid] for slot in self.slots_of(page)]
        return np.array(every[:tokens], np.int32)

    def crowd(self, pages: int) -> None:
        """Other requests take memory, up to so many pages, or let go of it."""
        self.free_pages(OTHERS)
        self.allocate(OTHERS, min(pages, len(self.free)) * self.page_size)

    def arrive(self, req: Req) -> None:
        self.since[req.rid] = self.world.clock()
        if self.keeper.arrive(req) is not None:
            self.ended(req, "refused")
            return
        self.reqs[req.rid] = req
        if req.status is not ReqStatus.BLOCKED:
            self.through(req)

    def through(self, req: Req) -> None:
        raise NotImplementedError

    def first_rows(self, req: Req) -> Mapping[str, bytes]:
        return {}

    def ended(self, req: Req, how: str) -> None:
        self.world.answers[self.role].setdefault(req.rid, how)

    def look(self) -> None:
        """Ask the gates, as a step of the scheduler does."""
        if not self.keeper:
            return
        news = self.keeper.poll()
        for req in news.released:
            self.gone(req)
        for req, reason in news.failed:
            self.ended(req, reason.code)
            if not self.keeper.cancel(req):
                self.gone(req)
            else:
                req.move_to(ReqStatus.HELD)
        for req in news.ready:
            if not self.keeper.passed(req):
                self.through(req)

    def gone(self, req: Req) -> None:
        self.reqs.pop(req.rid, None)
        self.since.pop(req.rid, None)
        self.free_pages(req.rid)

    def abort(self, req: Req) -> None:
        """End a request in whatever state it is."""
        self.ended(req, "aborted")
        if req.status is ReqStatus.HELD:
            if self.keeper.drop(req):
                self.gone(req)
        elif req.status is ReqStatus.BLOCKED:
            if self.keeper.cancel(req):
                req.move_to(ReqStatus.HELD)
            else:
                self.gone(req)
        else:
            req.output.finish_reason = ABORTED
            if self.keeper.finish(req):
                self.keeper.drop(req)
            self.gone(req)

    def step(self) -> None:
        raise NotImplementedError

    @property
    def left(self) -> dict[str, object]:
        """What a server that has come to rest should not have any more."""
        stats = self.made.stats()
        names = ("rooms", "rooms_wanted_before_they_came", "seats_quarantined", "reads")
        found: dict[str, object] = {name: stats[name] for name in names if stats.get(name)}
        if self.reqs or any(self.pages.values()):
            found |= {"requests": sorted(self.reqs), "pages": self.pages}
        return found


class Prefill(Server):
    """Computes a chunk of one request per step."""

    role = "prefill"

    def __init__(self, world: World, page_size: int, pages: int, **options: object) -> None:
        self.committed: dict[str, int] = {}
        self.chunk = 6
        super().__init__(world, page_size, pages, **options)

    def reserve(self, req: Req) -> bool:
        raise AssertionError("a prefill server computes all of it")

    def through(self, req: Req) -> None:
        self.committed[req.rid] = 0
        if req.status is ReqStatus.BLOCKED:
            req.move_to(ReqStatus.WAITING)

    def step(self) -> None:
        self.look()
        for rid in list(self.committed)[:1]:
            req = self.reqs[rid]
            upto = min(req.input_len, self.committed[rid] + self.chunk)
            if not self.allocate(rid, upto):
                self.committed[rid] = self.committed.pop(rid)  # its turn comes again
                continue
            if req.status is not ReqStatus.RUNNING:
                req.move_to(ReqStatus.RUNNING)
            for position, slot in enumerate(self.slots(rid, upto).tolist()):
                if position >= self.committed[rid]:
                    self.put(slot, value_of(req, position))
            self.committed[rid] = upto
            assert self.made.follows(req)
            self.made.computed(req, self.slots(rid, upto))
            if upto == req.input_len:
                self.finish(req)

    def finish(self, req: Req) -> None:
        del self.committed[req.rid]
        req.tokens.append(token_of(req))
        req.output.finish_reason = DONE
        self.ended(req, "length")
        if self.keeper.finish(req):
            req.move_to(ReqStatus.HELD)
        else:
            self.gone(req)

    def gone(self, req: Req) -> None:
        self.committed.pop(req.rid, None)
        super().gone(req)

    def retract(self, req: Req) -> None:
        """Take a running request's memory."""
        if req.status is ReqStatus.RUNNING:
            if self.committed[req.rid]:
                self.made.computed(req, np.empty(0, np.int32))
            self.free_pages(req.rid)
            req.move_to(ReqStatus.RETRACTED)
            self.committed[req.rid] = 0


class Decode(Server):
    """Seats what its gate asks for, and runs what has arrived for a few steps."""

    role = "decode"

    def __init__(self, world: World, page_size: int, pages: int, **options: object) -> None:
        self.running: dict[str, int] = {}
        self.cached = 0
        super().__init__(world, page_size, pages, **options)

    def step(self) -> None:
        self.look()
        for rid, left in list(self.running.items()):
            self.running[rid] = left - 1
            if not left:
                del self.running[rid]
                req = self.reqs[rid]
                req.output.finish_reason = DONE
                self.ended(req, "length")
                assert not self.keeper.finish(req)
                self.gone(req)

    def reserve(self, req: Req) -> bool:
        if not self.allocate(req.rid, req.input_len + 2):
            return False
        req.kv.row = 1
        req.kv.cache_len = min(self.cached, req.input_len - 1) // self.page_size * self.page_size
        for position, slot in enumerate(self.slots(req.rid, req.kv.cache_len).tolist()):
            self.put(slot, value_of(req, position))
            self.memory.cached.add(slot)
        return True

    def reserved_slots(self, req: Req) -> np.ndarray:
        return self.slots(req.rid, req.input_len)

    def give_back(self, req: Req, computed: int = 0) -> None:
        self.check_arrived(req, computed)
        self.free_pages(req.rid)
        self.allocate(req.rid, 0)
        req.kv.row = NO_ROW

    def begin_computed(self, req: Req, length: int, token: int, values: TokenValues) -> None:
        self.check_arrived(req, length)
        assert (length, token) == (req.input_len, token_of(req))
        req.kv.row = NO_ROW
        req.move_to(ReqStatus.RUNNING)
        self.running[req.rid] = 3

    def check_arrived(self, req: Req, length: int) -> None:
        for position, slot in enumerate(self.slots(req.rid, length).tolist()):
            right = self.memory.holds(slot, value_of(req, position))
            assert right, f"token {position} of {req.rid} is not what was computed for it"

    def through(self, req: Req) -> None:
        req.move_to(ReqStatus.WAITING)
        self.running[req.rid] = 3

    def gone(self, req: Req) -> None:
        self.running.pop(req.rid, None)
        super().gone(req)
