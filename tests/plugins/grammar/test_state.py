"""Grammars in the pipeline: whatever the scheduler does with a request, its output follows its own grammar."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from pegboard.conformance.admission_gate import AdmissionGateContract, ManualClock, gated_request
from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import AbortRequest, Accepted, Rejected
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.plugins.grammar.api import CompiledGrammar, GrammarMatcher
from pegboard.plugins.grammar.constraint import Grammars, state_of
from pegboard.plugins.grammar.gate import CacheLimits, GrammarGate
from pegboard.plugins.grammar.stage import KINDS, GrammarStage
from pegboard.plugins.grammar.state import Prepared
from pegboard.plugins.grammar.work import GrammarWork, WorkLimits
from pegboard_drills.grammars import ScriptedGrammar
from tests.core.pipeline.harness import EOS, VOCAB, Harness, oracle


class ManualPool:
    """Compiles when it is told to, or at once with `eager`."""

    def __init__(self, *, eager: bool = True, most: int = 100) -> None:
        self.jobs: dict[Grammar, Future[CompiledGrammar]] = {}
        self.submitted: list[Grammar] = []
        self.eager = eager
        self.most = most
        self.killed = 0
        self.closed = False

    @property
    def open(self) -> int:
        return len(self.jobs)

    @property
    def full(self) -> bool:
        return self.open >= self.most

    def make_room(self, owner: str) -> bool:
        return False

    def submit(self, grammar: Grammar, owner: str = "") -> Future[CompiledGrammar]:
        self.submitted.append(grammar)
        self.jobs[grammar] = future = Future()  # type: ignore[var-annotated]
        if self.eager:
            self.finish(grammar)
        return future

    def finish(self, grammar: Grammar, error: Exception | None = None) -> None:
        future = self.jobs.pop(grammar)
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
            return
        word, _, rest = grammar.source.partition(" ")
        tokens = [int(token) for token in rest.split()] if word == "tokens" else [5, 6]
        trap = rest if word == "trap" else ""
        future.set_result(ScriptedGrammar(tokens, trap=trap, free=word == "free", eos=EOS))

    def close(self) -> None:
        self.closed = True


class KnownGrammars(Grammars):
    """None is new, so that none sits out for it."""

    def prepare(self, compiled: CompiledGrammar) -> Prepared:
        prepared = super().prepare(compiled)
        prepared.worst = 0.0
        return prepared


class Gate(GrammarGate):
    """A grammar gate with a pool that a test drives."""

    known: type[Grammars] = KnownGrammars

    def __init__(
        self,
        options: Any,
        ctx: AdmissionGateContext,
        limits: CacheLimits | None = None,
        work: GrammarWork | None = None,
        jump_ahead: int = 0,
    ) -> None:
        self.manual = ManualPool()
        grammars = self.known(VOCAB, frozenset({EOS}), work, jump_ahead, rolls_back=True)
        super().__init__(options, ctx, pool=self.manual, grammars=grammars, limits=limits)  # type: ignore[arg-type]


def make_gate(
    clock: ManualClock | None = None,
    *,
    eager: bool = True,
    cls: type[Gate] = Gate,
    work: GrammarWork | None = None,
    jump_ahead: int = 0,
    **limits: int,
) -> Gate:
    # On a busy machine too, no request sits out.
    work = work or GrammarWork(WorkLimits(step_seconds=60))
    ctx = AdmissionGateContext(clock or ManualClock())
    gate = cls(GrammarGate.make_options(), ctx, CacheLimits(**limits), work, jump_ahead)
    gate.manual.eager = eager
    return gate


def stage_of(gate: Gate) -> GrammarStage:
    stage = GrammarStage(lambda ctx: (gate, KINDS))
    stage.gate(gate.ctx)
    return stage


def harness(
    gate: Gate | None = None, *, work: GrammarWork | None = None, jump_ahead: int = 0, **arrangement: Any
) -> Harness:
    gate = gate or make_gate(work=work, jump_ahead=jump_ahead)
    keeper = GateKeeper([("grammar", gate)], ManualClock())
    return Harness(parts={"gates": keeper}, joining=[stage_of(gate)], **arrangement)


def tokens_of(number: int, n: int) -> list[int]:
    """A script of its own for each request, without the token that ends."""
    rng = random.Random(number)
    return [rng.choice([token for token in range(VOCAB) if token != EOS]) for _ in range(n)]


def constrained(tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"grammar": Grammar("regex", f"tokens {' '.join(map(str, tokens))}"), **more}


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunk": 5},
    "pages": {"page_size": 4, "chunk": 8},
    "mixed": {"chunk": 5, "mixed_chunk": True},
    "split": {"split_prefill_layers": 2},
    "prefill first": {"prefill_first": True},
    "little memory": {"tokens": 96, "page_size": 4, "new_token_ratio": 0.1},
    "block cache": {"cache": "block", "page_size": 4},
}


@dataclass(slots=True)
class PlainGrammar(CompiledGrammar):
    """Neither hashable nor weakly referenceable, as plain dataclasses are not."""

    tokens: list[int]

    @property
    def size_bytes(self) -> int:
        return 1

    def matcher(self) -> GrammarMatcher:
        return ScriptedGrammar(self.tokens, eos=EOS).matcher()


def test_nothing_is_asked_of_a_compiled_grammar_but_its_contract() -> None:
    gate = make_gate(eager=False)
    made = harness(gate)
    for rid in ("a", "b"):
        made.submit(rid, [1, 2], 8, sampling=constrained([5, 6]))
    (future,) = gate.manual.jobs.values()
    gate.manual.jobs.clear()
    future.set_result(PlainGrammar([5, 6]))
    made.run()
    assert [made.tokens(rid) for rid in ("a", "b")] == [[5, 6], [5, 6]]


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
class TestOutputs:
    def test_each_follows_its_own_grammar_and_nobody_elses(self, arrangement: str, loop: str) -> None:
        made = harness(loop=loop, **ARRANGEMENTS[arrangement])
        prompts = {f"r{i}": [(i * 7 + j) % VOCAB for j in range(3 + i % 9)] for i in range(12)}
        wanted = {}
        for i, (rid, prompt) in enumerate(prompts.items()):
            if i % 3 == 2:
                wanted[rid] = oracle(prompt, 12)
                made.submit(rid, prompt, 12, stream=i % 2 == 0)
            else:
                wanted[rid] = tokens_of(i, 14 + i)
                made.submit(rid, prompt, 40, stream=i % 2 == 0, sampling=constrained(wanted[rid]))
            if i % 4 == 3:
                made.step()
        made.run()
        assert {rid: made.tokens(rid) for rid in prompts} == wanted
        assert all(made.finish(rid)["type"] == "stop" for i, rid in enumerate(prompts) if i % 3 != 2)
        if arrangement == "little memory":
            assert made.scheduler.counters.retractions > 0, "nobody was retracted, so nothing was shown"

    def test_a_batch_that_failed_is_run_again_without_going_on_twice(self, arrangement: str, loop: str) -> None:
        made = harness(loop=loop, **ARRANGEMENTS[arrangement])
        wanted = {f"r{i}": tokens_of(i, 8) for i in range(5)}
        for i, (rid, tokens) in enumerate(wanted.items()):
            made.submit(rid, [i, i + 1, i + 2], 20, sampling=constrained(tokens))
        fails = iter([False, True, False, False, True] + [False] * 3 + [True])
        # One that is alone in a batch that fails is to blame, so only batches of several do.
        made.model.fail_on = lambda work: len(work.rows) > 1 and next(fails, False)
        made.run()
        assert made.scheduler.counters.failed_batches > 0
        assert {rid: made.tokens(rid) for rid in wanted} == wanted


@pytest.mark.parametrize("loop", ["normal", "overlap"])
class TestEnds:
    def run(self, loop: str, n: int = 20, stream: bool = False, **sampling: Any) -> Harness:
        made = harness(loop=loop)
        made.submit("a", [1, 2, 3], n, stream=stream, sampling=sampling)
        made.submit("other", [4, 5, 6], 6)
        made.run()
        assert made.tokens("other") == oracle([4, 5, 6], 6)
        return made

    def test_what_is_complete_ends_whatever_else_is_wanted(self, loop: str) -> None:
        made = self.run(loop, **constrained([5, 6], ignore_eos=True, min_new_tokens=10))
        assert made.tokens("a") == [5, 6]
        assert made.finish("a") == {"type": "stop"}

    def test_the_limit_may_come_first(self, loop: str) -> None:
        made = self.run(loop, n=2, **constrained([5, 6, 8]))
        assert made.tokens("a") == [5, 6]
        assert made.finish("a") == {"type": "length"}

    def test_complete_at_the_limit_is_complete(self, loop: str) -> None:
        assert self.run(loop, n=2, **constrained([5, 6])).finish("a") == {"type": "stop"}

    def test_an_empty_grammar_ends_with_the_token_that_ends(self, loop: str) -> None:
        made = self.run(loop, grammar=Grammar("regex", "tokens "))
        assert made.tokens("a") == [EOS]
        assert made.finish("a")["type"] == "stop"

    def test_a_stop_token_ends_where_the_grammar_may(self, loop: str) -> None:
        """Where only the token that ends could come, a stop token may as well; the model's hash decides which."""
        seen = set()
        for stop in (3, 60):
            made = self.run(loop, grammar=Grammar("regex", "tokens "), stop_token_ids=(stop,))
            seen.add(tuple(made.tokens("a")) == (EOS,))
            assert made.finish("a")["matched"] == made.tokens("a")[0]
        assert seen == {True, False}

    def test_a_stop_token_within_the_grammar_ends_it(self, loop: str) -> None:
        made = self.run(loop, **constrained([5, 6, 8], stop_token_ids=(6,)))
        assert made.tokens("a") == [5, 6]
        assert made.finish("a") == {"type": "stop", "matched": 6}

    def test_where_anything_goes_nothing_is_masked_but_an_end_that_is_ignored(self, loop: str) -> None:
        made = self.run(loop, n=12, grammar=Grammar("regex", "free"))
        assert made.tokens("a") == oracle([1, 2, 3], 12)
        made = self.run(loop, n=200, grammar=Grammar("regex", "free"), ignore_eos=True)
        assert len(made.tokens("a")) == 200
        assert EOS not in made.tokens("a")

    @pytest.mark.parametrize("trap", ["matcher", "fill", "accept", "empty"])
    def test_a_backend_that_raises_fails_one_request(self, loop: str, trap: str) -> None:
        made = self.run(loop, grammar=Grammar("regex", f"trap {trap}")) if trap != "matcher" else harness(loop=loop)
        if trap == "matcher":
            reply = made.submit("a", [1], sampling={"grammar": Grammar("regex", "trap matcher")})
            assert isinstance(reply, Accepted)
            made.run()
        reason = made.finish("a")
        assert (reason["type"], reason["status"], reason["code"]) == ("abort", 500, "grammar_failed")

    def test_a_grammar_that_gets_too_complex_is_the_clients(self, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fill(*_: object) -> bool:
            raise InvalidRequest("too complex", code="grammar_too_complex")

        made = harness(loop=loop)
        made.submit("a", [1, 2], sampling=constrained([5, 6, 8]))
        made.step()
        monkeypatch.setattr("pegboard_drills.grammars.ScriptedMatcher.fill", fill)
        made.run()
        reason = made.finish("a")
        assert (reason["type"], reason["status"], reason["code"]) == ("abort", 400, "grammar_too_complex")

    def test_a_matcher_that_takes_too_long_ends_its_request(self, loop: str) -> None:
        made = harness(loop=loop, work=GrammarWork(WorkLimits(seconds=0, token_seconds=0)))
        made.submit("a", [1, 2], 20, sampling=constrained(tokens_of(1, 10)))
        made.submit("b", [3, 4], 4)
        made.run()
        reason = made.finish("a")
        assert (reason["type"], reason["status"], reason["code"]) == ("abort", 400, "grammar_too_complex")
        assert made.tokens("b") == oracle([3, 4], 4)

    def test_a_runner_that_ignores_the_mask_is_found_out(self, loop: str) -> None:
        made = harness(loop=loop)
        answer = made.model.answer

        def without_mask(work: ModelWorkerBatch) -> Any:
            if work.sampling is not None:
                work.sampling.mask = None
            return answer(work)

        made.model.answer = without_mask  # type: ignore[method-assign]
        made.submit("a", [1, 2, 3], sampling=constrained(tokens_of(1, 30)))
        made.run()
        assert made.finish("a")["code"] == "grammar_failed"


class TestGate(AdmissionGateContract):
    """The suite of gates on this one: it is blocked until its pool has compiled."""

    factory = Gate
    provides = frozenset[str]()
    options_model = type(GrammarGate.make_options())
    params = ()

    def blocked_request(self, gate: Any) -> Req:
        gate.manual.eager = False
        return grammar_request(Grammar("regex", f"tokens {len(gate.manual.submitted) + 8}"))

    def clear(self, gate: Any, clock: ManualClock, req: Req) -> None:
        gate.manual.finish(req.sampling.grammar)


def grammar_request(grammar: Grammar | None, rid: str = "") -> Req:
    return gated_request(rid=rid, sampling=SamplingParams(max_new_tokens=4, grammar=grammar))


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


class TestCaching:
    def test_a_known_grammar_opens_at_once(self) -> None:
        gate = make_gate()
        first, second = grammar_request(regex("tokens 5")), grammar_request(regex("tokens 5"))
        assert gate.enter(first).state.value == "blocked"
        assert gate.poll([first])[first.rid].state.value == "open"
        assert gate.enter(second).state.value == "open"
        assert len(gate.manual.submitted) == 1
        assert state_of(first) is not None
        assert state_of(first) is not state_of(second)

    def test_equal_grammars_under_way_are_compiled_once(self) -> None:
        gate = make_gate(eager=False)
        several = [grammar_request(regex("tokens 5")) for _ in range(3)]
        assert all(gate.enter(req).state.value == "blocked" for req in several)
        assert len(gate.manual.submitted) == 1
        gate.cancel(several[0])
        gate.manual.finish(regex("tokens 5"))
        assert {rid for rid, one in gate.poll(several[1:]).items() if one.state.value == "open"} == {
            req.rid for req in several[1:]
        }

    def test_one_that_nobody_waits_for_any_more_is_not_compiled(self) -> None:
        gate = make_gate(eager=False)
        reqs = [grammar_request(regex("tokens 5")) for _ in range(2)]
        for req in reqs:
            gate.enter(req)
        future = gate.manual.jobs[regex("tokens 5")]
        gate.cancel(reqs[0])
        assert not future.cancelled()
        gate.cancel(reqs[1])
        assert future.cancelled()
        again = grammar_request(regex("tokens 5"))
        assert gate.enter(again).state.value == "blocked"
        assert len(gate.manual.submitted) == 2

    def test_failures_are_remembered_too(self) -> None:
        gate = make_gate(eager=False)
        for number in range(3):
            req = grammar_request(regex("bad"))
            verdict = gate.enter(req)
            if number == 0:
                gate.manual.finish(regex("bad"), InvalidRequest("no", param="regex", code="invalid_grammar"))
                verdict = gate.poll([req])[req.rid]
            assert (verdict.state.value, verdict.status, verdict.code) == ("failed", 400, "invalid_grammar")
        assert len(gate.manual.submitted) == 1

    @pytest.mark.parametrize(("code", "status"), [("grammar_timeout", 400), ("grammar_failed", 400)])
    def test_what_the_machine_may_be_to_blame_for_is_tried_again_later(self, code: str, status: int) -> None:
        clock = ManualClock()
        gate = make_gate(clock, eager=False)

        def ask() -> str:
            req = grammar_request(regex("bad"))
            verdict = gate.enter(req)
            if verdict.state.value == "blocked":
                gate.manual.finish(regex("bad"), InvalidRequest("no", code=code, status=status))
                verdict = gate.poll([req])[req.rid]
            return verdict.code

        assert [ask(), ask()] == [code, code]
        assert len(gate.manual.submitted) == 1
        clock.advance(1000)
        assert ask() == code
        assert len(gate.manual.submitted) == 2

    def test_a_servers_fault_is_not_remembered(self) -> None:
        gate = make_gate(eager=False)
        for number in (1, 2):
            req = grammar_request(regex("tokens 5"))
            gate.enter(req)
            gate.manual.finish(regex("tokens 5"), InvalidRequest("no", code="grammar_queue_full", status=503))
            assert gate.poll([req])[req.rid].status == 503
            assert len(gate.manual.submitted) == number

    def test_it_holds_so_many_and_the_least_used_goes(self) -> None:
        gate = make_gate(entries=3)

        def ask(token: int) -> bool:
            """Whether it was known."""
            before = len(gate.manual.submitted)
            req = grammar_request(regex(f"tokens {token}"))
            if gate.enter(req).state.value == "blocked":
                gate.poll([req])
            return len(gate.manual.submitted) == before

        assert [ask(1), ask(2), ask(3), ask(1), ask(4), ask(1), ask(2)] == [
            False,
            False,
            False,
            True,
            False,
            True,
            False,
        ]
        assert gate.stats()["cached"] == 3

    def test_its_memory_is_bounded_failures_included(self) -> None:
        gate = make_gate(bytes=5000)
        for token in range(40):
            req = grammar_request(regex(f"tokens {token}"))
            gate.enter(req)
            gate.poll([req])
            assert gate.cache.size_bytes <= 5000
        gate.manual.eager = False
        for number in range(40):
            grammar = regex(f"bad {number} " + "x" * 500)
            req = grammar_request(grammar)
            gate.enter(req)
            gate.manual.finish(grammar, InvalidRequest("no" * 200))
            gate.poll([req])
            assert gate.cache.size_bytes <= 5000
        assert 0 < gate.stats()["cached"] < 10

    def test_one_too_large_for_the_cache_is_used_all_the_same(self) -> None:
        gate = make_gate(bytes=100)
        req = grammar_request(regex("tokens 5"))
        gate.enter(req)
        assert gate.poll([req])[req.rid].state.value == "open"
        assert gate.stats() == {"cached": 0, "cached_bytes": 0, "compiling": 0, "workers_lost": 0}


class TestRefusals:
    def test_one_that_cannot_be_loaded_here_is_the_servers_fault(self) -> None:
        gate = make_gate(eager=False)
        req = grammar_request(regex("tokens 5"))
        gate.enter(req)
        gate.manual.finish(regex("tokens 5"), RuntimeError("no"))
        verdict = gate.poll([req])[req.rid]
        assert (verdict.status, verdict.code) == (500, "grammar_failed")

    def test_a_source_that_is_too_long(self) -> None:
        gate = make_gate(source_bytes=10)
        verdict = gate.enter(grammar_request(regex("é" * 6)))
        assert (verdict.status, verdict.code, verdict.param) == (400, "grammar_too_large", "regex")
        assert gate.manual.submitted == []
        assert gate.enter(grammar_request(regex("é" * 5))).state.value == "blocked"

    def test_a_full_queue(self) -> None:
        gate = make_gate(eager=False)
        gate.manual.most = 2
        for token in (1, 2):
            assert gate.enter(grammar_request(regex(f"tokens {token}"))).state.value == "blocked"
        verdict = gate.enter(grammar_request(regex("tokens 3")))
        assert (verdict.status, verdict.code) == (503, "grammar_queue_full")
        assert gate.enter(grammar_request(regex("tokens 2"))).state.value == "blocked", "it is compiled anyway"

    def test_refused_before_it_is_accepted_or_afterwards(self) -> None:
        gate = make_gate(eager=False, source_bytes=50)
        made = harness(gate)
        reply = made.submit("long", [1], sampling={"grammar": regex("x" * 60)})
        assert isinstance(reply, Rejected)
        assert (reply.status, reply.param) == (400, "regex")
        assert isinstance(made.submit("bad", [1], sampling={"grammar": regex("bad")}), Accepted)
        made.submit("free", [2, 3], 4)
        gate.manual.finish(regex("bad"), InvalidRequest("no", param="regex", code="invalid_grammar"))
        made.run()
        assert made.finish("bad") == {
            "type": "abort", "message": "no", "status": 400, "code": "invalid_grammar", "param": "regex",
        }  # fmt: skip
        assert made.tokens("free") == oracle([2, 3], 4)

    def test_an_abort_while_it_waits_and_while_it_runs(self) -> None:
        gate = make_gate(eager=False)
        made = harness(gate)
        made.submit("waits", [1], sampling=constrained([5, 6]))
        made.step()
        made.scheduler.receive([AbortRequest(rid="waits")])
        assert gate.manual.jobs[Grammar("regex", "tokens 5 6")].cancelled()
        made.run()
        gate.manual.eager = True
        made.submit("runs", [1], 100, sampling=constrained(tokens_of(3, 50)))
        for _ in range(4):
            made.step()
        made.scheduler.receive([AbortRequest(rid="runs")])
        made.run()
        assert made.finish("runs")["status"] == 499
