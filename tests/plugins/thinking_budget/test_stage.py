"""The stage, put to the suite of stages; requests with a budget in a scheduler, and what its frontend refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pegboard.conformance.admission_gate import ManualClock
from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.conformance.stage import StageContract, stage_context
from pegboard.core.frontend.features import Features
from pegboard.core.frontend.intake import Intake
from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.stage import Stage
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.core.pipeline.points import encoded
from pegboard.plugins.thinking_budget.frontend import BudgetFrontend
from pegboard.plugins.thinking_budget.hooks import ThinkingBudgetHooks
from pegboard.plugins.thinking_budget.messages import NAME, Asked
from pegboard.plugins.thinking_budget.stage import ThinkingBudget
from pegboard.toolkit.chat.thinking import BUDGET
from tests.core.pipeline.harness import VOCAB, Harness, Seer, oracle
from tests.plugins.thinking_budget.test_constraint import asked

CLOSE = "()"

SAID: dict[str, Any] = {"tokens": 3, "begin": "<t>", "ends": ["</t>"], "closes": ["</t>"]}


class TestThinkingBudget(StageContract):
    def make_stage(self) -> Stage:
        [stage] = ThinkingBudgetHooks().pipeline_stages(stage_context(tokenizer=FakeTokenizer()))
        return stage

    def feature(self) -> object:
        return asked(3)


def prepared(said: object) -> Asked:
    intake = Intake(FakeEngineClient().info, FakeTokenizer(), Features([BudgetFrontend(FakeTokenizer())]))
    message = intake.prepare(GenerateRequest(prompt="Hi", params={BUDGET: said}))
    return msgspec.msgpack.decode(message.features[NAME], type=Asked)


def test_texts_become_tokens() -> None:
    found = prepared({**SAID, "opened": True, "text": "Hm"})
    assert found == asked(3, text="Hm")


@pytest.mark.parametrize(
    "said",
    [
        5,
        {},
        {**SAID, "tokens": -1},
        {**SAID, "tokens": "3"},
        {**SAID, "closes": []},
        {**SAID, "closes": [""]},
        {**SAID, "begin": ""},
        {**SAID, "ends": ["x" * 257]},
    ],
)
def test_what_no_api_says_is_refused(said: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepared(said)
    assert (caught.value.status, caught.value.param) == (400, "params.thought_budget")


def thinking(loop: str, *, budget: int | None = 5, **more: Any) -> dict[str, list[int]]:
    """Return what requests of a scheduler get whose answers are thoughts, for at most so many tokens."""
    stage = ThinkingBudget(FakeTokenizer(), VOCAB)
    gate = stage.gate(AdmissionGateContext(ManualClock()))
    parts = {"gates": GateKeeper([(NAME, gate)], ManualClock())}
    harness = Harness(loop=loop, joining=[stage], parts=parts, tokenizer=FakeTokenizer(), **more)
    for number in range(6):
        features = {} if budget is None else {NAME: encoded(asked(budget, CLOSE, ends=(CLOSE,)))}
        harness.submit(f"r{number}", prompt(number), 30, features=features, sampling={"ignore_eos": True})
    harness.run()
    assert all(harness.finish(rid)["type"] == "length" for rid in harness.outputs)
    return {rid: harness.tokens(rid) for rid in harness.outputs}


def prompt(number: int) -> list[int]:
    return [(number * 7 + i) % VOCAB for i in range(5 + 9 * number)]


def expected(number: int, budget: int) -> list[int]:
    tokens = prompt(number)
    thought = oracle(tokens, budget, ignore_eos=True)
    begun = [*thought, *map(ord, CLOSE)]
    return [*begun, *oracle([*tokens, *begun], 30 - len(begun), ignore_eos=True)]


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("budget", [0, 5])
def test_thoughts_end_in_a_scheduler(loop: str, budget: int) -> None:
    assert thinking(loop, budget=budget) == {f"r{number}": expected(number, budget) for number in range(6)}


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_drafts_and_retractions_change_nothing(loop: str) -> None:
    plain = {f"r{number}": expected(number, 5) for number in range(6)}
    assert thinking(loop, speculator=Seer(0.9)) == plain
    assert thinking(loop, speculator=Seer(0.9, "tree")) == plain
    assert thinking(loop, tokens=140, new_token_ratio=0.1) == plain


def test_others_are_left_alone() -> None:
    assert thinking("normal", budget=None)["r0"] == oracle(prompt(0), 30, ignore_eos=True)
