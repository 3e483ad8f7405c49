"""The stage and its part, put to the suite of tokens ahead."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from pegboard.conformance.stage.ahead import AheadContract
from pegboard.core.interfaces.batch import BatchExtras
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.req import Req, ReqKV
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.stage import DevicePart, Stage
from pegboard.plugins.speculation.messages import Said
from pegboard.plugins.speculation.options import SpeculationSection
from pegboard.plugins.speculation.part import SpeculationPart
from pegboard.plugins.speculation.stage import Speculation
from pegboard.toolkit.sampling import tree
from pegboard.toolkit.system.step_report import StepReport
from tests.core.pipeline.harness import VOCAB, Harness, Seer


class Judging(Seer):
    """Accepts what the logits make likeliest at each node."""

    def accept(self, trees: Any, logits: torch.Tensor, sampling: Any, rows: Any) -> Any:
        return tree.walk(trees, logits.argmax(1).numpy())


def failed(speculator: object) -> None:
    raise AssertionError(f"{type(speculator).__name__} is taken for failed")


@pytest.mark.parametrize("shape", ["chain", "tree"])
class TestSpeculation(AheadContract):
    @pytest.fixture(autouse=True)
    def shaped(self, shape: str) -> None:
        self.shape = shape

    def make_stage(self) -> Stage:
        settings = SpeculationSection(adaptive=False)
        return Speculation(Judging(0.7, self.shape), settings, VOCAB, failed, judges=True)

    def make_part(self) -> DevicePart:
        return SpeculationPart(Judging(0.7, self.shape), failed, judges=True)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_a_stream_says_at_its_end_what_was_drafted(loop: str) -> None:
    """Totals never fall, and the last output has them, though steps without drafts say nothing."""
    harness = Harness(speculator=Seer(0.7), loop=loop, speculation={"adaptive": False, "max_batch": 1})
    harness.submit("a", [1, 2, 3], 30, stream=True, sampling={"ignore_eos": True})
    for _ in range(4):
        harness.step()
    harness.submit("b", [4, 5, 6], 60, stream=True, sampling={"ignore_eos": True})
    harness.run()
    ends = []
    for rid in "ab":
        said = [(output.features or {}).get("speculation") for output in harness.outputs[rid]]
        told = [msgspec.msgpack.decode(one, type=Said) for one in said if one is not None]
        drafted = [one.drafted for one in told]
        assert drafted == sorted(drafted)
        assert None in said, "some step had no drafts"
        assert said[-1] is not None, "the last one says it"
        ends.append(told[-1])
    figures = harness.points.reports.figures()
    assert sum(one.drafted for one in ends) == figures["drafted_tokens"] > 0
    assert sum(one.accepted for one in ends) == figures["accepted_tokens"] > 0


def step_of(number: int, *reqs: Req, decoding: int = 0, mode: ForwardMode = ForwardMode.EXTEND) -> Any:
    """A step as the stage sees it, of which nothing was drafted."""
    batch = SimpleNamespace(reqs=list(reqs), decoding=decoding, forward_mode=mode, trees=None, gained=None)
    work = SimpleNamespace(rows=None, prefix_lens=None, extend_lens=None, logits_indices=None, trees=None)
    return SimpleNamespace(
        number=number, batch=batch, work=work, kvs=[req.kv for req in reqs], sampled=list(reqs), notes={}
    )


def test_a_request_is_fresh_in_the_pass_that_brings_its_memory() -> None:
    seer = Judging(0.7, "chain")
    stage = Speculation(seer, SpeculationSection(), VOCAB, failed, device=cast("Any", SimpleNamespace(lookback=0)))

    def fresh(step: Any) -> list[bool]:
        told = stage.pack(step, BatchExtras(len(step.kvs), 0))
        assert told is not None
        return cast("list[bool]", told.fresh.tolist())

    one, other, brought = (Req(rid, np.arange(4), SamplingParams()) for rid in ("one", "other", "brought"))
    first = step_of(1, one)
    assert (fresh(first), fresh(first)) == ([True], [True]), "halves have its number"
    assert fresh(step_of(2, other, one, decoding=1)) == [True, False]
    stage.commit(step_of(3, brought, mode=ForwardMode.PREBUILT), cast("Any", None))
    assert fresh(step_of(4, other, brought, one, decoding=1)) == [False, False, False], "these go on"
    one.kv = ReqKV()
    assert fresh(step_of(5, one)) == [True], "its memory was taken"


def test_a_decode_line_tells_of_drafts(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(speculator=Seer(1.0))
    harness.scheduler.components.report = StepReport(1)
    with caplog.at_level(logging.INFO, "pegboard"):
        harness.submit("a", [1, 2, 3], 24)
        harness.run()
    lines = [record for record in caplog.records if vars(record).get("event") == "decode"]
    assert lines
    assert all(", accept len: " in record.getMessage() for record in lines)
    told = sum(vars(record)["accepted_tokens"] for record in lines)
    assert told == harness.points.reports.figures()["accepted_tokens"] > 0
