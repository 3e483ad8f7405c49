"""Same tokens as without speculation, whatever is drafted and whatever the scheduler does meanwhile.

The requests, their references and the arrangements are those of test_scheduling_matrix; drafts are recorded outputs,
right as often as asked, or what n-grams find.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from pegboard.conformance.covering import covering
from tests.e2e.test_scheduling_matrix import ROOMY, TIGHT, Cell, World, run_config, world
from tests.token_prompts import prompt_ids

__all__ = ["world"]


class Setting(NamedTuple):
    """What is drafted, `shape` and the drill's `hit_rate`, and in which arrangement."""

    drafts: tuple[str, float]
    policy: str
    loop: str
    chunk: int
    mixed: bool
    page_size: int
    tokens: int

    @property
    def cell(self) -> Cell:
        cache = "radix" if self.page_size == 1 else "block"
        return Cell(self.policy, self.loop, self.chunk, self.mixed, self.page_size, self.tokens, cache)

    def config(self, world: World) -> dict[str, Any]:
        return {**self.cell.config(world), "speculation": self.speculation(world)}

    def speculation(self, world: World) -> dict[str, Any]:
        shape, hit_rate = self.drafts
        common = {"max_nodes": 8, "max_batch": 16, "adaptive": False}
        if shape == "ngram":
            return {"use": "ngram", **common}
        outputs = {" ".join(map(str, prompt_ids(one.request))): one.answer.token_ids for one in world.cases}
        return {"use": "drill", **common, "outputs": outputs, "shape": shape, "hit_rate": hit_rate, "ragged": True}

    def __str__(self) -> str:
        return f"{self.drafts[0]}-{self.drafts[1]:g}-{self.cell}"


RATES = (0.0, 0.3, 0.7, 1.0)
VALUES: tuple[Sequence[Any], ...] = (
    [*itertools.product(("chain", "tree"), RATES), ("ngram", 0.0)],
    ("fcfs", "lof", "priority", "random"),
    ("normal", "overlap"),
    (32, 256, 0),
    (False, True),
    (1, 16),
    (TIGHT, ROOMY),
)
ALL = list(itertools.starmap(Setting, itertools.product(*VALUES)))
PAIRS = covering(ALL)
FEW = [
    Setting(("chain", 0.7), "fcfs", "overlap", 32, True, 16, TIGHT),
    Setting(("tree", 0.7), "lof", "normal", 0, False, 1, TIGHT),
    Setting(("tree", 1.0), "priority", "overlap", 256, True, 1, ROOMY),
    Setting(("chain", 0.3), "random", "normal", 32, False, 16, ROOMY),
    Setting(("ngram", 0.0), "fcfs", "normal", 256, False, 16, TIGHT),
    Setting(("chain", 1.0), "random", "overlap", 0, True, 1, TIGHT),
]
"""With `make test`: each value of every setting once at least."""
REST = [*(one for one in PAIRS if one not in FEW), *covering(ALL, 3, beside=PAIRS)]


def check(setting: Setting, world: World) -> None:
    stats = run_config(setting.config(world), world)
    shape, hit_rate = setting.drafts
    assert stats["verify_steps"] > 0
    assert stats["drafted_tokens"] >= stats["accepted_tokens"]
    if hit_rate:
        assert stats["accepted_tokens"] > 0
    if hit_rate == 1.0 and shape == "chain":
        assert stats["accepted_tokens"] > 0.95 * stats["drafted_tokens"]
    if setting.tokens == TIGHT:
        assert stats["retractions"] > 0, "the pool was meant to be small"


@pytest.mark.parametrize("setting", FEW, ids=str)
def test_some_settings(setting: Setting, world: World) -> None:
    check(setting, world)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", REST, ids=str)
def test_every_pair_and_triple_of_settings(setting: Setting, world: World) -> None:
    check(setting, world)
