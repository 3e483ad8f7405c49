"""Broken samplers with parameters of requests, and the tests of the suite that notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import pytest
import torch

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.sampler import SamplerContract
from pegboard.core.interfaces.sampling import SamplingBatch, SamplingParams
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from pegboard.toolkit.sampling.custom_params import read_params

NAME = "lift"


class Lift(msgspec.Struct, forbid_unknown_fields=True):
    token: Annotated[int, msgspec.Meta(ge=0, lt=10)]
    by: Annotated[float, msgspec.Meta(ge=0, le=100)] = 50.0


class Lifting(TorchSampler):
    """Lifts a token that a request names."""

    def wants(self, params: SamplingParams) -> bool:
        return read_params(params, NAME, Lift) is not None

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        for index, row in enumerate(batch.rows):
            if (said := self.lift(index, batch)) is not None:
                logits[index, said.token] += said.by + 0 * row.generated
        return super().sample(logits, batch)

    def lift(self, index: int, batch: SamplingBatch) -> Lift | None:
        return read_params(batch.rows[index].params, NAME, Lift)


class LiftSuite(SamplerContract):
    def asking(self) -> Sequence[SamplingParams]:
        return [SamplingParams(extra={NAME: {"token": 3}}), SamplingParams(extra={NAME: {"token": 7, "by": 60.0}})]


class WantsEverything(Lifting):
    def wants(self, params: SamplingParams) -> bool:
        return super().wants(params) or True


class WantsNothing(Lifting):
    def wants(self, params: SamplingParams) -> bool:
        return False


class ChecksNothing(Lifting):
    def wants(self, params: SamplingParams) -> bool:
        return NAME in params.extra

    def lift(self, index: int, batch: SamplingBatch) -> Lift | None:
        said = batch.rows[index].params.extra.get(NAME)
        return None if said is None else Lift(said["token"], said.get("by", 50.0))


class TakesTheFirstRows(Lifting):
    def lift(self, index: int, batch: SamplingBatch) -> Lift | None:
        found = (read_params(row.params, NAME, Lift) for row in batch.rows)
        return next((one for one in found if one is not None), None)


class LiftsOnce(Lifting):
    """Counts its calls, and a step may be repeated."""

    def lift(self, index: int, batch: SamplingBatch) -> Lift | None:
        memo = batch.rows[index].memo
        memo[self] = memo.get(self, 0) + 1
        return super().lift(index, batch) if memo[self] == 1 else None


PROVIDES = frozenset({"seeded", "params"})


def mutant(factory: type, caught_by: str, says: str = "", *, provides: frozenset[str] = PROVIDES) -> Mutant:
    base = TorchSampler if "params" not in provides else Lifting
    return Mutant(factory, suite=LiftSuite, caught_by=caught_by, provides=provides, says=says, base=base)


MUTANTS = [
    mutant(WantsEverything, "test_requests_without_parameters_want_nothing", "says nothing to it"),
    mutant(WantsNothing, "test_requests_without_parameters_want_nothing", "`wants` is False"),
    mutant(ChecksNothing, "test_parameters_that_it_does_not_know_are_refused", "refuse what it does not know"),
    mutant(ChecksNothing, "test_values_that_make_no_sense_are_taken_or_refused"),
    mutant(TakesTheFirstRows, "test_a_request_with_parameters_leaves_others_alone", "batch.rows"),
    mutant(LiftsOnce, "test_a_request_with_parameters_leaves_others_alone", "a step that is repeated"),
    mutant(
        WantsEverything,
        "test_no_parameters_are_taken",
        "declare the capability params",
        provides=frozenset({"seeded"}),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
