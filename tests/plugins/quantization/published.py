"""Checkpoints of every format, written from the formats' descriptions, and what their tensors mean in float64.

A `Writer` turns a matrix into the tensors that a checkpoint has of it and the numbers that these mean, with numpy and
without the code under test. Codes and scales have at most 8 and 24 bits, so that float64 holds each product, and
rounding it once to float32 gives what `layouts.exact` has to give, to the bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from pegboard.conformance.checkpoints import built_once, tiny_checkpoint

Matrix = NDArray[np.float64]
Written = tuple[dict[str, Tensor], Matrix]
"""Tensors by the ends of their names, and what they mean [rows, cols]."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Writer:
    """A format: what config.json says of it, and how it keeps a matrix, in numbers drawn by `seed`."""

    config: Mapping[str, Any]
    write: Callable[[Matrix, np.random.Generator], Written]
    experts: bool = True
    """Whether published mixtures of experts are kept so."""


def blocks_of(matrix: Matrix, rows: int, cols: int) -> tuple[int, int]:
    """Return how many blocks of this size a matrix has, those that are cut at its edges included."""
    return -(-matrix.shape[0] // rows), -(-matrix.shape[1] // cols)


def spread(blocks: Matrix, rows: int, cols: int, shape: tuple[int, ...]) -> Matrix:
    """Return each number's own of what blocks of a size have."""
    found: Matrix = np.kron(blocks, np.ones((rows, cols)))[: shape[0], : shape[1]].astype(np.float64)
    return found


def largest(matrix: Matrix, rows: int, cols: int) -> Matrix:
    """Return the largest magnitude of each block."""
    found = np.zeros(blocks_of(matrix, rows, cols))
    for down, across in np.ndindex(found.shape):
        part = matrix[down * rows : (down + 1) * rows, across * cols : (across + 1) * cols]
        found[down, across] = np.abs(part).max()
    return found


def rounded(values: Matrix, dtype: torch.dtype) -> tuple[Tensor, Matrix]:
    """Return numbers in a type, and what they are then."""
    stored = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    return stored, stored.double().numpy()


def float8(
    rows: int, cols: int, name: str = "weight_scale_inv", *, scale: torch.dtype = torch.float32,
    shape: Callable[[Tensor], Tensor] = lambda scales: scales, static: bool = False,
) -> Callable[[Matrix, np.random.Generator], Written]:  # fmt: skip
    """float8_e4m3fn with a scale for blocks of a size; 0 stands for all."""

    def write(matrix: Matrix, draw: np.random.Generator) -> Written:
        high, wide = rows or matrix.shape[0], cols or matrix.shape[1]
        values = largest(matrix, high, wide) / 448
        if scale is torch.float8_e8m0fnu:
            values = np.exp2(np.ceil(np.log2(values)))
        scales, known = rounded(values, scale)
        each = spread(known, high, wide, matrix.shape)
        codes, meant = rounded(np.clip(matrix / each, -448, 448), torch.float8_e4m3fn)
        tensors = {"weight": codes, name: shape(scales)}
        if static:
            tensors["input_scale"] = torch.tensor(0.25)
        return tensors, meant * each

    return write


def integers(
    bits: int, group: int, *, symmetric: bool, scale: torch.dtype
) -> Callable[[Matrix], tuple[NDArray[np.int64], NDArray[np.int64], Tensor, Matrix]]:
    """Round a matrix to unsigned numbers of so many bits, in groups of columns (0: all). Returns codes [rows, cols],
    zeros and scales [rows, groups], and what they mean.
    """

    def quantize(matrix: Matrix) -> tuple[NDArray[np.int64], NDArray[np.int64], Tensor, Matrix]:
        wide, top = group or matrix.shape[1], 2**bits - 1
        grouped = matrix.reshape(matrix.shape[0], -1, wide)
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        if symmetric:
            scales, known = rounded(np.maximum(-low, high) / (top // 2), scale)
            zeros = np.full(known.shape, (top + 1) // 2)
        else:
            scales, known = rounded((high - low) / top, scale)
            zeros = np.clip(np.rint(-low / known), 0, top).astype(np.int64)
        codes = np.clip(np.rint(grouped / known[..., None]) + zeros[..., None], 0, top).astype(np.int64)
        meant = (codes - zeros[..., None]) * known[..., None]
        return codes.reshape(matrix.shape), zeros, scales, meant.reshape(matrix.shape)

    return quantize


def words(numbers: NDArray[np.int64], bits: int) -> Tensor:
    """Pack unsigned numbers along the last dimension into int32, the first in the low bits; missing ones are 0."""
    each = 32 // bits
    padded = np.pad(numbers, [*[(0, 0)] * (numbers.ndim - 1), (0, -numbers.shape[-1] % each)])
    parts = padded.reshape(*padded.shape[:-1], -1, each) << (bits * np.arange(each))
    return torch.from_numpy(parts.sum(-1).astype(np.uint32).view(np.int32))


def compressed(
    bits: int,
    group: int,
    *,
    symmetric: bool,
    scale: torch.dtype = torch.bfloat16,
    packed: bool = True,
    act_order: bool = False,
) -> Callable[[Matrix, np.random.Generator], Written]:
    """compressed-tensors: signed numbers, packed along the columns with half their range added; zero points along the
    rows. With `act_order` a column's group is anywhere.
    """
    quantize = integers(bits, group, symmetric=symmetric, scale=scale)

    def write(matrix: Matrix, draw: np.random.Generator) -> Written:
        if act_order:
            back = np.argsort(order := draw.permutation(matrix.shape[1]))
            tensors, meant = kept(matrix[:, order], back)
            groups = (np.arange(matrix.shape[1]) // group)[back].astype(np.int32)
            return {**tensors, "weight_g_idx": torch.from_numpy(groups)}, meant[:, back]
        return kept(matrix, np.arange(matrix.shape[1]))

    def kept(matrix: Matrix, places: NDArray[np.int64]) -> Written:
        codes, zeros, scales, meant = quantize(matrix)
        codes = codes[:, places]
        half = 2 ** (bits - 1)
        tensors = {"weight_scale": scales}
        if packed:
            tensors["weight_packed"] = words(codes, bits)
            tensors["weight_shape"] = torch.tensor(matrix.shape)
        else:
            tensors["weight"] = torch.from_numpy((codes - half).astype(np.int8))
        if not symmetric:
            plain = torch.from_numpy((zeros - half).astype(np.int8))
            tensors["weight_zero_point"] = words(zeros.T, bits).t().contiguous() if packed else plain
        return tensors, meant

    return write


def int8_tensor(matrix: Matrix, draw: np.random.Generator) -> Written:
    """compressed-tensors: int8 with one scale for all."""
    scales, known = rounded(np.abs(matrix).max() / 127 * np.ones(1), torch.float32)
    codes = np.clip(np.rint(matrix / known), -128, 127)
    return {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": scales}, codes * known


def awq(group: int) -> Callable[[Matrix, np.random.Generator], Written]:
    """AutoAWQ's gemm: columns first, and of eight neighbours those of even numbers before the others."""
    quantize = integers(4, group, symmetric=False, scale=torch.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def ordered(numbers: NDArray[np.int64]) -> Tensor:
        eights = numbers.reshape(numbers.shape[0], -1, 8)[:, :, order]
        return words(eights.reshape(numbers.shape), 4)

    def write(matrix: Matrix, draw: np.random.Generator) -> Written:
        codes, zeros, scales, meant = quantize(matrix)
        tensors = {"qweight": ordered(codes.T), "qzeros": ordered(zeros.T), "scales": scales.t().contiguous()}
        return tensors, meant

    return write


def gptq(
    bits: int, group: int, *, symmetric: bool = False, act_order: bool = False, less_one: bool = True
) -> Callable[[Matrix, np.random.Generator], Written]:
    """AutoGPTQ's: columns first; zero points less one modulo 2^bits; with `act_order` a column's group is anywhere."""
    quantize = integers(bits, group, symmetric=symmetric, scale=torch.float16)

    def write(matrix: Matrix, draw: np.random.Generator) -> Written:
        cols = matrix.shape[1]
        order = draw.permutation(cols) if act_order else np.arange(cols)
        codes, zeros, scales, meant = quantize(matrix[:, order])
        back = np.argsort(order)
        stored = (zeros - 1) % 2**bits if less_one else zeros
        groups = np.arange(cols) // (group or cols)
        tensors = {
            "qweight": words(codes[:, back], bits).t().contiguous(),
            "qzeros": words(stored.T, bits),
            "scales": scales.t().contiguous(),
            "g_idx": torch.from_numpy(groups[back].astype(np.int32)),
        }
        return tensors, meant[:, back]

    return write


def mxfp4(matrix: Matrix, draw: np.random.Generator) -> tuple[Tensor, Tensor, Matrix]:
    """Return bytes [rows, cols / 2] of 4-bit floats, the first in the low bits, exponents [rows, cols / 32] with 127
    added, and what they mean.
    """
    grouped = matrix.reshape(matrix.shape[0], -1, 32)
    exponents = np.floor(np.log2(np.maximum(np.abs(grouped).max(-1), 1e-9))) - 2
    scaled = grouped / np.exp2(exponents)[..., None]
    codes = np.abs(scaled[..., None] - E2M1).argmin(-1)
    meant = (E2M1[codes] * np.exp2(exponents)[..., None]).reshape(matrix.shape)
    codes = codes.reshape(matrix.shape)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return torch.from_numpy(packed), torch.from_numpy((exponents + 127).astype(np.uint8)), meant


def compressed_mxfp4(matrix: Matrix, draw: np.random.Generator) -> Written:
    """compressed-tensors' mxfp4."""
    packed, exponents, meant = mxfp4(matrix, draw)
    return {"weight_packed": packed, "weight_scale": exponents}, meant


def nvfp4(
    packed: str, overall: str, *, divided: bool, tiny: bool = False
) -> Callable[[Matrix, np.random.Generator], Written]:
    """4-bit floats, float8 scales for 16 of them, and one float32 by which these are multiplied, or `divided`. With
    `tiny` the numbers of the first block are so small that its scale is 0.
    """

    def write(matrix: Matrix, draw: np.random.Generator) -> Written:
        grouped = matrix.reshape(matrix.shape[0], -1, 16).copy()
        if tiny:
            grouped[0, 0] *= 2.0**-30
        most = np.abs(grouped).max(-1)
        factor = torch.tensor(most.max() / (6 * 448), dtype=torch.float32)
        stored = torch.tensor(1 / factor.item(), dtype=torch.float32) if divided else factor
        scales, _ = rounded(most / 6 / factor.item(), torch.float8_e4m3fn)
        known = (scales.float() / stored if divided else scales.float() * stored).double().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.nan_to_num(grouped / known[..., None], posinf=6, neginf=-6)
        codes = np.abs(scaled[..., None] - E2M1).argmin(-1)
        meant = (E2M1[codes] * known[..., None]).reshape(matrix.shape)
        codes = codes.reshape(matrix.shape)
        both = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        return {packed: both, "weight_scale": scales, overall: stored.reshape(1) if divided else stored}, meant

    return write


def mxfp8(matrix: Matrix, draw: np.random.Generator) -> Written:
    """float8 with a power of two for 32 columns, kept as a byte."""
    tensors, meant = float8(1, 32, "weight_scale", scale=torch.float8_e8m0fnu)(matrix, draw)
    return tensors | {"weight_scale": tensors["weight_scale"].view(torch.uint8)}, meant


def kept_codes(bits: int) -> Callable[[Matrix, np.random.Generator], Written]:
    """As GGUF's Q4_0 and Q8_0, whose converted codes Pegboard keeps: in blocks of 32 columns, without zero points."""

    def write(matrix: Matrix, draw: np.random.Generator) -> Written:
        codes, _, scales, meant = integers(bits, 32, symmetric=True, scale=torch.float16)(matrix)
        if bits == 8:
            return {"codes": torch.from_numpy((codes - 128).astype(np.int8)), "scales": scales}, meant
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
        return {"codes": torch.from_numpy(packed), "scales": scales}, meant

    return write


NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)]


def bitsandbytes(kind: str, block: int, *, nested: bool = False) -> Callable[[Matrix, np.random.Generator], Written]:
    """16 numbers up to 1, times the largest magnitude of a block of the flat matrix: codes two in a byte, the first in
    the high bits. If `nested`, these magnitudes less their mean are rounded to 256 numbers up to 1, times the largest
    of 256 of them.
    """
    table = np.array({"nf4": NF4, "fp4": FP4}[kind], dtype=np.float32)

    def write(matrix: Matrix, draw: np.random.Generator) -> Written:
        flat = np.pad(matrix.reshape(-1), (0, -matrix.size % block)).reshape(-1, block)
        flat[0] = 0  # as padding is
        scales = np.abs(flat).max(-1).astype(np.float32)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(matrix.shape)}
        tensors = {"weight.quant_map": torch.from_numpy(table.copy())}
        if nested:
            places = np.sort(draw.uniform(-1, 1, 256)).astype(np.float32)
            offset = scales.mean()
            parts = np.pad(scales - offset, (0, -len(scales) % 256)).reshape(-1, 256)
            most = np.maximum(np.abs(parts).max(-1), np.float32(1e-3))
            chosen = np.abs((parts / most[:, None])[..., None] - places).argmin(-1).reshape(-1)[: len(scales)]
            tensors["weight.absmax"] = torch.from_numpy(chosen.astype(np.uint8))
            tensors["weight.nested_absmax"] = torch.from_numpy(most)
            tensors["weight.nested_quant_map"] = torch.from_numpy(places)
            scales = places[chosen] * np.repeat(most, 256)[: len(scales)] + offset  # in float32, as bitsandbytes
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        else:
            tensors["weight.absmax"] = torch.from_numpy(scales)
        codes = np.abs((flat / np.where(scales == 0, 1, scales)[:, None])[..., None] - table).argmin(-1)
        meant = (table[codes].astype(np.float64) * scales[:, None]).reshape(-1)[: matrix.size].reshape(matrix.shape)
        numbers = codes.reshape(-1)[: matrix.size].astype(np.uint8)
        tensors["weight"] = torch.from_numpy(numbers[::2] << 4 | numbers[1::2]).view(-1, 1)
        told = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        return {**tensors, f"weight.quant_state.bitsandbytes__{kind}": torch.from_numpy(told)}, meant

    return write


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_CT = {"quant_method": "compressed-tensors"}
_MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt"}}
_GPTQ = {"quant_method": "gptq", "bits": 4}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def _column(scales: Tensor) -> Tensor:
    return scales.reshape(-1)


WRITERS: Mapping[str, Writer] = {
    "fp8 blocks": Writer({**_FP8, "weight_block_size": [128, 128]}, float8(128, 128)),
    "fp8 small blocks": Writer({**_FP8, "weight_block_size": [32, 16]}, float8(32, 16)),
    "fp8 powers of two": Writer(
        {**_FP8, "weight_block_size": [32, 32]}, float8(32, 32, "scale", scale=torch.float8_e8m0fnu)
    ),
    "fp8 tensor": Writer(
        {**_FP8, "activation_scheme": "static"},
        float8(0, 0, "weight_scale", shape=lambda scales: scales.reshape(()), static=True),
    ),
    "fp8 rows": Writer({"quant_method": "fbgemm_fp8"}, float8(1, 0, "weight_scale", scale=torch.bfloat16)),
    "ct float8 rows": Writer({**_CT, "format": "float-quantized"}, float8(1, 0, "weight_scale", scale=torch.bfloat16)),
    "ct float8 tensor": Writer({**_CT, "format": "naive-quantized"}, float8(0, 0, "weight_scale", shape=_column)),
    "ct float8 blocks": Writer(
        {
            **_CT,
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [64, 48]}}},
        },
        float8(64, 48, "weight_scale"),
    ),
    "ct float8 groups": Writer({**_CT, "format": "float-quantized"}, float8(1, 32, "weight_scale")),
    "ct int8 tensor": Writer({**_CT, "format": "int-quantized"}, int8_tensor),
    "ct int8 rows": Writer({**_CT, "format": "int-quantized"}, compressed(8, 0, symmetric=True, packed=False)),
    "ct int8 zeros": Writer({**_CT, "format": "int-quantized"}, compressed(8, 0, symmetric=False, packed=False)),
    "ct 4 bits": Writer({**_CT, "format": "pack-quantized"}, compressed(4, 16, symmetric=True)),
    "ct 4 bits zeros": Writer(
        {**_CT, "format": "pack-quantized"}, compressed(4, 16, symmetric=False, scale=torch.float16)
    ),
    "ct 4 bits act-order": Writer(
        {**_CT, "format": "pack-quantized"}, compressed(4, 32, symmetric=False, act_order=True)
    ),
    "ct 8 bits": Writer({**_CT, "format": "pack-quantized"}, compressed(8, 32, symmetric=True)),
    "ct 8 bits zeros": Writer({**_CT, "format": "pack-quantized"}, compressed(8, 32, symmetric=False)),
    "ct mxfp4": Writer({**_CT, "format": "mxfp4-pack-quantized"}, compressed_mxfp4),
    "ct nvfp4": Writer(
        {**_CT, "format": "nvfp4-pack-quantized"}, nvfp4("weight_packed", "weight_global_scale", divided=True)
    ),
    "bnb nf4": Writer({**_BNB, "bnb_4bit_quant_type": "nf4"}, bitsandbytes("nf4", 32)),
    "bnb nf4 nested": Writer({**_BNB, "bnb_4bit_use_double_quant": True}, bitsandbytes("nf4", 64, nested=True)),
    "bnb fp4": Writer({**_BNB, "bnb_4bit_quant_type": "fp4"}, bitsandbytes("fp4", 128)),
    "modelopt fp8": Writer(
        {**_MODELOPT, "quant_algo": "FP8"},
        float8(0, 0, "weight_scale", shape=lambda scales: scales.reshape(()), static=True),
    ),
    "modelopt blocks": Writer(
        {**_MODELOPT, "quant_algo": "fp8_pb_wo"},
        float8(128, 128, "weight_scale", shape=lambda scales: scales[:, None, :, None]),
    ),
    "modelopt mxfp8": Writer({**_MODELOPT, "quant_algo": "MXFP8"}, mxfp8),
    "modelopt nvfp4": Writer(
        {**_MODELOPT, "quant_algo": "NVFP4"}, nvfp4("weight", "weight_scale_2", divided=False, tiny=True)
    ),
    "awq": Writer({"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 16}, awq(16)),
    "awq rows": Writer({"quant_method": "awq", "bits": 4, "group_size": -1}, awq(0)),
    "gptq": Writer(_GPTQ, gptq(4, 16)),
    "gptq symmetric": Writer({**_GPTQ, "sym": True}, gptq(4, 32, symmetric=True)),
    "gptq symmetric v2": Writer({**_GPTQ, "sym": True}, gptq(4, 32, symmetric=True, less_one=False)),
    "gptq v2": Writer({**_GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, 16, less_one=False)),
    "gptq act-order": Writer({**_GPTQ, "desc_act": True}, gptq(4, 16, act_order=True)),
    "codes 4 bits": Writer({"quant_method": "pegboard"}, kept_codes(4)),
    "codes 8 bits": Writer({"quant_method": "pegboard"}, kept_codes(8)),
    "gptq 8 bits": Writer({**_GPTQ, "bits": 8}, gptq(8, 0)),
}


def is_quantized(name: str) -> bool:
    """Return whether published checkpoints quantise this tensor: linear layers but for the head and the routers."""
    return name.endswith("_proj.weight")


def published(directory: Path, plain: Path, writer: Writer, seed: int = 0) -> tuple[Path, Path]:
    """Return two model directories: one of a format, and one with the numbers that it means, in float32."""

    def build(scratch: Path) -> None:
        draw = np.random.default_rng(seed)
        coded: dict[str, Tensor] = {}
        meant: dict[str, Tensor] = {}
        for name, tensor in load_file(plain / "model.safetensors").items():
            if not is_quantized(name):
                coded[name] = meant[name] = tensor
                continue
            tensors, numbers = writer.write(tensor.double().numpy(), draw)
            coded |= {f"{name.removesuffix('weight')}{end}": one.contiguous() for end, one in tensors.items()}
            meant[name] = torch.from_numpy(numbers).float().contiguous()
        config = json.loads((plain / "config.json").read_text("utf-8"))
        for part, tensors, further in (
            ("coded", coded, {"quantization_config": dict(writer.config)}),
            ("meant", meant, {}),
        ):
            shutil.copytree(plain, scratch / part, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
            (scratch / part / "config.json").write_text(json.dumps({**config, **further}), "utf-8")
            save_file(tensors, scratch / part / "model.safetensors", metadata={"format": "pt"})

    made = built_once(directory, build)
    return made / "coded", made / "meant"


def tiny(directory: Path, architecture: str = "llama", **overrides: Any) -> Path:
    """Return a plain checkpoint whose sizes groups of 32 divide, and blocks of 128 do not."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 32, **overrides}
    return tiny_checkpoint(directory, architecture, num_attention_heads=4, **sizes)
