"""The conformance suite of WeightFormat: what a checkpoint's tensors mean, to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.options import Options
from pegboard.plugins.quantization.api import FormatContext, WeightFormat
from pegboard.toolkit.model.coded import CodedMatrix, slots_of
from pegboard.toolkit.model.layouts import Code

_WRONG = (0.0, math.nan, math.inf)


@dataclass(frozen=True)
class Example:
    """A checkpoint: its `quantization_config`, its tensors by name, and what they mean in float64, by the names of the
    plain tensors that they stand for.
    """

    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    means: Mapping[str, Tensor]


class WeightFormatContract(ContractSuite):
    """What every format must say of its checkpoints. An author overrides `examples`: of all kinds that there are, with
    edges that blocks do not divide.
    """

    contract = "weight_format"

    def examples(self) -> Sequence[Example]:
        """Return checkpoints of the format. Their meaning is computed from the format's description alone."""
        pytest.skip("it has no examples: override `examples`")

    def context(self, directory: Path, example: Example) -> FormatContext:
        """Write an example's tensors, and return what a format is built from."""
        directory.mkdir(exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in example.tensors.items()}
        save_file(tensors, directory / "model.safetensors")
        return FormatContext(example.config, slots_of(directory))

    def made(self, directory: Path, example: Example) -> WeightFormat[Options]:
        """Return the format, built for an example."""
        ctx = self.context(directory, example)
        assert self.objection(ctx) is None, f"it objects to {example.config}"
        made: WeightFormat[Options] = self.provider_class()(self.make_options(), ctx)
        return made

    # Which checkpoints are its own

    def test_leaves_others_alone(self) -> None:
        for config in ({}, {"quant_method": "nobodys"}, {"quant_method": None}):
            reason: object = self.objection(FormatContext(config, {}))
            assert str(reason or "").strip(), f"a checkpoint with {config} is not of this format"

    # What tensors mean

    def test_means_what_its_authors_mean(self, tmp_path: Path) -> None:
        for number, example in enumerate(self.examples()):
            matrices = self.made(tmp_path / str(number), example).matrices()
            assert matrices.keys() == example.means.keys(), example.config
            for name, matrix in matrices.items():
                expected = example.means[name]
                assert matrix.shape == tuple(expected.shape), name
                found = torch.empty(matrix.shape)
                matrix.fill(found)
                assert torch.equal(found, expected.float()), f"{name} of {example.config}: the numbers differ"

    def test_rounds_once(self, tmp_path: Path) -> None:
        for number, example in enumerate(self.examples()):
            for name, matrix in self.made(tmp_path / str(number), example).matrices().items():
                for dtype in (torch.bfloat16, torch.float16):
                    found = torch.empty(matrix.shape, dtype=dtype)
                    matrix.fill(found)
                    expected = example.means[name].float().to(dtype)
                    assert torch.equal(found, expected), f"{name} in {dtype}: rounded on the way"

    def test_codes_are_as_the_layout_says(self, tmp_path: Path) -> None:
        for number, example in enumerate(self.examples()):
            for name, matrix in self.made(tmp_path / str(number), example).matrices().items():
                _check_codes(name, matrix)

    def test_names_what_it_reads(self, tmp_path: Path) -> None:
        for number, example in enumerate(self.examples()):
            made = self.made(tmp_path / str(number), example)
            known = {*made.unused(), *(name for matrix in made.matrices().values() for name in matrix.names)}
            assert example.tensors.keys() <= known, f"tensors without a place: {example.tensors.keys() - known}"

    # What cannot be

    def test_refuses_codes_without_scales(self, tmp_path: Path) -> None:
        for number, example in enumerate(self.examples()):
            for name, *others in _scales(self.made(tmp_path / str(number), example)):
                rest = {other: tensor for other, tensor in example.tensors.items() if other != name}
                self._refused(tmp_path / f"{number} cut", replace(example, tensors=rest), (name, *others))

    def test_refuses_scales_that_do_not_fit(self, tmp_path: Path) -> None:
        for number, example in enumerate(self.examples()):
            for name, *others in _scales(self.made(tmp_path / str(number), example)):
                tensor = example.tensors[name]
                wrong = tensor.new_ones(5, 3) if not tensor.dim() else torch.cat((tensor, tensor, tensor[:1]))
                spoiled = replace(example, tensors={**example.tensors, name: wrong})
                self._refused(tmp_path / f"{number} cut", spoiled, (name, *others))

    def test_refuses_scales_that_are_none(self, tmp_path: Path) -> None:
        for number, example in enumerate(self.examples()):
            made = self.made(tmp_path / str(number), example)
            for (name, *_others), matrix in zip(_scales(made), made.matrices().values(), strict=True):
                for value in _wrong(matrix.layout.code):
                    self._refused(tmp_path / f"{number} cut", _spoiled(example, name, value), (name,))

    def _refused(self, directory: Path, example: Example, names: Sequence[str]) -> None:
        with pytest.raises(ModelError) as caught:
            _check(self.made(directory, example))
        assert any(name in str(caught.value) for name in names), f"the error should name {names[0]}: {caught.value}"


def _wrong(code: Code) -> tuple[float, ...]:
    """Return scales that no matrix of this code can have."""
    if code.integer:
        return _WRONG
    # 0 is a code of NF4 and FP4, and the largest number of a block of zeros its scale.
    return tuple(value for value in (*_WRONG, -1.0) if value or code not in (Code.NF4, Code.FP4))


def _check(made: WeightFormat[Options]) -> None:
    for matrix in made.matrices().values():
        matrix.check()


def _scales(made: WeightFormat[Options]) -> list[list[str]]:
    """Return the tensor of scales of each matrix, and its other tensors."""
    found = ((matrix.slots["scales"].name, matrix.names) for matrix in made.matrices().values())
    return [[name, *(other for other in names if other != name)] for name, names in found]


def _spoiled(example: Example, name: str, value: float) -> Example:
    """Return an example with one scale that is wrong; of powers of two the only one that can be, NaN."""
    tensor = example.tensors[name].clone()
    if tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).view(-1)[-1] = 255
    else:
        tensor.view(-1)[-1] = value
    return replace(example, tensors={**example.tensors, name: tensor})


def _check_codes(name: str, matrix: CodedMatrix) -> None:
    layout, codes = matrix.layout, matrix.read(torch.device("cpu"))
    rows, cols = codes.codes.shape[0], codes.codes.shape[1] * (2 if layout.code.packed else 1)
    assert rows * cols == math.prod(matrix.shape), f"{name}: {rows} x {cols} codes for {matrix.shape}"
    dtypes = {Code.INT8: torch.int8, Code.E4M3: torch.float8_e4m3fn, Code.E5M2: torch.float8_e5m2}
    assert codes.codes.dtype == dtypes.get(layout.code, torch.uint8), f"{name}: {codes.codes.dtype} of {layout}"
    grid = layout.grid(rows, cols)
    kept = (codes.codes, codes.scales, codes.zeros, codes.groups)
    assert all(one is None or one.is_contiguous() for one in kept), f"{name}: kernels read row after row"
    assert codes.scales is not None, name
    assert codes.scales.shape == grid, name
    assert codes.scales.is_floating_point(), name
    assert layout.zeros == (codes.zeros is not None), name
    assert layout.ordered == (codes.groups is not None), name
    assert codes.zeros is None or codes.zeros.shape == grid, name
    assert codes.groups is None or codes.groups.shape == (cols,), name
    assert codes.nbytes < 4 * rows * cols, f"{name}: codes take more memory than numbers"
