"""Broken products with quantised weights, each caught by the test that is meant for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.quantization.dense import Dense
from pegboard.plugins.quantization.suite.linear import LinearContract
from pegboard.plugins.quantization.torch_products import TorchProducts
from pegboard.toolkit.kernels.experts import Groups
from pegboard.toolkit.model.experts import ExpertsMethod
from pegboard.toolkit.model.layouts import PLAIN, Codes, Layout, exact
from pegboard.toolkit.model.linear import LinearMethod, Site


class TurnsParts(TorchProducts):
    """The last one first."""

    def build(self, site: Site, parts: Sequence[tuple[Layout, Codes]]) -> LinearMethod:
        return super().build(site, parts[::-1])


class FirstLayoutForAll(TorchProducts):
    """Looks at the code of the first part alone where others are of the same size and have the same blocks."""

    def build(self, site: Site, parts: Sequence[tuple[Layout, Codes]]) -> LinearMethod:
        first = parts[0][0]

        def taken(layout: Layout) -> Layout:
            alike = replace(layout, code=first.code)
            return alike if alike == first and layout.code.bits == first.code.bits else layout

        return super().build(site, [(taken(layout), codes) for layout, codes in parts])


class RoundsTwice(Dense):
    """Through bfloat16."""

    def build(self, site: Site, parts: Sequence[tuple[Layout, Codes]]) -> LinearMethod:
        rounded = [(PLAIN, Codes(exact(layout, codes, torch.bfloat16))) for layout, codes in parts]
        return super().build(site, rounded)


class LosesTheBias(Dense):
    """Of all products."""

    def build(self, site: Site, parts: Sequence[tuple[Layout, Codes]]) -> LinearMethod:
        method = super().build(site, parts)

        class Without(LinearMethod):
            def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
                return method.apply(x)

            @property
            def nbytes(self) -> int:
                return method.nbytes

        return Without()


class Around(LinearMethod):
    """Another method's product, with a fault."""

    def __init__(self, method: LinearMethod) -> None:
        self.method = method

    @property
    def nbytes(self) -> int:
        return self.method.nbytes


class ScalesInPlace(Dense):
    """Halves x to be sure, and doubles the product."""

    def build(self, site: Site, parts: Sequence[tuple[Layout, Codes]]) -> LinearMethod:
        class InPlace(Around):
            def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
                product = self.method.apply(x.mul_(0.5)).mul_(2.0)
                return product if bias is None else product + bias

        return InPlace(super().build(site, parts))


class SkipsZeros(Dense):
    """Looks whether there is anything to compute."""

    def build(self, site: Site, parts: Sequence[tuple[Layout, Codes]]) -> LinearMethod:
        class Looking(Around):
            def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
                if x.numel() and not x.abs().max().item():
                    return torch.zeros(x.shape[0], site.rows, dtype=x.dtype)
                return self.method.apply(x, bias)

        return Looking(super().build(site, parts))


class OneExpertForAll(Dense):
    """The first."""

    def build_experts(self, site: Site, experts: Sequence[Sequence[tuple[Layout, Codes]]]) -> ExpertsMethod:
        return super().build_experts(site, [experts[0]] * len(experts))


class AroundExperts(ExpertsMethod):
    """Another method's products, with a fault."""

    def __init__(self, method: ExpertsMethod) -> None:
        self.method = method

    def apply(self, x: Tensor, groups: Groups, *, gather: bool) -> Tensor:
        return self.method.apply(x, groups, gather=gather)

    @property
    def nbytes(self) -> int:
        return self.method.nbytes


class GathersAlways(Dense):
    """Takes rows that have positions for rows of tokens."""

    def build_experts(self, site: Site, experts: Sequence[Sequence[tuple[Layout, Codes]]]) -> ExpertsMethod:
        class Gathering(AroundExperts):
            def apply(self, x: Tensor, groups: Groups, *, gather: bool) -> Tensor:
                return self.method.apply(x, groups, gather=True)

        return Gathering(super().build_experts(site, experts))


class CountsOnTheHost(Dense):
    """And does not say so."""

    def build_experts(self, site: Site, experts: Sequence[Sequence[tuple[Layout, Codes]]]) -> ExpertsMethod:
        class Counting(AroundExperts):
            def apply(self, x: Tensor, groups: Groups, *, gather: bool) -> Tensor:
                assert groups.offsets[-1].item() == groups.pairs
                return super().apply(x, groups, gather=gather)

        return Counting(super().build_experts(site, experts))


class NeedsAToken(Dense):
    """Of each batch."""

    def build_experts(self, site: Site, experts: Sequence[Sequence[tuple[Layout, Codes]]]) -> ExpertsMethod:
        class Needing(AroundExperts):
            def apply(self, x: Tensor, groups: Groups, *, gather: bool) -> Tensor:
                return super().apply(x, groups, gather=gather) * x.abs().amax().clamp(1, 1)

        return Needing(super().build_experts(site, experts))


class StacksFirstLayout(Dense):
    """Takes the layouts of the first expert for those of all whose codes have its form."""

    def build_experts(self, site: Site, experts: Sequence[Sequence[tuple[Layout, Codes]]]) -> ExpertsMethod:
        first = experts[0][0]
        alike = [[first if layout.code.bits == 0 or layout.block == (1, 0) else (layout, codes)
                  for layout, codes in parts] for parts in experts]  # fmt: skip
        return super().build_experts(site, alike if len(experts[0]) == 1 else experts)


PRODUCT = "test_products_are_those_of_the_exact_weights"
MUTANTS = [
    Mutant(TurnsParts, LinearContract, PRODUCT),
    Mutant(FirstLayoutForAll, LinearContract, PRODUCT),
    Mutant(RoundsTwice, LinearContract, PRODUCT),
    Mutant(LosesTheBias, LinearContract, PRODUCT),
    Mutant(ScalesInPlace, LinearContract, "test_changes_nothing"),
    Mutant(OneExpertForAll, LinearContract, "test_experts_have_weights_of_their_own"),
    Mutant(GathersAlways, LinearContract, "test_experts_have_weights_of_their_own"),
    Mutant(CountsOnTheHost, LinearContract, "test_experts_never_look_at_data", says="item"),
    Mutant(NeedsAToken, LinearContract, "test_experts_and_no_tokens"),
    Mutant(StacksFirstLayout, LinearContract, "test_experts_of_several_layouts"),
    Mutant(SkipsZeros, LinearContract, "test_never_looks_at_data", says="item"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
