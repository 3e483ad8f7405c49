"""What a sampler with parameters of requests owes: the part of the suite about the capability `params`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pegboard.conformance.suite import ContractSuite, capability, lacks
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampler import Sampler, SamplerContext
from pegboard.core.interfaces.sampling import SAMPLING_ROW, SamplingBatch, SamplingParams, SamplingRow

VOCAB = 64
SEEDS = 20
"""Draws of each request: parameters that are mixed up seldom change every one of them."""
_NOTHING = np.empty(0, np.int64)


class SamplerParams(ContractSuite):
    """The author's class says in `asking` what requests may say to the sampler."""

    def asking(self) -> Sequence[SamplingParams]:
        """Parameters of requests that bring some for it; by default its own name with nothing."""
        return [SamplingParams(extra={self.subject.own_name: {}})]

    def with_params(self) -> tuple[Sampler, str, list[SamplingParams]]:
        """Return a sampler, the name by which requests mean it, and `asking`. Skips where the suite's guess is
        refused.
        """
        sampler: Sampler = self.build(SamplerContext(vocab_size=VOCAB, device=torch.device("cpu")))
        asking = list(self.asking())
        names = {name for params in asking for name in params.extra}
        assert len(names) == 1, f"requests with parameters for a sampler name it: {sorted(names)}"
        for params in asking:
            refused, taken = _ask(sampler, params)
            if type(self).asking is SamplerParams.asking and not taken:
                pytest.skip(f"override asking: the suite cannot know what requests say to it ({refused or 'nothing'})")
            assert refused is None, f"it refuses {params.extra}, which `asking` has: {refused}"
            assert taken, f"`wants` is False for {params.extra}, which `asking` has"
        return sampler, names.pop(), asking

    @lacks("params")
    def test_no_parameters_are_taken(self) -> None:
        sampler: Sampler = self.build(SamplerContext(vocab_size=VOCAB, device=torch.device("cpu")))
        assert sampler.wants(SamplingParams(extra={self.subject.own_name: {}})) is False, (
            "declare the capability params"
        )

    @capability("params")
    def test_requests_without_parameters_want_nothing(self) -> None:
        sampler, _, _ = self.with_params()
        for params in (SamplingParams(), SamplingParams(temperature=0.5, seed=3), SamplingParams(extra={"other": {}})):
            assert sampler.wants(params) is False, f"{params} says nothing to it, and would cost every batch its rows"

    @capability("params")
    @pytest.mark.parametrize("said", [{"no_such_parameter": 1}, {"": None}, {"0": [{"a": "b"}]}], ids=str)
    def test_parameters_that_it_does_not_know_are_refused(self, said: Any) -> None:
        sampler, name, asking = self.with_params()
        for params in asking:
            given = {**params.extra[name], **said}
            refused, _ = _ask(sampler, msgspec.structs.replace(params, extra={name: given}))
            assert refused is not None, f"custom_params.{name} = {given} is taken: refuse what it does not know"
            assert refused.status == 400
            assert (refused.param or "").startswith(f"custom_params.{name}"), f"the error names {refused.param!r}"

    @capability("params")
    @pytest.mark.parametrize("wrong", [math.nan, math.inf, -(10**30), "\x00", [[[]]], {"a": {}}, True], ids=str)
    def test_values_that_make_no_sense_are_taken_or_refused(self, wrong: Any) -> None:
        """Each parameter of `asking` with something else in its place: InvalidRequest, or a draw that works."""
        sampler, name, asking = self.with_params()
        for params in asking:
            for parameter in params.extra[name]:
                odd = msgspec.structs.replace(params, extra={name: {**params.extra[name], parameter: wrong}})
                refused, taken = _ask(sampler, odd)
                if refused is not None:
                    assert (refused.param or "").startswith(f"custom_params.{name}"), f"{parameter}: {refused.param}"
                elif taken:
                    assert 0 <= _draw(sampler, [odd], 0)[0] < VOCAB

    @capability("params")
    @capability("seeded")
    def test_a_request_with_parameters_leaves_others_alone(self) -> None:
        """Rows in any place, with neighbours of any kind, and steps that are repeated."""
        sampler, _, asking = self.with_params()
        plain = SamplingParams()
        for seed in range(SEEDS):
            alone = {id(params): _draw(sampler, [params], seed)[0] for params in (plain, *asking)}
            for batch in ([plain, *asking, plain], [*reversed(asking), plain], [*asking, *asking]):
                expected = [alone[id(params)] for params in batch]
                rows = _rows(batch)
                assert _draw(sampler, batch, seed, rows) == expected, f"in a batch of {len(batch)}: {_MIXED_UP}"
                assert _draw(sampler, batch, seed, rows) == expected, "a step that is repeated draws something else"


def _ask(sampler: Sampler, params: SamplingParams) -> tuple[InvalidRequest | None, bool]:
    try:
        return None, sampler.wants(params)
    except InvalidRequest as error:
        return error, False


def _rows(batch: Sequence[SamplingParams]) -> list[SamplingRow]:
    return [SamplingRow(params, np.array([1, 2, 3], np.int64), _NOTHING) for params in batch]


def _draw(
    sampler: Sampler, batch: Sequence[SamplingParams], seed: int, rows: list[SamplingRow] | None = None
) -> list[int]:
    """Return one token per request, all from equal logits, with equal seeds and at the same step."""
    n = len(batch)
    free = SamplingParams(temperature=1.0)
    numbers = np.array([free.row(seed, VOCAB)] * n, list(SAMPLING_ROW))
    sampling = SamplingBatch.of(numbers, torch.full((n,), 5, dtype=torch.int64), VOCAB, torch.from_numpy)
    sampling.rows = _rows(batch) if rows is None else rows
    logits = torch.linspace(-1.0, 1.0, VOCAB).roll(17).expand(n, -1).clone()
    return [int(token) for token in sampler.sample(logits, sampling)]


_MIXED_UP = (
    "a draw depends on more than its own request. Read the parameters of the row of the same number in batch.rows, and "
    "keep state in SamplingRow.memo"
)
