"""The suites of the formats and of the products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pegboard.plugins.quantization.suite.linear import LinearContract
from pegboard.plugins.quantization.suite.weight_format import Example, WeightFormatContract
from tests.plugins.quantization.published import WRITERS, mxfp4

SHAPES = {"x.q_proj": (96, 160), "x.k_proj": (200, 320)}
"""Groups of 32 divide the columns; blocks of 128 divide nothing."""


class Written(WeightFormatContract):
    """Examples of the writers whose names begin with one of these words."""

    words: Sequence[str] = ()

    def examples(self) -> Sequence[Example]:
        found: list[Example] = []
        for name, writer in WRITERS.items():
            if name.split()[0] not in self.words:
                continue
            draw = np.random.default_rng(len(found))
            tensors: dict[str, torch.Tensor] = {}
            means: dict[str, torch.Tensor] = {}
            for module, shape in SHAPES.items():
                written, meant = writer.write(draw.standard_normal(shape), draw)
                tensors |= {f"{module}.{end}": tensor.contiguous() for end, tensor in written.items()}
                means[f"{module}.weight"] = torch.from_numpy(meant)
            found.append(Example(writer.config, tensors, means))
        return found


class TestFp8(Written, WeightFormatContract):
    provider = "fp8"
    words = ("fp8",)


class TestCompressedTensors(Written, WeightFormatContract):
    provider = "compressed_tensors"
    words = ("ct",)


class TestAwq(Written, WeightFormatContract):
    provider = "awq"
    words = ("awq",)


class TestModelOpt(Written, WeightFormatContract):
    provider = "modelopt"
    words = ("modelopt",)


class TestBitsAndBytes(Written, WeightFormatContract):
    provider = "bitsandbytes"
    words = ("bnb",)


class TestGptq(Written, WeightFormatContract):
    provider = "gptq"
    words = ("gptq",)


class TestKeptCodes(Written, WeightFormatContract):
    provider = "codes"
    words = ("codes",)


class TestMxFp4(WeightFormatContract):
    provider = "mxfp4"

    def examples(self) -> Sequence[Example]:
        draw = np.random.default_rng(0)
        packed, exponents, meant = mxfp4(draw.standard_normal((3 * 80, 96)), draw)
        tensors = {"x.up_blocks": packed.view(3, 80, 3, 16), "x.up_scales": exponents.view(3, 80, 3)}
        means = {"x.up": torch.from_numpy(meant).view(3, 80, 96).transpose(1, 2)}
        return [Example({"quant_method": "mxfp4"}, tensors, means)]


class TestDense(LinearContract):
    provider = "dense"


class TestTorch(LinearContract):
    provider = "torch"
