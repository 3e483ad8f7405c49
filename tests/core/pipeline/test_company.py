"""All features of the scheduler in each other's company: seats, holds, grammars that sit out or jump ahead, drafts,
split and mixed prefills, little memory, pauses, aborts, and forward passes that fail. Each request has its end, once,
and no token that is not its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pegboard.conformance.grammar_fakes import ScriptedMatcher
from pegboard.core.engine.operation import Operation, RequestLog
from pegboard.core.interfaces.grammar import Grammar
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.pipeline.grammar.work import GrammarWork, WorkLimits
from pegboard.core.pipeline.memory import MemoryManager
from pegboard.core.pipeline.planner import Planner
from pegboard.core.pipeline.running import RunningBatch
from pegboard_drills.gate import DrillGate
from tests.core.pipeline.grammar.test_state import tokens_of
from tests.core.pipeline.harness import Seer, oracle
from tests.core.pipeline.test_seats import World

REQUESTS = 40
PATIENCE = 60.0


def forced(self: ScriptedMatcher) -> Sequence[int]:
    """Some scripts tell their next tokens ahead."""
    script = self._grammar.tokens
    return script[len(self.taken) : len(self.taken) + 4] if script and script[0] % 2 else ()


def arrangement(rng: random.Random) -> dict[str, Any]:
    page_size = rng.choice([1, 4])
    more: dict[str, Any] = {
        "tokens": rng.choice([64, 96, 160]),
        "page_size": page_size,
        "chunk": rng.choice([None, 8]),
        "cache": rng.choice(["radix", "none", "block" if page_size == 4 else "radix"]),
        "policy": rng.choice(["fcfs", "priority"]),
        "new_token_ratio": rng.choice([0.1, 0.7]),
        "prefill_first": rng.random() < 0.3,
        "jump_ahead": rng.choice([0, 2]),
        "work": GrammarWork(WorkLimits(step_seconds=rng.choice([0.0, 1e-5, 60]), seconds=100)),
        **rng.choice([{}, {"split_prefill_layers": 2}, {"mixed_chunk": True}]),
    }
    if rng.random() < 0.5:
        more["speculator"] = Seer(rng.random(), rng.choice(["chain", "tree"]))
    return more


class Company:
    """A world whose requests, accidents and operator are drawn from a seed; the clock says which grammars sit out."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        limits = {"timeout": rng.choice([None, 0.5]), "hold_timeout": rng.choice([None, 0.4])}
        self.world = World(rng.choice(["normal", "overlap"]), grammars=True, **limits, **arrangement(rng))
        self.scheduler = self.world.harness.scheduler
        self.operator = Operation(self.scheduler, RequestLog(on=False))
        self.scripts: dict[str, list[int]] = {}
        failing = rng.choice([0.0, 0.0, 0.03])
        self.world.harness.model.fail_on = lambda work: rng.random() < failing

    def step(self) -> None:
        # Not `World.step`: what a gate follows may be undefined where a pass has failed.
        self.world.harness.step()
        self.world.clock.advance(0.02)
        if self.scheduler.resting:
            time.sleep(0.0005)  # the thread with the matchers has its turn

    def post(self, number: int) -> None:
        rng, world, rid = self.rng, self.world, f"r{number}"
        before: Sequence[int] = rng.choice(list(world.prompts.values())) if number and rng.random() < 0.5 else ()
        prompt = [*before, *(rng.randrange(20) for _ in range(rng.randint(1, 30)))][:40]
        more: dict[str, Any] = {"priority": rng.randrange(3)}
        if rng.random() < 0.4:
            script = self.scripts[rid] = tokens_of(rng.randrange(50), rng.randint(1, 15))
            more["sampling"] = {"grammar": Grammar("regex", f"tokens {' '.join(map(str, script))}")}
        kind, n = rng.random(), rng.randint(1, 20)
        if kind < 0.45:
            token = self.answer(rid, prompt)[0] if rng.random() < 0.8 else None
            drill = {"token": token, "delay": rng.random() / 4, "linger": rng.choice([0.0, 1e-20, 0.3])}
            world.bring(rid, prompt, n, drill=drill, **more)
        else:
            world.submit(rid, prompt, n, drill={"hold": 0.2} if kind < 0.7 else None, **more)

    def disturb(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        if rng.random() < 0.25 and scheduler.requests.alive:
            scheduler.receive([AbortRequest(rid=rng.choice(list(scheduler.requests.alive)))])
        if rng.random() < 0.04:
            self.operator.pause({"mode": rng.choice(["retract", "in_place"])})
            for _ in range(3):
                self.step()
            self.operator.go_on({})
        if rng.random() < 0.01:
            scheduler.receive([AbortRequest(all_requests=True)])

    def answer(self, rid: str, prompt: Sequence[int]) -> list[int]:
        return self.scripts.get(rid) or oracle(prompt, 20, ignore_eos=True)

    def run(self) -> None:
        for number in range(REQUESTS):
            self.post(number)
            for _ in range(self.rng.randint(0, 5)):
                self.step()
            self.disturb()
        until = time.monotonic() + PATIENCE
        while not self.scheduler.idle:
            assert time.monotonic() < until, f"it hangs: {self.scheduler.requests.alive}, {self.scheduler.info()}"
            self.step()
        self.check()

    def check(self) -> None:
        planner, world = self.scheduler.planner, self.world
        world.harness.run(1)
        left = [planner.running.reqs, planner.parked, planner.seated, planner.chunked]
        assert not any(left), left
        assert not world.keeper, "a gate thinks that it has requests"
        assert (world.keeper.blocked, world.keeper.held, world.keeper.failures) == (0, 0, 0)
        assert self.scheduler.counters.finished == REQUESTS
        for rid, prompt in world.prompts.items():
            message = world.harness.finish(rid).get("message") or ""
            assert "first parts" not in message, "it is told of what had failed before"
            tokens = world.harness.tokens(rid)
            assert tokens == self.answer(rid, prompt)[: len(tokens)], rid


def play(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedMatcher, "forced", forced)
    Company(seed).run()


@pytest.mark.parametrize("seed", range(30))
def test_all_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play(seed, monkeypatch)


@pytest.mark.full
def test_a_hundred_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100, 200):
        play(seed, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_thousand_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000, 6000):
        play(seed, monkeypatch)


# ---- mutants ---------------------------------------------------------------------------------------------------------


def gives_seats_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """While they are still written to."""
    cancel = DrillGate.cancel
    monkeypatch.setattr(DrillGate, "cancel", lambda self, req: cancel(self, req) and False)


def goes_on_with_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was retracted while its matcher worked comes back as if it ran."""
    monkeypatch.setattr(Planner, "resume", lambda self, req: self.running.join([req]))


def computes_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several tokens that have become known."""
    take = RunningBatch._take

    def newest(self: RunningBatch, place: int, req: Req, coming: int = 0) -> None:
        take(self, place, req, coming)
        self._ints[-1, place] = 1

    monkeypatch.setattr(RunningBatch, "_take", newest)


def has_room_for_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several tokens that have become known."""
    extend = MemoryManager.extend_running

    def one(self: MemoryManager, running: RunningBatch) -> bool:
        uneven, running.uneven = running.uneven, False
        found = extend(self, running)
        running.uneven = uneven
        return found

    monkeypatch.setattr(MemoryManager, "extend_running", one)


@pytest.mark.full
@pytest.mark.parametrize(
    "change", [gives_seats_away, goes_on_with_the_dead, computes_the_newest, has_room_for_the_newest]
)
def test_broken_company_is_noticed(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    monkeypatch.setitem(globals(), "PATIENCE", 5.0)  # a hang is noticed, too
    for seed in range(400):
        try:
            play(seed, monkeypatch)
        except (Exception, pytest.fail.Exception):
            return
    pytest.fail("nothing is noticed")
