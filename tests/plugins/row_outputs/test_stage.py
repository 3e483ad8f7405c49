"""Row outputs against the suite of stages: each of them, with results as a device part would compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.conformance.stage import StageContract, stage_context
from pegboard.conformance.stage.rig import Parts
from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.stage import Stage
from pegboard.plugins.row_outputs.api import PoolSpan
from pegboard.plugins.row_outputs.messages import Asked, Rows
from pegboard.plugins.row_outputs.stage import RowOutputs

CONFIG = SimpleNamespace(model=SimpleNamespace(hidden_states=True))
RUNNER = frozenset({"hidden_states", "input_logprobs"})


class LastToken:
    """Pools the last token of a prompt."""

    def rows(self, span: PoolSpan) -> range:
        return range(span.count - 1, span.count) if span.start + span.count == span.length else range(0)

    def first(self, length: int) -> int:
        return length - 1

    def combine(self, partials: Sequence[NDArray[np.float32]], length: int) -> NDArray[np.float32]:
        (only,) = partials
        return only


def pooler(contract: object, ctx: object) -> Any:
    return LastToken()


@pytest.mark.parametrize(
    "asked", [Asked(logprob_start=0), Asked(hidden_states=True), Asked(0, True), Asked(embed=True)], ids=str
)
class TestRowOutputs(StageContract):
    @pytest.fixture(autouse=True)
    def _asked(self, asked: Asked) -> None:
        self.asked = asked

    def make_stage(self) -> Stage:
        return RowOutputs(stage_context(config=CONFIG, runner=RUNNER, provider=pooler))

    def feature(self) -> object:
        return self.asked

    def compute(self, payload: object, work: ModelWorkerBatch) -> Parts:
        assert isinstance(payload, Rows)
        made: dict[str, Callable[[int], NDArray[Any]]] = {
            "logprobs": lambda n: np.zeros(n, np.float32),
            "pooled": lambda n: np.zeros((n, 8), np.float32),
            "hidden": lambda n: np.zeros((n, 8), np.float32),
        }
        counts = (len(payload.logprob_rows), len(payload.pool_spans), len(payload.hidden_rows))
        return {name: make(count) for (name, make), count in zip(made.items(), counts, strict=True) if count}
