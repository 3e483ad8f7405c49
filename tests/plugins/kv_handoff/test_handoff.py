"""Requests whose KV a gate brings, and gates that follow what is computed: the drill gate over the fake model."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.conformance.admission_gate import ManualClock
from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext
from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.req import NO_ROW, Req
from pegboard.core.interfaces.sampling import Grammar
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.core.pipeline.memory import MemoryManager
from pegboard.core.pipeline.services import Services
from pegboard.plugins.grammar.work import GrammarWork, WorkLimits
from pegboard.plugins.kv_handoff.api import KVReservation
from pegboard.plugins.kv_handoff.stage import NAME, KVHandoff
from pegboard.toolkit.system.step_report import StepReport
from pegboard_drills.gate import DrillGate
from pegboard_drills.grammars import ScriptedMatcher
from pegboard_drills.options import DrillGateOptions
from tests.core.pipeline.harness import EOS, VOCAB, FakeModel, Harness, oracle
from tests.core.pipeline.noticing import noticed
from tests.plugins.grammar.test_state import make_gate, stage_of

PROMPT = [5, 9, 2, 44, 17, 3, 8, 101, 6, 77, 12, 31]
GARBAGE = 250
"""What is still written to the memory of requests that have ended."""
LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])


class Late:
    """A step that is computed when its result is asked for."""

    def __init__(self, model: FakeModel, work: ModelWorkerBatch) -> None:
        self.model, self.work = model, work

    def result(self) -> BatchResult:
        return FakeModel.__call__(self.model, self.work)


class LateModel(FakeModel):
    """Computes as late as it may, so that what is written meanwhile to slots that a step still has is seen."""

    def launch(self, work: ModelWorkerBatch) -> Any:
        return Late(self, work)


class World:
    """A harness whose drill gate writes prompts into memory, and looks where the KV lies that it follows."""

    def __init__(
        self,
        loop: str = "normal",
        *,
        timeout: float | None = None,
        hold_timeout: float | None = None,
        grammars: bool = False,
        **more: Any,
    ) -> None:
        self.clock = ManualClock()
        options = DrillGateOptions(timeout=timeout, hold_timeout=hold_timeout)
        self.failed: list[object] = []
        self.handoff = KVHandoff(VOCAB, failed=self.failed.append)
        self.gate = DrillGate(options, AdmissionGateContext(self.clock, stages={NAME: self.handoff}))
        self.gate.write = self.write
        before: list[tuple[str, AdmissionGate]] = []
        if grammars:
            gate = make_gate(self.clock, work=more.pop("work", None), jump_ahead=more.pop("jump_ahead", 0))
            before, more["joining"] = [("grammar", gate)], [stage_of(gate), *more.get("joining", ())]
        self.keeper = GateKeeper([*before, ("drill", self.gate)], self.clock)
        parts = {**more.pop("parts", {}), "gates": self.keeper, "clock": self.clock}
        joining = [self.handoff, *more.pop("joining", ())]
        self.harness = Harness(
            loop=loop, parts=parts, joining=joining, **{"max_running_requests": 8, "model": LateModel, **more}
        )
        self.prompts: dict[str, Sequence[int]] = {}
        self.reservations: list[tuple[str, int]] = []
        """Whose memory was reserved, with how many tokens cached already."""

    def write(self, rid: str, memory: KVReservation, wanted: bool) -> None:
        """All but the last token at first, and that one when it is through; garbage where it is not wanted."""
        first = (rid, memory.start) not in self.reservations
        if first:
            self.reservations.append((rid, memory.start))
        some = slice(memory.start, memory.length - 1) if first else slice(memory.length - 1, memory.length)
        if wanted:
            self.harness.model.slots[memory.slots[some]] = self.kept(rid)[some]
        else:
            self.harness.model.slots[memory.slots[memory.start :]] = GARBAGE

    def kept(self, rid: str) -> Sequence[int]:
        """What the model keeps of a prompt."""
        return self.prompts[rid]

    def submit(self, rid: str, prompt: Sequence[int] = PROMPT, n: int = 6, *, drill: Any = None, **more: Any) -> Any:
        self.prompts[rid] = prompt
        params = {} if drill is None else {"params": {"drill": drill}}
        return self.harness.submit(rid, prompt, n, **{"sampling": {"ignore_eos": True}, **params, **more})

    def bring(self, rid: str, prompt: Sequence[int] = PROMPT, n: int = 6, *, drill: Any = None, **more: Any) -> Any:
        """Submit a request whose prompt was computed elsewhere, with its first token."""
        said = {"act": "bring", "delay": 0.1, "token": oracle(prompt, 1)[0], **(drill or {})}
        return self.submit(rid, prompt, n, drill=said, **more)

    def run(self, steps: int = 4000) -> None:
        for _ in range(steps):
            if self.harness.scheduler.idle:
                break
            self.step()
        self.harness.run(1)
        info = self.harness.scheduler.info()
        assert (info["seated_requests"], info["quarantined_tokens"], info["held_requests"]) == (0, 0, 0)

    def step(self) -> None:
        self.harness.step()
        self.clock.advance(0.02)
        for rid, slots in self.gate.places.items():
            found = self.harness.model.slots[slots].tolist()
            assert found[: len(self.prompts[rid])] == list(self.prompts[rid])[: len(found)], "KV that a gate follows"

    def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(500):
            if condition():
                return
            self.step()
        pytest.fail("it does not happen")

    def status(self, rid: str) -> ReqStatus:
        return self.harness.scheduler.requests.alive[rid].status


@LOOPS
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_was_brought_is_gone_on_with(loop: str, page_size: int) -> None:
    """With the same tokens as if it had been computed here, beside others, and without computing any of it."""
    world = World(loop, page_size=page_size)
    world.submit("before", [8, 8, 4], 9)
    world.bring("a")
    world.bring("b", PROMPT[:7], stream=True)
    world.submit("after", [8, 8, 5, 1], 9)
    world.run()
    for rid, n in (("before", 9), ("a", 6), ("b", 6), ("after", 9)):
        assert world.harness.tokens(rid) == oracle(world.prompts[rid], n, ignore_eos=True), rid
    assert world.harness.finish("a") == {"type": "length"}
    assert world.harness.scheduler.counters.prompt_tokens == 7, "of the two that came without"
    assert world.harness.outputs["a"][-1].cached_tokens == 2
    assert [len(one.token_ids) for one in world.harness.outputs["b"]] == [1] * 6


@LOOPS
def test_only_what_is_not_cached_is_brought(loop: str) -> None:
    """And what was brought is in the cache."""
    world = World(loop, page_size=4)
    world.bring("first")
    world.run()
    world.bring("second", [*PROMPT[:9], 1, 1])
    world.run()
    world.submit("third", [*PROMPT[:9], 1, 1, 4, 4])
    world.run()
    assert world.reservations == [("first", 0), ("second", 8)]
    assert world.harness.tokens("second") == oracle([*PROMPT[:9], 1, 1], 6, ignore_eos=True)
    assert world.harness.tokens("third") == oracle([*PROMPT[:9], 1, 1, 4, 4], 6, ignore_eos=True)
    assert world.harness.outputs["third"][-1].cached_tokens == 8


@LOOPS
@pytest.mark.parametrize("sampling", [{"stop_token_ids": [oracle(PROMPT, 1)[0]]}, {"max_new_tokens": 1}])
def test_the_first_token_may_be_the_last(loop: str, sampling: dict[str, Any]) -> None:
    world = World(loop)
    world.bring("a", sampling=sampling)
    world.run()
    assert world.harness.tokens("a") == oracle(PROMPT, 1)
    assert world.harness.finish("a")["type"] in ("stop", "length")
    world.bring("end", drill={"token": EOS}, sampling={})
    world.run()
    assert world.harness.finish("end") == {"type": "stop", "matched": EOS}


@LOOPS
@pytest.mark.parametrize("length", [0, 5, 8, 12])
def test_kv_without_a_token_is_cached_and_the_rest_computed(loop: str, length: int) -> None:
    world = World(loop, page_size=4)
    world.bring("a", drill={"token": None, "length": length})
    world.run()
    assert world.harness.tokens("a") == oracle(PROMPT, 6, ignore_eos=True)
    # At least one token is computed, and whole pages are cached.
    assert world.harness.outputs["a"][-1].cached_tokens == min(length, len(PROMPT) - 1) // 4 * 4


@LOOPS
@pytest.mark.parametrize(
    ("drill", "what"),
    [
        ({"length": 5}, "a token behind 5 of 12 tokens"),
        ({"token": VOCAB}, f"the token {VOCAB} is not among"),
        ({"token": None, "length": 13}, "KV of 13 of 12 tokens"),
    ],
)
def test_what_does_not_fit_fails_its_request(loop: str, drill: Any, what: str) -> None:
    world = World(loop)
    world.bring("bad", drill=drill)
    world.bring("good", PROMPT[:5])
    world.run()
    reason = world.harness.finish("bad")
    assert (reason["status"], reason["code"]) == (500, "gate_failed")
    assert what in reason["message"]
    assert world.harness.tokens("good") == oracle(PROMPT[:5], 6, ignore_eos=True)
    world.bring("alone", PROMPT[:4])
    world.run()
    assert world.harness.tokens("alone") == oracle(PROMPT[:4], 6, ignore_eos=True), "the gate is asked about it"


def test_logprobs_come_with_the_token() -> None:
    world = World()
    world.bring("a", n=1, logprobs=1)
    world.run()
    (output,) = world.harness.outputs["a"]
    assert output.logprobs == [(-0.5, oracle(PROMPT, 1)[0], [(-0.5, 3)])]


@LOOPS
def test_only_what_is_computed_is_logged_as_a_prefill(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    """And not a request that joins, whose only token is that of a decode."""
    world = World(loop)
    world.harness.scheduler.components.report = StepReport(3)
    with caplog.at_level(logging.INFO):
        world.bring("a", n=12)
        world.bring("b", PROMPT[:7], n=12)
        world.run()
        assert [record.getMessage()[:13] for record in caplog.records] == ["Decode batch."] * 3
        world.submit("computed", [1, 2, 3])
        world.run()
    (line,) = [record for record in caplog.records if record.getMessage().startswith("Prefill")]
    fields: dict[str, Any] = vars(line)
    assert (fields["new_requests"], fields["new_tokens"]) == (1, 3)


@LOOPS
def test_a_gate_may_allow_fewer_tokens(loop: str) -> None:
    world = World(loop)
    world.submit("a", n=50, drill={"most": 2}, sampling={"ignore_eos": True, "min_new_tokens": 9})
    world.bring("b", drill={"most": 3})
    world.run()
    assert world.harness.tokens("a") == oracle(PROMPT, 2, ignore_eos=True)
    assert world.harness.tokens("b") == oracle(PROMPT, 3, ignore_eos=True)


@LOOPS
def test_reservations_wait_for_room_and_for_retracted_requests(loop: str) -> None:
    """Reserved memory counts as a running request does: with its growth."""
    world = World(loop, tokens=64)
    world.submit("long", [1, 2, 3], 40)
    world.until(lambda: world.harness.scheduler.running)
    world.bring("a", list(range(30, 85)))
    for _ in range(5):
        world.step()
    assert world.harness.scheduler.info()["seated_requests"] == 0
    assert world.keeper.waiting_on()[0]["reason"] == "memory"
    world.run()
    assert world.harness.tokens("a") == oracle(range(30, 85), 6, ignore_eos=True)
    assert world.harness.scheduler.counters.retractions == 0


@LOOPS
def test_memory_that_is_still_written_to_stays_out_of_use(loop: str) -> None:
    world = World(loop, tokens=32, hold_timeout=0.5)
    world.bring("a", drill={"delay": 60.0, "linger": 1.0})
    world.until(lambda: world.reservations)
    world.harness.scheduler.receive([AbortRequest(rid="a")])
    world.step()
    assert world.harness.finish("a")["type"] == "abort", "the answer does not wait"
    assert world.status("a") is ReqStatus.HELD
    assert world.harness.scheduler.info()["quarantined_tokens"] == len(PROMPT)
    world.harness.scheduler.receive([AbortRequest(rid="a")])
    world.submit("b", list(range(20)), 8)
    while "a" in world.harness.scheduler.requests.alive:
        world.step()
    world.run()
    assert world.harness.tokens("b") == oracle(range(20), 8, ignore_eos=True)
    assert world.keeper.overdue == 1, "it was told"


@LOOPS
def test_a_gate_that_cannot_say_what_is_released_gives_nothing_away(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(loop, tokens=32)
    world.bring("a", drill={"delay": 60.0, "linger": 1.0})
    world.submit("held", [1, 2, 3], 1, drill={"hold": 1000.0})
    world.until(lambda: world.reservations and world.status("held") is ReqStatus.HELD)
    world.harness.scheduler.receive([AbortRequest(rid="a")])
    world.step()
    with monkeypatch.context() as patch:
        patch.setattr(world.gate, "released", lambda: 1 / 0)
        world.step()
    assert "held" not in world.harness.scheduler.requests.alive, "KV is not kept for ever"
    assert world.harness.scheduler.info()["quarantined_tokens"] == len(PROMPT)
    world.submit("b", list(range(20)), 8)
    world.run()
    assert world.harness.tokens("b") == oracle(range(20), 8, ignore_eos=True)


@LOOPS
@pytest.mark.parametrize("linger", [1e-20, 0.03], ids=["at once", "soon"])
def test_memory_that_is_let_go_when_the_wait_fails_is_let_go_once(loop: str, linger: float) -> None:
    world = World(loop, timeout=0.5)
    world.bring("a", drill={"delay": 60.0, "linger": linger})
    world.run()
    assert world.harness.finish("a")["type"] == "abort", "its time ran out"
    assert world.harness.scheduler.counters.finished == 1
    world.bring("b")
    world.run()
    assert world.harness.tokens("b") == oracle(PROMPT, 6, ignore_eos=True)


@LOOPS
@pytest.mark.parametrize("chunk", [None, 5])
def test_a_gate_is_told_where_kv_lies(loop: str, chunk: int | None) -> None:
    """After each chunk, and as long as it holds the request; `World.step` looks what is there."""
    world = World(loop, chunk=chunk, page_size=1)
    world.submit("a", n=1, drill={"hold": 1.0})
    seen = []
    while "a" in world.harness.scheduler.requests.alive:
        world.step()
        seen.append(len(world.gate.places.get("a", ())))
    assert seen[-1] == 0
    assert sorted({*seen}) == ([0, 12] if chunk is None else [0, 5, 10, 12])
    assert world.harness.tokens("a") == oracle(PROMPT, 1)
    world.run()


@LOOPS
def test_a_gate_that_raises_for_one_request_ends_that_one(loop: str) -> None:
    """The others of its step are told, and go on. It is counted as a failure of the gate."""
    world = World(loop)
    told, computed = set(), world.gate.computed

    def raising(req: Req, slots: NDArray[np.int32]) -> None:
        if req.rid == "b":
            raise KeyError("no place")
        told.add(req.rid)
        computed(req, slots)

    vars(world.gate)["computed"] = raising
    for rid in "abc":
        world.submit(rid, drill={})
    world.run()
    reason = world.harness.finish("b")
    assert (reason["status"], reason["code"]) == (500, "gate_failed")
    assert reason["message"] == "the gate 'drill' failed: KeyError: 'no place'"
    assert told == {"a", "c"}
    assert world.failed == [world.gate]
    for rid in "ac":
        assert world.harness.tokens(rid) == oracle(PROMPT, 6, ignore_eos=True)


@LOOPS
def test_a_gate_is_told_when_memory_is_taken(loop: str) -> None:
    world = World(loop, chunk=6)
    world.submit("a", n=20, drill={"hold": 0.5})
    world.until(lambda: len(world.gate.places.get("a", ())) >= 12)
    scheduler = world.harness.scheduler
    if scheduler.loop.in_flight is not None:
        scheduler.settle(scheduler.loop.in_flight)
        scheduler.loop.in_flight = None
        scheduler.running.rewind()
    scheduler.planner.retract(scheduler.running[0])
    assert world.gate.places["a"].shape == (0,)
    world.until(lambda: len(world.gate.places["a"]) >= 12)
    world.run()
    assert world.harness.tokens("a") == oracle(PROMPT, 20, ignore_eos=True)


def test_a_gate_that_holds_for_too_long_has_to_let_go() -> None:
    world = World(hold_timeout=0.5)
    world.submit("a", n=1, drill={"hold": 1000.0})
    world.run()
    assert world.keeper.overdue == 1


class Breaking(DrillGate):
    """Raises where it is told of memory."""

    broken = ""

    def reserved(self, req: Any, reservation: KVReservation) -> None:
        if self.broken == "reserved":
            raise RuntimeError("reserved")
        super().reserved(req, reservation)

    def computed(self, req: Any, slots: Any) -> None:
        if self.broken == "computed":
            raise RuntimeError("computed")
        super().computed(req, slots)


@LOOPS
@pytest.mark.parametrize("where", ["reserved", "computed"])
def test_a_gate_that_raises_fails_its_request_only(loop: str, where: str) -> None:
    world = World(loop)
    world.gate.__class__ = Breaking
    vars(world.gate)["broken"] = where
    if where == "reserved":
        world.bring("bad")
    else:
        world.submit("bad", n=20, drill={})
    world.submit("good", [4, 4, 4])
    world.run()
    assert world.harness.finish("bad")["status"] == 500
    assert world.harness.tokens("good") == oracle([4, 4, 4], 6, ignore_eos=True)


def traffic(loop: str, seed: int, **more: Any) -> World:
    """Requests that are brought, computed, held and aborted at any time, in memory that is too small for them."""
    rng = random.Random(seed)
    world = World(loop, tokens=96, page_size=rng.choice([1, 4]), chunk=rng.choice([None, 8]), **more)
    aborted = set()
    for number in range(60):
        rid, n = f"r{number}", rng.randint(1, 20)
        before: Sequence[int] = ()
        if number and rng.random() < 0.5:
            before = rng.choice(list(world.prompts.values()))
        prompt = [*before, *(rng.randrange(20) for _ in range(rng.randint(1, 30)))][:40]
        kind = rng.random()
        if kind < 0.6:
            token = oracle(prompt, 1, ignore_eos=True)[0] if rng.random() < 0.8 else None
            drill = {"token": token, "delay": rng.random() / 4, "linger": rng.choice([0.0, 0.3])}
            world.bring(rid, prompt, n, drill=drill)
        else:
            world.submit(rid, prompt, n, drill={"hold": 0.2} if kind < 0.8 else None)
        for _ in range(rng.randint(0, 4)):
            world.step()
        if rng.random() < 0.3:
            alive = world.harness.scheduler.requests.alive if rng.random() < 0.5 else {}
            victim = rng.choice(list(alive) or [req.rid for req in world.harness.scheduler.running] or [rid])
            world.harness.scheduler.receive([AbortRequest(rid=victim)])
            aborted.add(victim)
    world.run()
    for rid, asked in world.prompts.items():
        tokens = world.harness.tokens(rid)
        assert tokens == oracle(asked, 20, ignore_eos=True)[: len(tokens)], rid
        assert rid in aborted or world.harness.finish(rid) == {"type": "length"}, rid
    return world


@LOOPS
@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_gets_the_right_tokens(loop: str, seed: int) -> None:
    world = traffic(loop, seed)
    assert len(world.reservations) > 10
    assert world.harness.scheduler.counters.finished == 60


@LOOPS
@pytest.mark.parametrize(
    "more", [{"jump_ahead": 2}, {"work": GrammarWork(WorkLimits(step_seconds=0.0))}], ids=["ahead", "sits"]
)
def test_one_that_is_ended_in_its_commit_does_not_go_on(
    loop: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate fails it when its prompt is computed, and its matcher knows the next tokens, or needs longer."""
    monkeypatch.setattr(ScriptedMatcher, "forced", lambda self: self._grammar.tokens[len(self.taken) :][:3])
    world = World(loop, grammars=True, **more)
    world.gate.__class__ = Breaking
    vars(world.gate)["broken"] = "computed"
    script = "tokens 5 6 9 11 12 13 14 15 16 17"
    world.submit("bad", [1, 2, 3, 4], 12, drill={}, sampling={"grammar": Grammar("regex", script)})
    for number in range(7):
        world.submit(f"other {number}", [4, 4, number], 20)
    world.run()
    assert world.harness.finish("bad")["status"] == 500
    for number in range(7):
        assert world.harness.tokens(f"other {number}") == oracle([4, 4, number], 20, ignore_eos=True)


# ---- mutants ---------------------------------------------------------------------------------------------------------


def broken(monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]) -> bool:
    """Whether traffic notices a change of the product."""
    change(monkeypatch)
    for loop in ("overlap", "normal"):
        for seed in (7, 10, *range(6)):  # the first two notice most
            if noticed(change, partial(traffic, loop, seed)):
                return True
    return False


def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the step is settled that was under way."""
    monkeypatch.setattr(Services, "in_flight", None)


def no_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrillGate, "forget", lambda self, req, forget=DrillGate.forget: forget(self, req) and False)


def not_told_of_retractions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVHandoff, "unplaced", lambda self, req: None)


def shared_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has ended before it was through goes to the cache."""
    release = MemoryManager.release

    def keeps(self: Any, req: Any, *, keep: bool = True) -> None:
        if req.blocked_by and req.kv.row != NO_ROW:
            req.kv.committed_len, keep = req.input_len, True
        release(self, req, keep=keep)

    monkeypatch.setattr(MemoryManager, "release", keeps)


@pytest.mark.parametrize("change", [told_at_once, no_quarantine, not_told_of_retractions, shared_before_it_is_there])
def test_broken_hand_overs_are_noticed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    assert broken(monkeypatch, change)


class Spoken(DrillGate):
    """Others speak to it, whether there are requests or not."""

    busy = True

    def __init__(self, options: DrillGateOptions, ctx: AdmissionGateContext) -> None:
        super().__init__(options, ctx)
        self.asked = 0

    def released(self) -> Any:
        self.asked += 1
        return super().released()


def test_a_gate_that_others_speak_to_is_asked_while_nothing_is_here() -> None:
    clock = ManualClock()
    gate = Spoken(DrillGateOptions(), AdmissionGateContext(clock))
    harness = Harness(parts={"gates": GateKeeper([("drill", gate)], clock), "clock": clock})
    for _ in range(3):
        harness.step()
    assert gate.asked == 3
    assert harness.scheduler.idle
    assert harness.scheduler.busy
    assert not Harness().scheduler.busy
