"""Broken tokens ahead, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import pytest

from pegboard.conformance.stage.ahead import FORBIDDEN, AheadContract
from pegboard.conformance.stage.rig import next_token
from pegboard.core.interfaces.ahead import AheadRoom, LogPart, Verified, Wants
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import DevicePart, Interest, Stage
from pegboard.core.interfaces.trees import Accepted, TokenTrees
from pegboard.toolkit.sampling import tree


class Good(Stage):
    """Foresees what the model of the suite says, but for every third token."""

    name = "foresees"

    def __init__(self) -> None:
        self.asked = 0

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest()

    def must_settle(self, running: object, in_flight: object) -> bool:
        return True

    def ahead(self, room: AheadRoom) -> TokenTrees | None:
        self.asked += 1
        return tree.chains(
            (int(newest), self.after(req, min(3, int(most) - 1)))
            for req, newest, most in zip(room.reqs, room.newest, room.most, strict=True)
        )

    def after(self, req: Req, count: int) -> list[int]:
        known = req.tokens.view().tolist()
        for _ in range(count):
            token = next_token(np.array(known, np.int64))
            known.append(token if len(known) % 3 else (token + 1) % 250)
        return known[len(known) - count :] if count else []

    def pack(self, step: Any, extras: Any) -> object:
        return step.work.trees is not None

    def figures(self) -> Mapping[str, float]:
        return {"foreseen": self.asked}

    def log_decodes(self) -> LogPart | None:
        return LogPart(", foreseen: 1", {"foreseen": 1})


class GoodPart(DevicePart):
    """Says itself what agrees with what was drawn."""

    name = "foresees"

    def wants(self, payload: object) -> Wants:
        return Wants(logits=bool(payload), states=(0,))

    def accept(self, payload: object, verified: Verified) -> Accepted | None:
        return tree.walk(verified.trees, verified.drawn)


class AsksForNothing(Good):
    def must_settle(self, running: object, in_flight: object) -> bool:
        return False


class TakesMoreThanItsRoom(Good):
    def ahead(self, room: AheadRoom) -> TokenTrees | None:
        return tree.chains((int(newest), [1] * int(most)) for newest, most in zip(room.newest, room.most, strict=True))


class BeginsElsewhere(Good):
    def ahead(self, room: AheadRoom) -> TokenTrees | None:
        return tree.chains((int(newest) ^ 1, [1][: int(most) - 1]) for newest, most in zip(room.newest, room.most))  # noqa: B905


class ForgetsARequest(Good):
    def ahead(self, room: AheadRoom) -> TokenTrees | None:
        found = super().ahead(room)
        return None if found is None else tree.take_part(found, np.arange(len(found) - 1))


class ChangesARequest(Good):
    def ahead(self, room: AheadRoom) -> TokenTrees | None:
        room.reqs[0].output.sent_len += 1
        return super().ahead(room)


class WidensItsRoom(Good):
    def ahead(self, room: AheadRoom) -> TokenTrees | None:
        room.most[:] += 1
        return super().ahead(room)


class ChangesTokens(Good):
    """Has what it foresees taken for what was drawn."""

    def arrived(self, step: Any, result: Any) -> None:
        if step.batch.trees is not None:
            result.tokens[:] = (result.tokens + 1) % 250


class CountsWhatIsCounted(Good):
    def figures(self) -> Mapping[str, float]:
        return {"decode_steps": 1}


class CountsInWords(Good):
    def figures(self) -> Mapping[str, Any]:
        return {"foreseen": "some"}


class LogsText(Good):
    def log_decodes(self) -> Any:
        return ", foreseen: 1"


class JumpsOver(GoodPart):
    def accept(self, payload: object, verified: Verified) -> Accepted | None:
        found = tree.walk(verified.trees, verified.drawn)
        return replace(found, nodes=found.nodes + 1)


class AcceptsTheForbidden(GoodPart):
    def accept(self, payload: object, verified: Verified) -> Accepted | None:
        found = tree.walk(verified.trees, verified.drawn)
        tokens = found.tokens.copy()
        tokens[np.cumsum(found.counts) - 1] = range(FORBIDDEN.stop)[FORBIDDEN][0]
        return replace(found, tokens=tokens)


class AcceptsByTurns(GoodPart):
    turn = 0

    def accept(self, payload: object, verified: Verified) -> Accepted | None:
        self.turn += 1
        return tree.walk(verified.trees, verified.drawn) if self.turn % 2 else None


class ChangesLogits(GoodPart):
    def accept(self, payload: object, verified: Verified) -> Accepted | None:
        assert verified.logits is not None
        verified.logits.zero_()
        return super().accept(payload, verified)


class NeverSaysSo(GoodPart):
    def accept(self, payload: object, verified: Verified) -> Accepted | None:
        return None


class WantsByTurns(GoodPart):
    turn = 0

    def wants(self, payload: object) -> Wants:
        self.turn += 1
        return Wants(logits=bool(self.turn % 2))


class WantsBelowTheModel(GoodPart):
    def wants(self, payload: object) -> Wants:
        return Wants(states=(-1,))


class WantsNothing(GoodPart):
    def wants(self, payload: object) -> Wants:
        return Wants()


def suite(stage: type[Stage], part: type[DevicePart]) -> AheadContract:
    class Suite(AheadContract):
        def make_stage(self) -> Stage:
            return stage()

        def make_part(self) -> DevicePart:
            return part()

    return Suite()


def run(test: str, stage: type[Stage] = Good, part: type[DevicePart] = GoodPart) -> None:
    method: Any = getattr(suite(stage, part), test)
    wanted = signature(method).parameters
    for loop in ("normal", "overlap") if "loop" in wanted else ("",):
        for tokens in (512, 96) if "tokens" in wanted else (0,):
            method(*([loop] if loop else []), *([tokens] if tokens else []))


TREES = "test_it_brings_trees_within_their_room"
ACCEPTS = "test_what_its_part_accepts_are_paths"
TESTS = [name for name in vars(AheadContract) if name.startswith("test_")]
STAGES: list[tuple[type[Stage], str, str]] = [
    (AsksForNothing, TREES, r"must_settle\(\) has to say"),
    (TakesMoreThanItsRoom, TREES, "trees of"),
    (BeginsElsewhere, TREES, "a root is not the newest token"),
    (ForgetsARequest, TREES, "trees for"),
    (ChangesARequest, TREES, "has changed a request"),
    (WidensItsRoom, TREES, "what there is room for"),
    (ChangesTokens, "test_no_token_changes", "answers are others"),
    (CountsWhatIsCounted, "test_what_it_tells_are_figures_of_its_own", "decode_steps"),
    (CountsInWords, "test_what_it_tells_are_figures_of_its_own", "figures are numbers"),
    (LogsText, "test_what_it_tells_are_figures_of_its_own", "LogPart"),
]
PARTS: list[tuple[type[DevicePart], str, str]] = [
    (JumpsOver, ACCEPTS, "are no paths"),
    (AcceptsTheForbidden, ACCEPTS, "the logits rule out"),
    (AcceptsByTurns, ACCEPTS, "answers something else"),
    (ChangesLogits, ACCEPTS, "has changed the logits"),
    (NeverSaysSo, ACCEPTS, "never said so"),
    (WantsByTurns, "test_its_part_wants_the_same_again", "answers something else"),
    (WantsBelowTheModel, "test_its_part_wants_the_same_again", "places from 0 on"),
    (WantsNothing, "test_its_part_wants_the_same_again", "wants nothing"),
]


@pytest.mark.parametrize("test", TESTS)
def test_the_original_passes(test: str) -> None:
    run(test)


@pytest.mark.parametrize(("mutant", "test", "says"), STAGES, ids=lambda one: getattr(one, "__name__", None))
def test_caught(mutant: type[Stage], test: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        run(test, stage=mutant)


@pytest.mark.parametrize(("mutant", "test", "says"), PARTS, ids=lambda one: getattr(one, "__name__", None))
def test_a_broken_part_is_caught(mutant: type[DevicePart], test: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        run(test, part=mutant)
