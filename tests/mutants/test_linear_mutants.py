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


PRODUCT = "test_products_are_those_of_the_exact_weights"
MUTANTS = [
    Mutant(TurnsParts, LinearContract, PRODUCT),
    Mutant(FirstLayoutForAll, LinearContract, PRODUCT),
    Mutant(RoundsTwice, LinearContract, PRODUCT),
    Mutant(LosesTheBias, LinearContract, PRODUCT),
    Mutant(ScalesInPlace, LinearContract, "test_changes_nothing"),
    Mutant(SkipsZeros, LinearContract, "test_never_looks_at_data", says="item"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
