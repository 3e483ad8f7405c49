"""Broken formats of weights, each caught by the test that is meant for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext
from pegboard.plugins.quantization.formats.awq import ORDER, Awq
from pegboard.plugins.quantization.formats.compressed import CompressedTensors
from pegboard.plugins.quantization.formats.fp8 import Fp8
from pegboard.plugins.quantization.formats.gptq import Gptq
from pegboard.plugins.quantization.formats.nvfp4 import nvfp4_matrix
from pegboard.toolkit.model.coded import Blocks, CodedMatrix
from pegboard.toolkit.model.layouts import Layout
from tests.plugins.quantization.test_conformance import TestAwq as OfAwq
from tests.plugins.quantization.test_conformance import TestCompressedTensors as OfCompressedTensors
from tests.plugins.quantization.test_conformance import TestFp8 as OfFp8
from tests.plugins.quantization.test_conformance import TestGptq as OfGptq

Matrices = Mapping[str, CodedMatrix]


def with_blocks(matrices: Matrices, change: Callable[[Blocks], Blocks]) -> Matrices:
    """Return matrices whose scales, zeros and groups are changed."""

    def changed(matrix: CodedMatrix) -> CodedMatrix:
        return replace(matrix, blocks=lambda tensors: change(matrix.blocks(tensors)))

    return {name: changed(matrix) for name, matrix in matrices.items()}


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


class DividesByScales(Fp8):
    """As `weight_scale_inv` sounds."""

    def matrices(self) -> Matrices:
        return with_blocks(
            super().matrices(), lambda found: Blocks(1 / _known(found.scales), found.zeros, found.groups)
        )


class MultipliesByTheInverse(CompressedTensors):
    """Takes NVFP4's scale of a matrix as ModelOpt's, by which scales are multiplied."""

    def matrices(self) -> Matrices:
        return {name: self._changed(matrix) for name, matrix in super().matrices().items()}

    @staticmethod
    def _changed(matrix: CodedMatrix) -> CodedMatrix:
        overall = matrix.slots.get("overall")
        if overall is None:
            return matrix
        return nvfp4_matrix(matrix.codes, matrix.slots["scales"], overall, divided=False)


class StretchesTheLastBlock(Fp8):
    """Divides a matrix evenly into as many blocks as there are scales."""

    def matrices(self) -> Matrices:
        return {name: replace(one, layout=self._even(one)) for name, one in super().matrices().items()}

    @staticmethod
    def _even(matrix: CodedMatrix) -> Layout:
        rows, cols = matrix.shape
        high, wide = matrix.layout.grid(rows, cols)
        return replace(matrix.layout, block=(-(-rows // high), -(-cols // wide)))


class RoundsScales(Fp8):
    """To the model's type, before the product."""

    def matrices(self) -> Matrices:
        return with_blocks(
            super().matrices(), lambda found: Blocks(_known(found.scales).half(), found.zeros, found.groups)
        )


class TakesEverything(Fp8):
    """Whatever a config says."""

    @classmethod
    def supports(cls, options: NoOptions, ctx: FormatContext) -> str | None:
        return None


class ForgetsActivations(Fp8):
    """And leaves their scales over."""

    def unused(self) -> Sequence[str]:
        return ()


class DoesWithoutScales(Fp8):
    """Where there are none."""

    def matrices(self) -> Matrices:
        from pegboard.core.interfaces.errors import ModelError

        try:
            return super().matrices()
        except ModelError:
            return {}


class HighFirst(CompressedTensors):
    """The other half of each byte."""

    def matrices(self) -> Matrices:
        return {name: self._turned(matrix) for name, matrix in super().matrices().items()}

    @staticmethod
    def _turned(matrix: CodedMatrix) -> CodedMatrix:
        if not matrix.layout.code.packed:
            return matrix

        def turned(codes: Tensor) -> Tensor:
            found = matrix.unpack(codes)
            return (found >> 4) | (found << 4)

        return replace(matrix, unpack=turned)


class ForgetsZeros(CompressedTensors):
    """As if all were symmetric."""

    def matrices(self) -> Matrices:
        return with_blocks(super().matrices(), lambda found: Blocks(found.scales, None, found.groups))


class InOrder(Awq):
    """Of the bits: the second of eight neighbours stands for the third."""

    def matrices(self) -> Matrices:
        return {name: self._straight(matrix) for name, matrix in super().matrices().items()}

    @staticmethod
    def _straight(matrix: CodedMatrix) -> CodedMatrix:
        def straight(codes: Tensor) -> Tensor:
            return matrix.unpack(codes).unflatten(0, (-1, 8))[:, list(ORDER)].flatten(0, 1)

        return replace(matrix, unpack=straight)


class OneMore(Gptq):
    """Whatever the version: every zero point is one higher."""

    def matrices(self) -> Matrices:
        return with_blocks(
            super().matrices(), lambda found: Blocks(found.scales, _known(found.zeros) + 1, found.groups)
        )


class KeepsNeighbours(Gptq):
    """Together, whatever order their groups have."""

    def matrices(self) -> Matrices:
        found = with_blocks(super().matrices(), lambda found: Blocks(found.scales, found.zeros))
        return {name: replace(one, layout=replace(one.layout, ordered=False)) for name, one in found.items()}


MEANING = "test_means_what_its_authors_mean"
MUTANTS = [
    Mutant(DividesByScales, OfFp8, MEANING),
    Mutant(StretchesTheLastBlock, OfFp8, MEANING),
    Mutant(RoundsScales, OfFp8, "test_rounds_once"),
    Mutant(TakesEverything, OfFp8, "test_leaves_others_alone"),
    Mutant(ForgetsActivations, OfFp8, "test_names_what_it_reads", says="input_scale"),
    Mutant(DoesWithoutScales, OfFp8, "test_refuses_codes_without_scales"),
    Mutant(HighFirst, OfCompressedTensors, MEANING),
    Mutant(MultipliesByTheInverse, OfCompressedTensors, MEANING),
    Mutant(ForgetsZeros, OfCompressedTensors, "test_codes_are_as_the_layout_says"),
    Mutant(InOrder, OfAwq, MEANING),
    Mutant(OneMore, OfGptq, MEANING),
    Mutant(KeepsNeighbours, OfGptq, MEANING),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
