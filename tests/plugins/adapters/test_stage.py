"""The stage, put to the suite of stages: requests of three adapters, for which there are two slots."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from pegboard.conformance.stage import StageContract
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.stage import Sent, Stage
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.interfaces.step import AnySource, CoreServices
from pegboard.plugins.adapters.options import AdapterSection
from pegboard.plugins.adapters.slots import USE
from pegboard.plugins.adapters.stage import Adapters
from tests.plugins.adapters.test_store import Far

NAMES = ("a", "b", "c")


class Loaded(Adapters):
    """Its adapters are there at once."""

    def sources(self, core: CoreServices) -> Iterable[AnySource]:
        far = Far()
        # The suite counts what the stage keeps: of the core no more than is called.
        self.core = cast("CoreServices", SimpleNamespace(retract=core.retract))
        self.store.ask = far.ask
        for uid in range(1, len(NAMES) + 1):
            far.end(uid)
        self.store.refresh()
        return ()


class TestAdapters(StageContract):
    @pytest.fixture(autouse=True)
    def _in_turn(self) -> None:
        self._names = itertools.cycle(NAMES)

    def make_stage(self) -> Stage:
        return Loaded(AdapterSection(preload={name: f"/{name}" for name in NAMES}, slots=2, fair_after=0.0))

    def feature(self) -> object:
        return next(self._names)


def test_a_request_whose_adapter_has_failed_says_so() -> None:
    """So that the name is not offered any more; not if another adapter has it since."""
    stage, far = Adapters(AdapterSection(directories=("/",))), Far()
    stage.store.ask = far.ask
    stage.store.load("a", "/a")
    req = Req("1", np.array([1]), SamplingParams())
    USE.of(req).adapter = stage.store.use("a")
    assert stage.send(req, 0, 0) is None
    far.end(1, "it is missing")
    stage.store.refresh()
    req.output.finish_reason = FinishReason(FinishType.ABORT)
    assert stage.send(req, 0, 0) == Sent("a")
    stage.store.load("a", "/a")
    assert stage.send(req, 0, 0) is None
