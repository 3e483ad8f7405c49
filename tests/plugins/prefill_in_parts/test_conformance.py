"""The source of split prefills, by its suite."""

from __future__ import annotations

import pytest

from pegboard.conformance.stage.sources import SourceContract
from pegboard.core.interfaces.stage import Stage
from pegboard.plugins.prefill_in_parts.stage import PrefillInParts


class TestPrefillInParts(SourceContract):
    layers = 1

    @pytest.fixture(autouse=True, params=[1, 2])
    def _layers(self, request: pytest.FixtureRequest) -> None:
        self.layers = request.param

    def make_stage(self) -> Stage:
        return PrefillInParts(self.layers, 3)
