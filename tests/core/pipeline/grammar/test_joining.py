"""Requests with grammars whose first token was sampled elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pegboard.core.interfaces.admission_gate import Arrived
from pegboard.core.interfaces.grammar import Grammar
from pegboard.core.interfaces.messages import TokenOutput
from pegboard.core.interfaces.req import Req
from pegboard.core.pipeline.grammar.state import look_ahead, state_of
from pegboard.core.pipeline.results import ResultStage
from tests.core.pipeline.test_seats import LOOPS, World

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


# ---- mutants ---------------------------------------------------------------------------------------------------------


def advanced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar takes the token that has come once more."""
    accept = ResultStage.accept

    def twice(self: ResultStage, req: Req, arrived: Arrived, now: float) -> tuple[list[Req], TokenOutput | None]:
        found = accept(self, req, arrived, now)
        state = state_of(req)
        if state is not None and arrived.token is not None and state.matcher.accept(arrived.token):
            look_ahead(req, state)
        return found

    monkeypatch.setattr(ResultStage, "accept", twice)


def not_advanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar does not hear of the token that has come."""
    accept = ResultStage.accept

    def unheard(self: ResultStage, req: Req, arrived: Arrived, now: float) -> tuple[list[Req], TokenOutput | None]:
        found = accept(self, req, arrived, now)
        state = state_of(req)
        if state is not None:
            state.matcher.rollback(1)
            look_ahead(req, state)
        return found

    monkeypatch.setattr(ResultStage, "accept", unheard)


@LOOPS
@pytest.mark.parametrize("change", [advanced_twice, not_advanced])
def test_broken_grammars_are_noticed(monkeypatch: pytest.MonkeyPatch, loop: str, change: Change) -> None:
    change(monkeypatch)
    with pytest.raises(AssertionError):
        follow_grammars(loop)
