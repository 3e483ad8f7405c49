"""The request whose prompt is computed in chunks: what happens where its next chunk cannot be computed now."""

from __future__ import annotations

import pytest

from pegboard.core.interfaces.batch import ScheduleBatch
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Interest, Stage, Wait
from pegboard.core.pipeline.components import StepHooks
from tests.core.pipeline.harness import IGNORE, Harness, oracle

LONG = [2] * 15


class Waits(Stage):
    """Answers `wait` for what comes after the first chunk of the request `long`."""

    name = "test.waits"

    def __init__(self, wait: Wait) -> None:
        self.wait: Wait | None = wait
        self.asked: list[str] = []

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        return Interest() if req.rid in ("long", "other") else None

    def begin_plan(self) -> None:
        self.asked = []

    def clip(self, req: Req, start: int, take: int) -> int | Wait:
        self.asked.append(req.rid)
        return take if self.wait is None or (req.rid == "long" and start < 4) else self.wait


def begun(stage: Waits, **more: object) -> Harness:
    """A scheduler in which `long` is between two chunks."""
    harness = Harness(chunk=4, joining=[stage], **more)  # type: ignore[arg-type]
    harness.submit("long", LONG, 2, **IGNORE)
    harness.step()
    return harness


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_others_are_admitted_in_the_place_of_one_that_is_skipped(loop: str) -> None:
    stage = Waits(Wait.SKIP)
    harness = begun(stage, loop=loop, max_running_requests=2)
    for rid in ("short", "second"):
        harness.submit(rid, [3] * 2, 4, **IGNORE)
    for _ in range(20):
        harness.step()
        assert len(harness.scheduler.running) <= 1, "the request between two chunks has a row as well"
    assert harness.scheduler.planner.chunked is harness.scheduler.requests.alive["long"]
    assert harness.tokens("short") == harness.tokens("second") == oracle([3] * 2, 4, ignore_eos=True)
    stage.wait = None
    harness.run()
    assert harness.tokens("long") == oracle(LONG, 2, ignore_eos=True)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_one_that_is_skipped_keeps_a_claim_to_memory(ignore_eos: bool) -> None:
    stage = Waits(Wait.SKIP)
    harness = begun(stage, tokens=20, cache="none")
    # 4 tokens are computed and 13 are to come, which leaves 3 for others.
    harness.submit("large", [3] * 4, 6, sampling={"ignore_eos": ignore_eos})
    for _ in range(3):
        harness.step()
    assert not harness.scheduler.running
    stage.wait = None
    harness.run()
    assert harness.scheduler.counters.retractions == 0


def test_only_one_prompt_at_a_time_is_computed_in_chunks() -> None:
    stage = Waits(Wait.SKIP)
    harness = begun(stage)
    harness.submit("longer", [4] * 9, 2, **IGNORE)
    for _ in range(3):
        harness.step()
    assert not harness.scheduler.running
    assert harness.scheduler.planner.chunked is harness.scheduler.requests.alive["long"]
    stage.wait = None
    harness.run()
    assert harness.tokens("longer") == oracle([4] * 9, 2, ignore_eos=True)


def test_others_are_asked_and_not_admitted_while_one_is_held() -> None:
    stage = Waits(Wait.HOLD)
    harness = begun(stage)
    for rid in ("short", "other"):
        harness.submit(rid, [3] * 2, 4, **IGNORE)
    harness.step()
    assert stage.asked == ["long", "other"]
    assert not harness.scheduler.running
    stage.wait = None
    harness.run()


def test_nothing_is_admitted_after_stop() -> None:
    stage = Waits(Wait.STOP)
    harness = begun(stage)
    harness.submit("short", [3] * 2, 4, **IGNORE)
    harness.step()
    assert not harness.scheduler.running
    stage.wait = None
    harness.run()


@pytest.mark.parametrize("wait", Wait)
def test_what_a_stage_waits_for_takes_no_pages_from_others(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Waits(wait)
    harness = Harness(chunk=4, joining=[stage], run=16)
    monkeypatch.setattr(harness.memory, "trim", lambda running: pytest.fail("memory is not short"))
    harness.submit("decoding", [5] * 3, 40, **IGNORE)
    harness.step()
    harness.submit("long", LONG, 2, **IGNORE)
    for _ in range(14):
        harness.step()
    assert harness.scheduler.planner.chunked is not None
    stage.wait = None
    harness.run()


def test_no_prefill_leaves_out_decodes_that_lack_memory() -> None:
    left_out: list[list[Req]] = []

    def noted(batch: ScheduleBatch) -> None:
        running = harness.scheduler.running
        missing = [running[place] for place in running.decoding().tolist() if running[place] not in batch.reqs]
        if missing:
            left_out.append(missing)

    harness = Harness(
        loop="overlap",
        tokens=64,
        run=1,
        chunk=4,
        cache="none",
        mixed_chunk=True,
        new_token_ratio=0.05,
        new_token_ratio_floor=0.1,
        hooks=StepHooks(batch_scheduled=(noted,)),
    )
    lengths = [11, 3, 4, 11, 12, 3, 3, 2]
    for place, length in enumerate(lengths, start=1):
        harness.submit(f"r{place}", [place] * length, 20)
    harness.run()
    assert harness.scheduler.counters.retractions, "memory was never short"
    assert not left_out
    for place, length in enumerate(lengths, start=1):
        assert harness.tokens(f"r{place}") == oracle([place] * length, 20)
