"""KV pools that are broken where layers are in several groups, each caught by the test that is meant for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pegboard.conformance.kv_pool import KVPoolContract
from pegboard.conformance.kv_pool.groups import KVPoolGroupTests
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.plugins.memory_paged.pool import MHAPool

Tensor = torch.Tensor


class GivesAllGroupsTheSame(MHAPool):
    def __init__(self, options: Any, ctx: KVPoolContext) -> None:
        super().__init__(options, replace(ctx, further_pages=()))


class TakesGroupsInReverse(MHAPool):
    def __init__(self, options: Any, ctx: KVPoolContext) -> None:
        super().__init__(options, replace(ctx, further_pages=ctx.further_pages[::-1]))


class WritesAsManyPagesAsTheSmallestGroupHas(MHAPool):
    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        least = min((*self.ctx.further_pages, self.ctx.num_pages))
        super().write(layer_id, slots.clamp(max=(least + 1) * self.page_size - 1), k, v)


MUTANTS = [
    Mutant(factory, suite=KVPoolContract, caught_by=test)
    for factory, test in (
        (GivesAllGroupsTheSame, "test_each_group_has_its_pages"),
        (TakesGroupsInReverse, "test_each_group_has_its_pages"),
        (WritesAsManyPagesAsTheSmallestGroupHas, "test_all_slots_of_all_groups_can_be_written"),
    )
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


def test_every_test_has_a_mutant() -> None:
    own = {name for name in vars(KVPoolGroupTests) if name.startswith("test")}
    assert own == {mutant.caught_by for mutant in MUTANTS}
