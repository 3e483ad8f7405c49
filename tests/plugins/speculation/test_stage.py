"""The stage and its part, put to the suite of tokens ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pegboard.conformance.stage_ahead import AheadContract
from pegboard.core.interfaces.stage import DevicePart, Stage
from pegboard.plugins.speculation.options import SpeculationSection
from pegboard.plugins.speculation.part import SpeculationPart
from pegboard.plugins.speculation.stage import Speculation
from pegboard.toolkit.sampling import tree
from tests.core.pipeline.harness import VOCAB, Seer


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
