"""Samplers that say that they never wait for their device, and do."""

from __future__ import annotations

import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.sampler import SamplerContract
from tests.mutants import textbook_sampler as broken


def mutant(factory: type, caught_by: str, says: str) -> Mutant:
    provides = frozenset({"no_sync", "seeded"})
    return Mutant(factory, suite=SamplerContract, caught_by=caught_by, provides=provides, says=says)


MUTANTS = [
    mutant(broken.LooksWhetherAllIsWell, "test_it_never_looks_at_the_device", "looks at data on meta"),
    mutant(broken.PicksTheSampledRows, "test_it_never_looks_at_the_device", "looks at data on meta"),
    mutant(broken.SamplesOnTheHost, "test_it_never_looks_at_the_device", "from meta to cpu"),
    mutant(broken.BringsTokenIdsItself, "test_logprobs_never_look_at_the_device", "brings numbers there"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
