"""Weights as llm-compressor writes them, in the formats of compressed-tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext, WeightFormat
from pegboard.plugins.quantization.formats.fp8 import float8_matrix
from pegboard.plugins.quantization.formats.nvfp4 import nvfp4_matrix
from pegboard.plugins.quantization.formats.parts import (
    FLOAT8,
    SCALES,
    check_alone,
    check_shape,
    check_type,
    modules,
    powers_of_two,
)
from pegboard.toolkit.model.coded import Blocks, CodedMatrix, StoredSlot
from pegboard.toolkit.model.layouts import Code, Layout, unpack

FORMATS = (
    "naive-quantized", "float-quantized", "int-quantized", "pack-quantized", "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)  # fmt: skip
UNUSED = (
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "weight_shape",
)  # fmt: skip


class CompressedTensors(WeightFormat[NoOptions]):
    """``x.weight`` in float8 or int8, or ``x.weight_packed``: 8, or 4 bits, of unsigned numbers in int32; with
    ``x.weight_scale``, and ``x.weight_zero_point`` or ``x.weight_g_idx`` where they have such.
    """

    @classmethod
    def supports(cls, options: NoOptions, ctx: FormatContext) -> str | None:
        if reason := ctx.other_method("compressed-tensors"):
            return reason
        sparse = ctx.config.get("sparsity_config")
        if isinstance(sparse, Mapping) and sparse.get("format") not in (None, "dense"):
            return f"its weights are sparse ({sparse.get('format')}), which is not supported"
        if places := sorted(_transformed(ctx.config) - {"weight_input", "weight_output"}):
            return f"its transform_config changes activations ({', '.join(places)}), which is not supported"
        told = {str(name) for name in _formats(ctx.config)}
        if unknown := sorted(told - {*FORMATS, "mixed-precision", "dense"}):
            return f"its format is {', '.join(unknown)}, and supported are {', '.join(FORMATS)}"
        return None

    def matrices(self) -> Mapping[str, CodedMatrix]:
        found = {}
        for module, codes in modules(self.ctx, "weight_packed"):
            make = self._floats4 if codes.dtype == torch.uint8 else self._packed
            found[f"{module}.weight"] = make(module, codes)
        for module, codes in modules(self.ctx, "weight"):
            if len(codes.shape) == 2 and codes.dtype in FLOAT8:
                found[codes.name] = self._float8(module, codes)
            elif len(codes.shape) == 2 and codes.dtype == torch.int8:
                found[codes.name] = self._int8(module, codes)
        for name in ("weight_scale", "weight_global_scale", "weight_zero_point", "weight_g_idx"):
            check_alone(self.ctx, name, found)
        return found

    def unused(self) -> Collection[str]:
        return [name for name in self.ctx.tensors if name.rpartition(".")[2] in UNUSED]

    def _scale(self, module: str, codes: StoredSlot) -> StoredSlot:
        return self.ctx.need(f"{module}.weight_scale", codes.name)

    def _float8(self, module: str, codes: StoredSlot) -> CodedMatrix:
        scales = self._scale(module, codes)
        if len(scales.shape) == 2 and scales.shape[0] == codes.shape[0] and scales.shape[1] > 1:
            code = Code.E5M2 if codes.dtype == torch.float8_e5m2 else Code.E4M3
            return self._grouped(module, codes, code, codes.shape)
        return float8_matrix(codes, scales, _block(self.ctx.config))

    def _int8(self, module: str, codes: StoredSlot) -> CodedMatrix:
        return self._grouped(module, codes, Code.INT8, codes.shape)

    def _packed(self, module: str, codes: StoredSlot) -> CodedMatrix:
        check_type(codes, torch.int32)
        size = check_type(self.ctx.need(f"{module}.weight_shape", codes.name), torch.int64, torch.int32)
        told = check_shape(size, 2).read().tolist()
        if len(codes.shape) != 2 or told[0] != codes.shape[0] or told[1] <= 0:
            raise codes.wrong(f"does not hold a matrix of weight_shape {told}")
        rows, cols = told
        bits = next((bits for bits in (4, 8) if -(-cols * bits // 32) == codes.shape[1]), 0)
        if not bits or cols % 2:
            raise codes.wrong(f"does not hold {cols} columns (weight_shape {told}) in 4 or 8 bits")
        zeros = f"{module}.weight_zero_point" in self.ctx.tensors
        code = {4: Code.UINT4 if zeros else Code.INT4, 8: Code.UINT8 if zeros else Code.INT8}[bits]
        return self._grouped(module, codes, code, (rows, cols))

    def _grouped(self, module: str, codes: StoredSlot, code: Code, shape: tuple[int, ...]) -> CodedMatrix:
        """Return a matrix with scales, and zeros, for all of it, for rows or for groups of columns."""
        scales = check_type(self._scale(module, codes), *SCALES)
        rows, cols = shape
        groups = scales.shape[1] if len(scales.shape) == 2 else 1
        if scales.shape not in ((), (1,), (rows,), (rows, groups)) or groups < 1 or cols % groups:
            raise scales.wrong(f"does not fit a matrix {[rows, cols]} in groups of one size")
        each = scales.shape[:1] == (rows,)
        slots = {"scales": scales} | self._further(module, code, (rows, cols), groups, scales)
        layout = Layout(
            code, (1 if each else rows, cols // groups if groups > 1 else 0), "zeros" in slots, "groups" in slots
        )
        height = layout.grid(rows, cols)[0]

        def blocks(tensors: Mapping[str, Tensor]) -> Blocks:
            zeros = tensors.get("zeros")
            if zeros is not None:
                zeros = _zeros(zeros, code)[:height].reshape(height, groups)
            return Blocks(tensors["scales"].reshape(height, groups), zeros, tensors.get("groups"))

        def canonical(packed: Tensor) -> Tensor:
            if packed.dtype != torch.int32:
                return packed
            as_bytes = packed.view(torch.uint8)[:, : cols // 2 if code.packed else cols].contiguous()
            return (as_bytes ^ 128).view(torch.int8) if code is Code.INT8 else as_bytes

        return CodedMatrix(layout, (rows, cols), codes, canonical, slots, blocks)

    def _further(
        self, module: str, code: Code, shape: tuple[int, int], groups: int, scales: StoredSlot
    ) -> dict[str, StoredSlot]:
        """Return the tensors of zeros and of columns' groups."""
        found = {}
        if zeros := self.ctx.tensors.get(f"{module}.weight_zero_point"):
            if zeros.dtype == torch.int32 and code.bits and code is not Code.INT8:
                check_shape(zeros, -(-shape[0] * code.bits // 32), groups)
            else:
                check_shape(check_type(zeros, torch.int8), *scales.shape)
            found["zeros"] = zeros
        if order := self.ctx.tensors.get(f"{module}.weight_g_idx"):
            found["groups"] = check_shape(check_type(order, torch.int32), shape[1])
        return found

    def _floats4(self, module: str, codes: StoredSlot) -> CodedMatrix:
        """Return a matrix of NVFP4 where it has a scale for all of it, or else of MXFP4."""
        if overall := self.ctx.tensors.get(f"{module}.weight_global_scale"):
            return nvfp4_matrix(codes, self._scale(module, codes), overall, divided=True)
        scales = check_type(self._scale(module, codes), torch.uint8, torch.float8_e8m0fnu)
        rows, cols = codes.shape[0], 2 * codes.shape[1]
        check_shape(scales, rows, -(-cols // 32))
        return CodedMatrix(
            Layout(Code.E2M1, (1, 32)), (rows, cols), codes, slots={"scales": scales},
            blocks=lambda tensors: Blocks(powers_of_two(tensors["scales"])),
        )  # fmt: skip


def _groups(config: Mapping[str, object]) -> list[Mapping[str, object]]:
    groups = config.get("config_groups")
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []


def _formats(config: Mapping[str, object]) -> list[object]:
    """Return the formats that a config names, for all of its groups and for each."""
    named = [config.get("format"), *(group.get("format") for group in _groups(config))]
    return [name for name in named if name is not None]


def _transformed(config: Mapping[str, object]) -> set[str]:
    """Return the places of transforms, such as QuIP's and SpinQuant's. Those of weights are in the weights already."""
    told = config.get("transform_config")
    groups = told.get("config_groups") if isinstance(told, Mapping) else None
    schemes = groups.values() if isinstance(groups, Mapping) else ()
    applied = [use for scheme in schemes if isinstance(scheme, Mapping) for use in scheme.get("apply") or ()]
    return {str(use.get("location")) for use in applied if isinstance(use, Mapping)}


def _block(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the rows and columns of a block: those of the first group that has blocks."""
    for group in _groups(config):
        weights = group.get("weights")
        size = weights.get("block_structure") if isinstance(weights, Mapping) else None
        if isinstance(size, list) and len(size) == 2 and all(isinstance(one, int) and one > 0 for one in size):
            return size[0], size[1]
    return 128, 128


def _zeros(stored: Tensor, code: Code) -> Tensor:
    """Return zero points [rows, groups] as the codes are: above 0 where those are. Packed ones lie side by side down
    the rows, which may be more than there are.
    """
    if stored.dtype == torch.int32:
        as_bytes = stored.t().contiguous().view(torch.uint8)
        return (unpack(as_bytes) if code.packed else as_bytes).t().contiguous()
    if code in (Code.INT8, Code.E4M3, Code.E5M2):
        return stored
    return (stored.to(torch.int16) + (8 if code.packed else 128)).to(torch.uint8)
