"""The stage, put to the suite of stages: requests of three adapters, for which there are two slots."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import pytest

from pegboard.conformance.stage import StageContract
from pegboard.core.interfaces.stage import Stage
from pegboard.core.interfaces.step import AnySource, CoreServices
from pegboard.plugins.adapters.options import AdapterSection
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
