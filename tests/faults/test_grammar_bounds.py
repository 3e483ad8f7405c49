"""What one client's grammars may cost the others: an expensive one slows down itself, and not for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pegboard.conformance.admission_gate import ManualClock
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.api import CompiledGrammar, GrammarMatcher
from pegboard.plugins.grammar.work import PAY_BACK, GrammarWork, WorkLimits
from pegboard_drills.grammars import ScriptedGrammar, ScriptedMatcher
from tests.core.pipeline.harness import EOS, Harness, oracle
from tests.plugins.grammar.test_state import ARRANGEMENTS, Gate, constrained, harness, make_gate, tokens_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

pytestmark = pytest.mark.timeout(120)

PATIENCE = 30.0
ALL_SIT_OUT = WorkLimits(step_seconds=0)


class Panic(BaseException):
    """As libraries in Rust raise it: no Exception."""


class Matcher(ScriptedMatcher):
    """Its masks cost as much as a test lets them: from the second token on each waits for `go`."""

    def __init__(self, grammar: ScriptedGrammar, drill: Drill) -> None:
        super().__init__(grammar)
        self._drill = drill

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        if self.taken and self._drill.held:
            self._drill.entered.set()
            assert self._drill.go.wait(PATIENCE)
        if self.taken and self._drill.panics:
            self._drill.panics -= 1
            raise Panic("as asked")
        in_loop = threading.current_thread() is threading.main_thread()
        if self.taken and self._drill.spins(self):
            end = time.thread_time() + self._drill.spin
            while time.thread_time() < end:
                pass
            self._drill.spun_in_loop += in_loop
        self._drill.in_loop += bool(self.taken) and in_loop
        return super().fill(mask, row)


class Drill:
    """What becomes of the matchers of a test."""

    def __init__(self) -> None:
        self.gates: list[Gate] = []
        self.held = False
        self.panics = 0
        """So many masks raise what is not an Exception."""
        self.spin = 0.0
        """Seconds that each mask takes but for first ones, or only the one behind `spin_at` tokens."""
        self.spin_at = 0
        self.spin_for = 100
        """Only so many matchers do."""
        self._spinning: set[Matcher] = set()
        self.in_loop = self.spun_in_loop = 0
        """Masks that were found in the loop's thread, but for first ones; and those of them that took long."""
        self.go, self.entered = threading.Event(), threading.Event()

    def spins(self, matcher: Matcher) -> bool:
        if not self.spin or self.spin_at not in (0, len(matcher.taken)):
            return False
        if len(self._spinning) < self.spin_for:
            self._spinning.add(matcher)
        return matcher in self._spinning


class DrillGrammar(ScriptedGrammar):
    def __init__(self, tokens: list[int], drill: Drill) -> None:
        super().__init__(tokens, eos=EOS)
        self._drill = drill

    def matcher(self) -> GrammarMatcher:
        return Matcher(self, self._drill)


class DrillGate(Gate):
    """Compiles ``drill 5 6`` to a grammar of these tokens whose matchers do as the drill says."""

    drill: Drill

    def _settle(self, grammar: Grammar) -> Any:
        found = super()._settle(grammar)
        word, _, rest = grammar.source.partition(" ")
        if word == "drill" and isinstance(found, CompiledGrammar):
            found = self.grammars.prepare(DrillGrammar([int(token) for token in rest.split()], self.drill))
            found.worst = None
            self.cache.put(grammar, found)
        return found


@pytest.fixture
def drill() -> Iterator[Drill]:
    drill = Drill()
    yield drill
    drill.go.set()


@pytest.fixture
def make(drill: Drill) -> Iterator[Callable[..., Harness]]:
    def one(limits: WorkLimits | None = None, **arrangement: Any) -> Harness:
        gate = make_gate(cls=DrillGate, work=GrammarWork(limits))
        gate.drill = drill  # type: ignore[attr-defined]
        drill.gates.append(gate)
        return harness(gate, **arrangement)

    yield one
    drill.go.set()
    for gate in drill.gates:
        gate.close()


def drilled(tokens: list[int]) -> dict[str, Any]:
    return {"grammar": Grammar("regex", f"drill {' '.join(map(str, tokens))}")}


def waits(made: Harness) -> int:
    return int(str(made.scheduler.info()["grammar_waits"]))


def run(made: Harness, done: Callable[[], bool] | None = None) -> None:
    """Until idle, or until something is so. While all requests sit out a step waits a moment, as the loop does."""
    deadline = time.monotonic() + PATIENCE
    while not (made.scheduler.idle if done is None else done()):
        assert time.monotonic() < deadline, made.scheduler.info()
        made.step()
        if made.scheduler.resting:
            time.sleep(0.001)
    if done is None:
        assert made.memory.idle_error() is None


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_outputs_are_the_same_when_requests_sit_out(make: Callable[..., Harness], arrangement: str, loop: str) -> None:
    """With no time for matchers in a step at all, every request with a grammar sits out after every token."""
    made = make(ALL_SIT_OUT, loop=loop, **ARRANGEMENTS[arrangement])
    prompts = {f"r{i}": [(i * 7 + j) % 200 for j in range(3 + i % 9)] for i in range(12)}
    wanted = {}
    for i, (rid, prompt) in enumerate(prompts.items()):
        if i % 3 == 2:
            wanted[rid] = oracle(prompt, 12)
            made.submit(rid, prompt, 12, stream=i % 2 == 0)
        else:
            wanted[rid] = tokens_of(i, 14 + i)
            limit = 14 + i if i % 3 else 40
            made.submit(rid, prompt, limit, stream=i % 2 == 0, sampling=constrained(wanted[rid]))
        if i % 4 == 3:
            made.step()
    run(made)
    assert {rid: made.tokens(rid) for rid in prompts} == wanted
    assert all(made.finish(rid)["type"] == "stop" for i, rid in enumerate(prompts) if i % 3 != 2)
    assert waits(made) > 50


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_others_go_on_while_a_mask_takes_for_ever(make: Callable[..., Harness], drill: Drill, loop: str) -> None:
    """It takes so long that it is not done before all the others are, whatever they want."""
    made = make(ALL_SIT_OUT, loop=loop)
    made.submit("warm", [9], 20, sampling=constrained([5, 6]))
    run(made)
    drill.held = True
    for i in range(4):
        made.submit(f"slow{i}", [1, 2, i], 20, stream=True, sampling=drilled([5, 6, 8, 9]))
    run(made, drill.entered.is_set)
    for i in range(6):
        made.submit(f"free{i}", [3, i], 30)
    run(made, lambda: all(f"free{i}" in made.outputs for i in range(6)))
    for i in range(6):
        assert made.tokens(f"free{i}") == oracle([3, i], 30)
    assert [made.tokens(f"slow{i}") for i in range(4)] == [[5]] * 4, "they have sent what is known"
    made.scheduler.receive([AbortRequest(rid="slow1")])
    drill.go.set()
    run(made)
    assert [made.tokens(f"slow{i}") for i in (0, 2, 3)] == [[5, 6, 8, 9]] * 3
    assert made.finish("slow1")["status"] == 499


@pytest.mark.parametrize(
    ("what", "arrangement"),
    [
        ("rows", {"max_running_requests": 4}),
        ("memory", {"tokens": 64, "page_size": 4, "max_context_len": 48}),
        ("memory of a running one", {"tokens": 32, "page_size": 4, "cache": "none"}),
    ],
)
def test_one_that_sits_out_gives_way(
    make: Callable[..., Harness], drill: Drill, what: str, arrangement: dict[str, Any]
) -> None:
    made = make(ALL_SIT_OUT, **arrangement)
    drill.held = True
    prompts = {f"slow{i}": [20 + i] * (3 if what != "memory" else 12) for i in range(4)}
    for rid, prompt in prompts.items():
        made.submit(rid, prompt, 8, sampling=drilled([5, 6, 8]))
    run(made, lambda: len(made.scheduler.planner.parked) == 4)
    made.submit("free", [4] * 12, 16, sampling={"ignore_eos": True})
    run(made, lambda: "free" in made.outputs)
    assert made.tokens("free") == oracle([4] * 12, 16, ignore_eos=True)
    assert made.scheduler.counters.retractions > 0
    drill.go.set()
    run(made)
    assert [made.tokens(rid) for rid in prompts] == [[5, 6, 8]] * 4


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_the_loop_rests_while_others_wait_for_one_that_sits_out(
    make: Callable[..., Harness], drill: Drill, loop: str
) -> None:
    """Spinning, it would have the interpreter that the thread beside it needs."""
    made = make(ALL_SIT_OUT, loop=loop, max_running_requests=1)
    made.scheduler.planner.clock = ManualClock()
    drill.held = True
    made.submit("slow", [1, 2], 20, sampling=drilled([5, 6, 8]))
    run(made, drill.entered.is_set)
    made.submit("waits", [3], 4)
    for _ in range(3):
        made.step()
        assert made.scheduler.resting
    assert len(made.scheduler.waiting) == 1
    drill.go.set()
    run(made)
    assert made.tokens("waits") == oracle([3], 4)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_memory_that_they_grow_into_is_not_given_away(
    make: Callable[..., Harness], drill: Drill, ignore_eos: bool
) -> None:
    """Otherwise those who do not sit out would be retracted for it, and be silent for as long as it is short."""
    made = make(ALL_SIT_OUT, tokens=96, page_size=4, new_token_ratio=1.0)
    made.scheduler.planner.clock = ManualClock()  # nothing sits out for so long that it gives way
    drill.held = True
    for i in range(2):
        made.submit(f"slow{i}", [1, 2, i], 28, sampling=drilled(tokens_of(i, 28)))
    run(made, lambda: len(made.scheduler.planner.parked) == 2)
    for i in range(6):
        made.submit(f"free{i}", [3, i], 20, sampling={"ignore_eos": ignore_eos})
    run(made, lambda: len(made.outputs) >= 2)
    drill.go.set()
    run(made)
    assert [made.tokens(f"slow{i}") for i in range(2)] == [tokens_of(i, 28) for i in range(2)]
    assert made.scheduler.counters.retractions == 0


def test_a_step_has_so_much_time_for_all_matchers(make: Callable[..., Harness], drill: Drill) -> None:
    """Matchers of 4 ms each, in steps that have 10: only some go on in the loop, and what they took counts."""
    made = make(WorkLimits(step_seconds=0.01))
    drill.spin = 0.004
    for i in range(8):
        made.submit(f"r{i}", [1, i], 40, sampling=drilled(tokens_of(i, 12)))
    in_loop = []
    while not made.scheduler.idle:
        before = drill.in_loop
        made.step()
        in_loop.append(drill.in_loop - before)
        if made.scheduler.resting:
            time.sleep(0.001)
    assert [made.tokens(f"r{i}") for i in range(8)] == [tokens_of(i, 12) for i in range(8)]
    assert waits(made) > 8
    assert 0 < max(in_loop) <= 3, "the time is over behind the third"


@pytest.mark.parametrize("limits", [ALL_SIT_OUT, WorkLimits(step_seconds=5)], ids=["in the thread", "in the loop"])
def test_a_panic_is_one_requests_affair(make: Callable[..., Harness], drill: Drill, limits: WorkLimits) -> None:
    made = make(limits)
    made.submit("warm", [1], 40, sampling=drilled([5, 6, 8]))
    run(made)
    drill.panics = 1
    made.submit("a", [2], 40, sampling=drilled([5, 6, 8]))
    run(made)
    made.submit("b", [3], 40, sampling=drilled([5, 6, 8]))
    run(made)
    reason = made.finish("a")
    assert (reason["type"], reason["status"], reason["code"]) == ("abort", 500, "grammar_failed")
    assert made.tokens("b") == [5, 6, 8]


class TestTheFirstTime:
    """What a matcher is going to take is not known before it has gone on by a token."""

    def test_a_new_grammar_never_holds_up_the_loop(self, make: Callable[..., Harness], drill: Drill) -> None:
        """Each is slow from its second token on. One after the other, so that none knows of another."""
        made = make(WorkLimits(step_seconds=0.01))
        drill.spin = 0.05
        for i in range(6):
            made.submit(f"r{i}", [1, i], 40, sampling=drilled(tokens_of(i, 3)))
            run(made)
        assert [made.tokens(f"r{i}") for i in range(6)] == [tokens_of(i, 3) for i in range(6)]
        assert drill.in_loop == 0

    def test_one_that_is_known_to_be_cheap_never_sits_out(self, make: Callable[..., Harness]) -> None:
        made = make(WorkLimits(step_seconds=5))
        for i in range(6):
            made.submit(f"r{i}", [1, i], 40, sampling=drilled(tokens_of(1, 12)))
            run(made)
        assert waits(made) == 1, "the very first time"

    @pytest.mark.parametrize("at_once", [False, True])
    def test_surprises_are_paid_back(self, make: Callable[..., Harness], drill: Drill, at_once: bool) -> None:
        """Cheap at first, so that each begins in the loop, and slow at its fourth token; each grammar is a new one."""
        made = make(WorkLimits(step_seconds=0.01))
        drill.spin, drill.spin_at = 0.1, 4
        began = time.monotonic()
        for i in range(8):
            made.submit(f"r{i}", [1, i], 40, sampling=drilled(tokens_of(i, 8)), principal="a")
            if not at_once:
                run(made)
        run(made)
        took = time.monotonic() - began
        assert [made.tokens(f"r{i}") for i in range(8)] == [tokens_of(i, 8) for i in range(8)]
        assert drill.spun_in_loop <= 1 + took / (PAY_BACK * 0.09), "each keeps the loop free for twenty times as long"

    def test_one_owners_surprises_are_not_anothers(self, make: Callable[..., Harness], drill: Drill) -> None:
        made = make(WorkLimits(step_seconds=0.5))
        for owner in ("a", "b"):
            made.submit(f"warm {owner}", [1], 40, sampling=drilled([9, 10]), principal=owner)
        run(made)
        before = waits(made)
        drill.gates[-1].grammars.work._debts["a"] = time.monotonic() + PATIENCE
        made.submit("yours", [2], 40, sampling=drilled([9, 10]), principal="b")
        run(made)
        assert waits(made) == before
        made.submit("mine", [1], 40, sampling=drilled([9, 10]), principal="a")
        run(made)
        assert waits(made) == before + 2


class TestAccounts:
    def test_answers_with_one_grammar_and_owner_share_one(self, make: Callable[..., Harness], drill: Drill) -> None:
        made = make(WorkLimits(seconds=0.03, token_seconds=0.001))
        drill.spin = 0.005
        for i in range(4):
            made.submit(f"mine{i}", [1, i], 40, sampling=drilled(tokens_of(1, 30)), principal="a")
        made.submit("free", [3], 20)
        run(made)
        for i in range(4):
            reason = made.finish(f"mine{i}")
            assert (reason["type"], reason["status"], reason["code"]) == ("abort", 400, "grammar_too_complex")
        assert sum(len(made.tokens(f"mine{i}")) for i in range(4)) < 24, "together they had 30 ms"
        assert made.tokens("free") == oracle([3], 20)

    def test_one_that_costs_little_does_not_pay_for_the_others(
        self, make: Callable[..., Harness], drill: Drill
    ) -> None:
        """Without keys, strangers with one public schema share an account. Here only one of them is slow."""
        made = make(WorkLimits(step_seconds=0, seconds=0.1, token_seconds=0.001))
        drill.spin, drill.spin_at, drill.spin_for = 0.3, 2, 1
        tokens = tokens_of(1, 30)
        for i in range(3):
            made.submit(f"r{i}", [1, i], 40, sampling=drilled(tokens))
        run(made)
        assert sorted(made.finish(f"r{i}")["type"] for i in range(3)) == ["abort", "stop", "stop"]

    def test_another_owner_has_another_and_later_requests_a_new_one(
        self, make: Callable[..., Harness], drill: Drill
    ) -> None:
        made = make(WorkLimits(seconds=0.15, token_seconds=0))
        drill.spin = 0.02
        tokens = tokens_of(1, 4)
        for i in range(4):
            made.submit(f"r{i}", [1, i], 40, sampling=drilled(tokens), principal=f"owner {i}")
        run(made)
        made.submit("again", [1, 2], 40, sampling=drilled(tokens), principal="owner 1")
        run(made)
        assert [made.tokens(rid) for rid in ("r0", "r1", "r2", "r3", "again")] == [tokens] * 5
