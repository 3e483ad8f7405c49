"""Requests with grammars whose first token was sampled elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import Grammar
from pegboard.core.interfaces.stage import Stage
from pegboard.core.interfaces.step import TokenValues
from pegboard.core.pipeline.services import Services
from pegboard.plugins.grammar.constraint import state_of
from pegboard.plugins.grammar.stage import GrammarStage
from pegboard.plugins.grammar.state import look_ahead
from pegboard.plugins.grammar.work import GrammarWork, WorkLimits
from tests.plugins.kv_handoff.test_handoff import LOOPS, World

Change = Callable[[pytest.MonkeyPatch], None]


@LOOPS
def test_a_grammar_goes_on_by_the_token_that_comes(loop: str) -> None:
    follow_grammars(loop)


def follow_grammars(loop: str) -> None:
    """Bring requests whose grammars want the same token twice and then others, and one whose grammar is complete."""
    world = World(loop, grammars=True)
    scripts = {"a": [9, 9, 4, 4, 8], "b": [5, 6, 5, 6], "done": [3], "computed": [9, 9, 4]}
    for rid, script in scripts.items():
        sampling = {"grammar": Grammar("regex", f"tokens {' '.join(map(str, script))}")}
        drill = None if rid == "computed" else {"act": "bring", "delay": 0.1, "token": script[0]}
        world.submit(rid, n=20, drill=drill, sampling=sampling)
    world.run()
    for rid, script in scripts.items():
        assert (world.harness.tokens(rid), world.harness.finish(rid)) == (script, {"type": "stop"}), rid


@LOOPS
def test_a_token_that_comes_is_a_step_with_time_of_its_own(loop: str) -> None:
    come_after_a_slow_step(loop)


def come_after_a_slow_step(loop: str) -> None:
    """Whatever the step before has taken, a matcher that is known to be quick goes on at once."""
    work = GrammarWork(WorkLimits(step_seconds=60, seconds=1000))
    world = World(loop, grammars=True, work=work)
    sampling = {"grammar": Grammar("regex", "tokens 9 4 8")}
    world.submit("known", n=20, sampling=sampling)
    world.run()
    waits = world.harness.points.reports.figures()["grammar_waits"]
    world.submit("after", n=20, drill={"act": "bring", "delay": 0.1, "token": 9}, sampling=sampling)
    state = state_of(world.harness.scheduler.requests.alive["after"])
    assert state is not None
    computing, clock = work.now()
    work.spent(state, (computing - 100, clock))
    world.run()
    assert world.harness.tokens("after") == [9, 4, 8]
    assert world.harness.points.reports.figures()["grammar_waits"] == waits


# ---- mutants ---------------------------------------------------------------------------------------------------------


def advanced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar takes the token that has come once more."""
    begin = Services.begin_computed

    def twice(self: Services, req: Req, length: int, token: int, values: TokenValues) -> None:
        begin(self, req, length, token, values)
        state = state_of(req)
        if state is not None and state.matcher.accept(token):
            look_ahead(req, state)

    monkeypatch.setattr(Services, "begin_computed", twice)


def not_advanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar does not hear of the token that has come."""
    begin = Services.begin_computed

    def unheard(self: Services, req: Req, length: int, token: int, values: TokenValues) -> None:
        begin(self, req, length, token, values)
        state = state_of(req)
        if state is not None:
            state.matcher.rollback(1)
            look_ahead(req, state)

    monkeypatch.setattr(Services, "begin_computed", unheard)


@LOOPS
@pytest.mark.parametrize("change", [advanced_twice, not_advanced])
def test_broken_grammars_are_noticed(monkeypatch: pytest.MonkeyPatch, loop: str, change: Change) -> None:
    change(monkeypatch)
    with pytest.raises(AssertionError):
        follow_grammars(loop)


@LOOPS
def test_time_that_is_not_given_is_noticed(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    monkeypatch.setattr(GrammarStage, "adopt", Stage.adopt)
    with pytest.raises(AssertionError):
        come_after_a_slow_step(loop)
