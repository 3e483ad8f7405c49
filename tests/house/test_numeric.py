"""How `make test-full` tries the numeric tests as other machines would add."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests import numeric
from tests.worst_order import ROUNDING, WorstOrder


def test_each_other_instruction_set_has_a_run() -> None:
    first, *others = numeric.runs("AVX512", ("amx", "avx512", "avx2"))
    assert [run.name for run in others] == [
        "ATEN_CPU_CAPABILITY=avx2 NATIVE_INSTRUCTIONS=avx512",
        "ATEN_CPU_CAPABILITY=default NATIVE_INSTRUCTIONS=avx2",
    ]
    assert {run.paths for run in others} == {numeric.FOLDERS}
    assert [run.name for run in numeric.runs("AVX2", ("avx2",))] == [first.name, "ATEN_CPU_CAPABILITY=default"]
    assert numeric.runs("DEFAULT", ()) == [first]
    assert [(run.name, run.paths) for run in numeric.runs("DEFAULT", ("avx512", "avx2"))[1:]] == [
        ("NATIVE_INSTRUCTIONS=avx2", numeric.NATIVE)
    ]
    assert not [pattern for pattern in numeric.FOLDERS if not list(numeric.TESTS.glob(pattern))]


def test_products_are_off_as_in_the_worst_order() -> None:
    """By 2^-24 / sqrt(6) of the norms' product, which a sum of float32 that takes one term after the other shows."""
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, 600, generator=draw), torch.randn(50, 600, generator=draw)
    exact = a.double() @ b.double().T
    norms = a.double().norm(dim=1)[:, None] * b.double().norm(dim=1)
    one_by_one = torch.zeros(40, 50)
    for term in range(600):
        one_by_one += a[:, term, None] * b[:, term]
    with torch.inference_mode(), WorstOrder():
        found, again = F.linear(a, b), F.linear(a, b)
    assert torch.equal(found, again), "it depends on the sums alone"
    for sums in (found, one_by_one):
        error = float(((sums - exact) / norms / ROUNDING).square().mean().sqrt())
        assert 0.25 < error < 0.45, error


def test_what_is_exact_everywhere_stays() -> None:
    x = torch.randn(7, 30)
    expected = (x.double().sum(0), x @ torch.zeros(30, 2), torch.arange(10.0).sum(), torch.ones(9).cumsum(0))
    with WorstOrder():
        found = (x.double().sum(0), x @ torch.zeros(30, 2), torch.arange(10.0).sum(), torch.ones(9).cumsum(0))
        assert not torch.equal(x.mean(0), x.sum(0) / 7)
    assert all(map(torch.equal, found, expected))
