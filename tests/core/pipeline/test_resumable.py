"""Stages say behind how many tokens of a cached prefix they can go on."""

from __future__ import annotations

import pytest

from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Interest, Stage
from tests.core.pipeline.harness import Harness, oracle

PROMPT = [17 * at % 101 + 8 for at in range(30)]


class Every(Stage):
    """Goes on behind every so many tokens."""

    def __init__(self, every: int) -> None:
        self.name = f"every_{every}"
        self.every = every
        self.asked: list[int] = []

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest(look=False)

    def resumable(self, req: Req, length: int) -> int:
        self.asked.append(length)
        return length // self.every * self.every


class Broken(Every):
    def resumable(self, req: Req, length: int) -> int:
        raise RuntimeError("out of luck")


@pytest.mark.parametrize(
    ("stages", "cached"),
    [([], 29), ([Every(4)], 28), ([Every(4), Every(6)], 24), ([Every(7), Every(4), Every(5)], 0), ([Broken(1)], 0)],
    ids=lambda one: "-".join(stage.name for stage in one) if isinstance(one, list) else str(one),
)
def test_all_of_them_agree(stages: list[Every], cached: int) -> None:
    harness = Harness(joining=stages)
    for rid in ("a", "b"):
        harness.submit(rid, PROMPT, 4)
        harness.run()
        assert harness.tokens(rid) == oracle(PROMPT, 4)
    assert harness.outputs["b"][-1].cached_tokens == cached


def test_one_alone_is_asked_once() -> None:
    stage = Every(4)
    harness = Harness(joining=[stage])
    for rid in ("a", "b"):
        harness.submit(rid, PROMPT, 4)
        harness.run()
    assert stage.asked == [29]


def test_a_request_without_the_stage_is_not_asked_about() -> None:
    class Some(Every):
        def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:  # type: ignore[override]
            return Interest(look=False) if req.rid == "b" else None

    stage = Some(4)
    harness = Harness(joining=[stage])
    for rid in ("a", "b", "c"):
        harness.submit(rid, PROMPT, 4)
        harness.run()
    assert [harness.outputs[rid][-1].cached_tokens for rid in "abc"] == [0, 28, 29]
