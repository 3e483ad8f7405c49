"""The stage and its part, put to the suite of tokens ahead."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from pegboard.conformance.stage.ahead import AheadContract
from pegboard.core.interfaces.stage import DevicePart, Stage
from pegboard.core.pipeline.step_log import StepReport
from pegboard.plugins.speculation.options import SpeculationSection
from pegboard.plugins.speculation.part import SpeculationPart
from pegboard.plugins.speculation.stage import Speculation
from pegboard.toolkit.sampling import tree
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


def test_a_decode_line_tells_of_drafts(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(speculator=Seer(1.0))
    harness.scheduler.stages.report = StepReport(1)
    with caplog.at_level(logging.INFO, "pegboard"):
        harness.submit("a", [1, 2, 3], 24)
        harness.run()
    lines = [record for record in caplog.records if vars(record).get("event") == "decode"]
    assert lines
    assert all(", accept len: " in record.getMessage() for record in lines)
    told = sum(vars(record)["accepted_tokens"] for record in lines)
    assert told == harness.points.reports.figures()["accepted_tokens"] > 0
