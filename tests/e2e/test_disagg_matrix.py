"""Same tokens from two engines as from one: prompts are computed on one, and answers written on the other.

The requests and their references are those of test_scheduling_matrix.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest

from pegboard.conformance.covering import covering
from tests.e2e.disagg_pair import Pair, assert_answered, pair
from tests.e2e.test_scheduling_matrix import TIGHT, World, check, world

__all__ = ["world"]


class Setting(NamedTuple):
    loop: str
    chunk: int
    pages: tuple[int, int]
    transfer: str
    tight: bool

    def config(self, world: World, page_size: int, tokens: int) -> dict[str, Any]:
        return world.config(
            memory={"page_size": page_size, "max_total_tokens": tokens},
            scheduler={
                "loop": self.loop,
                "chunked_prefill_size": self.chunk,
                "max_running_requests": 24,
                "estimate_max_new_tokens": 1 if self.tight else 4096,
            },
        )

    def pair(self, world: World, **options: Any) -> Any:
        prefill = self.config(world, self.pages[0], 2 * TIGHT if self.tight else 4096)
        decode = self.config(world, self.pages[1], TIGHT if self.tight else 4096)
        return pair(prefill, decode, transfer=self.transfer, **options)

    def __str__(self) -> str:
        tight = "tight" if self.tight else "roomy"
        return f"{self.loop}-chunk_{self.chunk}-pages_{self.pages[0]}_{self.pages[1]}-{self.transfer}-{tight}"


VALUES: tuple[tuple[Any, ...], ...] = (
    ("normal", "overlap"),
    (32, 256, 0),
    ((1, 1), (16, 16), (1, 16), (16, 1)),
    ("tcp", "inproc"),
    (False, True),
)
ALL = list(itertools.starmap(Setting, itertools.product(*VALUES)))
FEW = [Setting("overlap", 32, (16, 1), "tcp", False)]
REST = [one for one in covering(ALL, 2) if one not in FEW]


def run(setting: Setting, world: World) -> None:
    with setting.pair(world) as both:
        answers, firsts = both.ask([case.request for case in world.cases])
        assert_answered([*answers, *firsts])
        check(world.cases, answers)
        assert all(len(one.token_ids) <= 1 for one in firsts)
        check_moved(both, world)
        both.settle()
        both.check_books()


def check_moved(both: Pair, world: World) -> None:
    """Nothing was computed twice, unless it was retracted."""
    stats = both.decode.stats()
    assert stats["gate_stats"]["disagg"]["rooms_arrived_total"] == len(world.cases)
    if not stats["retractions"]:
        assert stats["prompt_tokens"] == 0


@pytest.mark.parametrize("setting", FEW, ids=str)
def test_two_engines(setting: Setting, world: World) -> None:
    run(setting, world)


@pytest.mark.full
@pytest.mark.parametrize("setting", REST, ids=str)
def test_every_pair_of_settings(setting: Setting, world: World) -> None:
    run(setting, world)
