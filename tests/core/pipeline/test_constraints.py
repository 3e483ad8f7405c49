"""What binds the tokens of requests, by a stage that knows nothing of grammars; and what else it brings and tells."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.conformance.admission_gate import ManualClock
from pegboard.core.engine.gates import stage_gates
from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.constraint import LATER, Later, NodeMasks, TokenConstraint, constrain
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampler import NO_TOKEN
from pegboard.core.interfaces.stage import Interest, Stage
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.points import Points, encoded
from tests.core.pipeline.harness import VOCAB, FakeModel, Harness, Seer, oracle

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])
WORDS = -(-VOCAB // 32)


class Turns(TokenConstraint):
    """Tokens of which each is one more than the one before; ends after `length` of them. `late` says LATER so often
    before each token; `ahead` tokens are forced at a time.
    """

    def __init__(self, req: Req, first: int, length: int, *, late: int = 0, ahead: int = 0, breaks: int = -1) -> None:
        self.req, self.next, self.left = req, first, length
        self.late, self.asked, self.ahead, self.breaks = late, 0, ahead, breaks
        self.owed: list[int] = []

    def room(self, n: int) -> bool:
        return False

    def mask(self) -> NDArray[np.int32]:
        bits = np.zeros(WORDS, np.int32)
        bits[self.next // 32] = 1 << self.next % 32
        return bits

    def walk(self, tree: tuple[Sequence[int], Sequence[int]], remaining: int) -> tuple[NDArray[np.bool_], NodeMasks]:
        raise AssertionError("there is no room for a tree")

    def advance(self, token: int, more: bool) -> FinishReason | Sequence[int] | Later:
        if self.asked < self.late:
            self.asked += 1
            return LATER
        self.asked = 0
        assert token == self.next
        if token == self.breaks:
            raise ValueError("broken")
        self.next, self.left = token + 1, self.left - 1
        if not self.left:
            return FinishReason(FinishType.STOP)
        if self.owed:
            self.owed.remove(token)
            return ()
        count = min(self.ahead, self.left, self.req.remaining_tokens)
        self.owed = [self.next + i for i in range(count)]
        return list(self.owed)


class Counting(Stage):
    """Has requests count from a number that they name."""

    name = "counting"

    def __init__(self, **more: Any) -> None:
        self.more = more

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        if self.name not in message.features:
            return None
        first, length = req.prompt_ids[:2].tolist()
        constrain(req, Turns(req, first, length, **self.more))
        return Interest(constrained=True)

    def gone(self, req: Req) -> None:
        constrain(req, None)

    def figures(self) -> Mapping[str, float]:
        return {"counted": 3}


def play(
    loop: str,
    n: int = 20,
    sampling: Mapping[str, Any] = MappingProxyType({}),
    model: type[FakeModel] | None = None,
    speculator: Seer | None = None,
    **more: Any,
) -> Harness:
    made = Harness(loop=loop, joining=[Counting(**more)], model=model, speculator=speculator)
    made.submit("bound", [100, 6], n, stream=True, features={"counting": encoded(True)}, sampling=sampling)
    made.submit("free", [3, 4, 5], 12)
    made.run()
    assert made.tokens("free") == oracle([3, 4, 5], 12)
    return made


@LOOPS
@pytest.mark.parametrize("more", [{}, {"late": 3}, {"ahead": 3}, {"late": 1, "ahead": 2}], ids=str)
def test_a_request_is_bound_to_the_end_of_its_constraint(loop: str, more: dict[str, Any]) -> None:
    made = play(loop, **more)
    assert made.tokens("bound") == [100, 101, 102, 103, 104, 105]
    assert made.finish("bound") == {"type": "stop"}
    # 101, 102, 103 after the first token, and 105 after the next; one that has to wait among them drops the others.
    assert made.scheduler.counters.forced_tokens == {0: 0, 2: 2, 3: 4}[more.get("ahead", 0)]
    assert made.scheduler.counters.generated_tokens == 18


@LOOPS
@pytest.mark.parametrize("more", [{}, {"late": 2}, {"ahead": 3}], ids=str)
def test_its_length_and_its_stops_end_it_before(loop: str, more: dict[str, Any]) -> None:
    made = play(loop, n=3, **more)
    assert (made.tokens("bound"), made.finish("bound")) == ([100, 101, 102], {"type": "length"})
    made = play(loop, sampling={"stop_token_ids": (102,)}, **more)
    assert (made.tokens("bound"), made.finish("bound")) == ([100, 101, 102], {"type": "stop", "matched": 102})


@LOOPS
@pytest.mark.parametrize("more", [{}, {"late": 2}, {"ahead": 3}], ids=str)
def test_one_that_raises_fails_its_request_alone(loop: str, more: dict[str, Any]) -> None:
    reason = play(loop, breaks=102, **more).finish("bound")
    assert (reason["type"], reason["status"], reason["code"]) == ("abort", 500, "plugin_failed")
    assert reason["message"].endswith("failed: ValueError: broken")


class Refusing(FakeModel):
    """Says where nothing can be drawn, as a worker does."""

    def answer(self, work: ModelWorkerBatch) -> BatchResult:
        mask = None if work.sampling is None else work.sampling.mask
        none = [] if mask is None else mask.rows[~mask.bits.any(axis=1)].tolist()
        if mask is not None and none:
            mask.bits[~mask.bits.any(axis=1)] = -1
        result = super().answer(work)
        result.tokens[none] = NO_TOKEN
        result.unsampled = bool(none)
        return result


@LOOPS
@pytest.mark.parametrize(
    "answer", [None, np.zeros(WORDS + 1, np.int32), np.ones(WORDS, np.int64), "no mask"], ids=lambda one: type(one)
)
@pytest.mark.parametrize("at", [100, 102])
def test_a_mask_that_is_none_ends_its_request_alone(
    loop: str, at: int, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its first token, and later."""
    mask = Turns.mask

    def wrong(self: Turns) -> NDArray[np.int32]:
        if self.next < at:
            return mask(self)
        if answer is None:
            raise ValueError("broken")
        found: NDArray[np.int32] = answer
        return found

    monkeypatch.setattr(Turns, "mask", wrong)
    made = play(loop, model=Refusing)
    assert made.tokens("bound") == list(range(100, at))
    assert (made.finish("bound")["status"], made.finish("bound")["code"]) == (500, "not_sampleable")
    assert made.scheduler.counters.failed_batches == 0


def test_one_that_cannot_say_whether_it_has_room_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Turns, "room", lambda self, n: 1 / 0)
    made = play("normal", speculator=Seer(1.0))
    assert made.tokens("bound") == [100, 101, 102, 103, 104, 105]
    assert caplog.text.count("does not say whether it can look ahead") == 1


@pytest.mark.parametrize(("nodes", "words"), [(0, 1), (1, 0)])
def test_what_it_says_of_a_tree_must_fit(
    nodes: int, words: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Masks of another width, or of more nodes, are none; the request goes on without tokens ahead."""

    def walk(
        self: Turns, tree: tuple[Sequence[int], Sequence[int]], remaining: int
    ) -> tuple[NDArray[np.bool_], NodeMasks]:
        count = len(tree[0])
        bits = np.full((count, WORDS + words), -1, np.int32)
        return np.ones(count + nodes, np.bool_), NodeMasks(bits, np.zeros(count, np.bool_))

    monkeypatch.setattr(Turns, "room", lambda self, n: True)
    monkeypatch.setattr(Turns, "walk", walk)
    made = play("normal", speculator=Seer(1.0))
    assert made.tokens("bound") == [100, 101, 102, 103, 104, 105]
    assert caplog.text.count("cannot look ahead") == 1
    assert made.scheduler.counters.failed_batches == 0


def test_what_looking_at_trees_takes_is_time_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def room(self: Turns, n: int) -> bool:
        if n > 2:
            time.sleep(0.02)
        return n <= 2

    monkeypatch.setattr(Turns, "room", room)
    made = play("normal", speculator=Seer(1.0))
    assert made.drafts.draft_time >= 0.02


def test_a_stage_whose_books_cannot_be_told_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Stage):
        name = "broken"

        def idle_error(self) -> str | None:
            raise KeyError("books")

    assert Points([Broken()]).reports.idle_error() is None
    assert "idle_error raised" in caplog.text


def test_a_stage_tells_its_figures() -> None:
    assert play("normal").scheduler.info()["counted"] == 3


def test_figures_of_one_that_raises_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "figures", lambda self: 1 / 0)
    assert "counted" not in play("normal").scheduler.info()


def test_a_gate_that_is_none_names_the_stage() -> None:
    class Gated(Stage):
        name = "gated"

        def gate(self, ctx: AdmissionGateContext) -> Any:
            return "a gate"

    with pytest.raises(PluginError, match=r"'gated'.*'a gate', which is not an AdmissionGate"):
        stage_gates(Points([Gated()]), AdmissionGateContext(ManualClock()))
