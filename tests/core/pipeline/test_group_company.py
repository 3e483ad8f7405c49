"""The games of `test_company` with models whose layers keep states, or read a window: all that such models go with, on
little memory of every kind. The books of every group balance after each step, and nothing is held at the end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Interest, Stage, StepResult, StepView
from pegboard.plugins.recurrent_states.slots import USE, StateSlots
from pegboard.plugins.recurrent_states.stage import States
from pegboard.plugins.windows.pages import WindowPages
from pegboard.plugins.windows.stage import Windows
from pegboard.toolkit.cache.windows import most_pages
from pegboard_drills.grammars import ScriptedMatcher
from tests.core.pipeline.company_model import CompanyModel
from tests.core.pipeline.group_models import GroupModel, KeepsStates, KeepsWindows
from tests.core.pipeline.harness import Seer
from tests.core.pipeline.test_company import Company, arrangement, forced

EACH = 3
"""Slots of a request, enough in both loops."""


class Takes(Stage):
    """Tells whose results are taken."""

    name = "takes"

    def __init__(self) -> None:
        self.tell: Callable[[int], None]

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest(look=False)

    def commit(self, step: StepView, result: StepResult) -> None:
        self.tell(step.number)


class GroupCompany(Company):
    """Without what such models exclude: KV from elsewhere and from the host, and drafts that have branches."""

    brings = False

    def arrange(self) -> dict[str, Any]:
        more = arrangement(self.rng)
        seer = more.pop("speculator", None)
        more = {name: value for name, value in more.items() if name not in {"mover", "max_load_tokens"}}
        more["cache"] = more["cache"].replace("hiradix", "radix")
        self.every = self.rng.choice([4, 16])
        return {**more, **self.drafts(seer)}

    def drafts(self, seer: Seer | None) -> dict[str, Any]:
        return {}

    def _arrange_accidents(self, *given: Any) -> None:
        super()._arrange_accidents(*given)
        assert isinstance(self.model, GroupModel)
        self.model.waits, self.takes.tell = True, self.model.taken
        if self.rng.random() < 0.3:
            # Every fifth pass, but for those of one request: these cost nobody an answer.
            self.failing, self.costly, passes = 0.2, False, 0

            def fails(work: Any) -> bool:
                nonlocal passes
                passes += 1
                return passes % 5 == 0 and len(work.rows) > 1

            self.model.fail_on = fails

    def step(self) -> None:
        super().step()
        assert self.books() is None

    def books(self) -> str | None:
        """How the books of the groups do not balance, or None."""
        raise NotImplementedError

    def check(self) -> None:
        super().check()
        assert self.stage.idle_error() is None

    def stages(self, more: dict[str, Any]) -> Sequence[Stage]:
        self.takes = Takes()
        return [self.own_stage(more), self.takes]

    def own_stage(self, more: dict[str, Any]) -> Stage:
        """Return that of the groups."""
        raise NotImplementedError

    stage: Any


class StateCompany(GroupCompany):
    def drafts(self, seer: Seer | None) -> dict[str, Any]:
        return {} if seer is None else {"speculator": Seer(seer.rate, "chain")}

    def model_of(self, more: dict[str, Any]) -> type[CompanyModel]:
        return type("StateModel", (KeepsStates, CompanyModel), {"count": self.rng.choice([5, 9, 30])})

    def own_stage(self, more: dict[str, Any]) -> Stage:
        page_size, ahead = more["page_size"], self.rng.choice([1, 7])
        self.stage = made = States(lambda count: StateSlots(count, page_size, self.every, EACH, ahead))
        return made

    def books(self) -> str | None:
        slots = self.stage.slots
        own = sum(len(use.own) for use in uses_of(self))
        found = len(slots.free) + len(slots.snapshots) + slots.pending + own
        return None if found == slots.count else f"{found} slots of {slots.count} are there"


class WindowCompany(GroupCompany):
    """A step may be lost for want of pages; the one after it, which is undone, reads what that step has not written."""

    def model_of(self, more: dict[str, Any]) -> type[CompanyModel]:
        rng, page_size = self.rng, more["page_size"]
        self.windows = rng.choice([(5,), (1,), (3, 16)])
        least = max(most_pages(window, page_size) for window in self.windows)
        count = least + rng.choice([0, 4, 3 * least, 60])
        own = {"windows": self.windows, "count": count, "page_size": page_size}
        return type("WindowModel", (KeepsWindows, CompanyModel), own)

    def own_stage(self, more: dict[str, Any]) -> Stage:
        self.stage = made = Windows(lambda memory: WindowPages(self.windows, memory, more["page_size"], self.every))
        return made

    def books(self) -> str | None:
        found: str | None = self.stage.pages.books_error()
        return found


def uses_of(company: Company) -> list[Any]:
    alive = company.scheduler.requests.alive.values()
    return [use for req in alive if (use := USE.peek(req)) is not None]


def play(kind: type[GroupCompany], seed: int, monkeypatch: pytest.MonkeyPatch) -> GroupCompany:
    monkeypatch.setattr(ScriptedMatcher, "forced", forced)
    with tempfile.TemporaryDirectory() as directory:
        company = kind(seed, Path(directory))
        company.run()
    return company


KINDS = pytest.mark.parametrize("kind", [StateCompany, WindowCompany])


@KINDS
@pytest.mark.parametrize("seed", range(8))
def test_all_at_once(kind: type[GroupCompany], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play(kind, seed, monkeypatch)


@pytest.mark.full
@KINDS
def test_some_seeds(kind: type[GroupCompany], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100, 160):
        play(kind, seed, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@KINDS
def test_five_thousand_seeds(
    kind: type[GroupCompany], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """OMP_NUM_THREADS=1 python -m pytest -n 0 -m soak tests/core/pipeline/test_group_company.py, an hour or so."""
    for seed in range(1000, 6000):
        with monkeypatch.context() as patched:  # which keeps all that it patches
            play(kind, seed, patched)
        caplog.clear()  # the tracebacks of failed passes hold all there was
