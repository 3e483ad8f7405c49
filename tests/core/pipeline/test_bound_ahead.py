"""Stages say how many tokens ahead requests may have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Interest, Stage
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DraftRow
from tests.core.pipeline.harness import IGNORE, Harness, Seer, oracle

PROMPTS = {"a": [9, 8, 30, 77], "b": [41, 12, 97], "other": [5, 6, 7]}
NODES = 8


class AtMost(Stage):
    """Lets trees of requests but `other` have so many nodes."""

    def __init__(self, nodes: int) -> None:
        self.name = f"at_most_{nodes}"
        self.nodes = nodes
        self.asked: list[tuple[list[str], list[int]]] = []

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        return None if req.rid == "other" else Interest(look=False)

    def bound_ahead(self, reqs: Sequence[Req], most: NDArray[np.int64]) -> NDArray[np.int64]:
        self.asked.append(([req.rid for req in reqs], most.tolist()))
        return np.full(len(reqs), self.nodes, np.int64)


class Broken(AtMost):
    def bound_ahead(self, reqs: Sequence[Req], most: NDArray[np.int64]) -> NDArray[np.int64]:
        raise RuntimeError("out of luck")


class AnswersForOthers(AtMost):
    def bound_ahead(self, reqs: Sequence[Req], most: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.full(len(reqs) + 1, self.nodes, np.int64)


class Noting(Seer):
    """Notes the most nodes that it is asked for, by the first token of a prompt."""

    def __init__(self) -> None:
        super().__init__(1.0, nodes=NODES)
        self.most = dict.fromkeys((prompt[0] for prompt in PROMPTS.values()), 1)

    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        for row in rows:
            first = int(row.tokens[0])
            self.most[first] = max(self.most[first], row.most)
        return super().propose(rows)


def play(*stages: Stage) -> tuple[int, int]:
    """The most nodes that trees of a and b may have, and those of the other one's."""
    seer = Noting()
    harness = Harness(joining=stages, speculator=seer)
    for rid, prompt in PROMPTS.items():
        harness.submit(rid, prompt, 60, **IGNORE)
    harness.run()
    for rid, prompt in PROMPTS.items():
        assert harness.tokens(rid) == oracle(prompt, 60, ignore_eos=True)
    return max(seer.most[PROMPTS[rid][0]] for rid in ("a", "b")), seer.most[PROMPTS["other"][0]]


@pytest.mark.parametrize(
    ("stages", "nodes"),
    [
        ([], NODES),
        ([AtMost(3)], 3),
        ([AtMost(5), AtMost(2)], 2),
        ([AtMost(99)], NODES),
        ([AtMost(0)], 1),
        ([Broken(4)], 1),
        ([AnswersForOthers(4)], 1),
    ],
    ids=lambda one: "-".join(type(stage).__name__ for stage in one) if isinstance(one, list) else str(one),
)
def test_the_least_counts_for_requests_of_the_stage(stages: list[Stage], nodes: int) -> None:
    bounded, free = play(*stages)
    assert bounded == nodes
    assert free == NODES


def test_it_is_asked_once_per_plan_and_of_its_requests_alone() -> None:
    stage = AtMost(3)
    play(stage)
    assert stage.asked
    assert {rid for rids, _ in stage.asked for rid in rids} == {"a", "b"}
    assert all(min(most) > 1 for _, most in stage.asked)
