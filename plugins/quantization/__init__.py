"""Quantised weights: the formats of checkpoints, what multiplies by their codes, and the contracts for both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.plugin import Plugin, Provider

if TYPE_CHECKING:
    from pegboard.plugins.quantization.api import FormatContext, LinearContext, Linears, WeightFormat

WEIGHT_FORMAT: Contract[WeightFormat, FormatContext] = Contract(
    "weight_format",
    "quantization.format",
    Cardinality.MATCHED,
    "pegboard.plugins.quantization.api:WeightFormat",
    "says which tensors of a checkpoint make up a quantised matrix, and what their numbers mean",
    suite="pegboard.plugins.quantization.suite.weight_format:WeightFormatContract",
    optional=True,
)

LINEAR: Contract[Linears, LinearContext] = Contract(
    "linear",
    "quantization.linear",
    Cardinality.ONE,
    "pegboard.plugins.quantization.api:Linears",
    "multiplies by quantised weights",
    suite="pegboard.plugins.quantization.suite.linear:LinearContract",
    optional=True,
)

_HERE = "pegboard.plugins.quantization"


def _format(name: str, factory: str, summary: str) -> Provider:
    return Provider("weight_format", name, f"{_HERE}.formats.{factory}", summary, rank=10)


plugin = Plugin(
    name="quantization",
    version="0.1.0",
    other_servers="pegboard.plugins.quantization:other_servers.yaml",
    summary="quantised weights: fp8, compressed-tensors, AWQ, GPTQ, ModelOpt, MXFP4 and bitsandbytes checkpoints",
    contracts=(WEIGHT_FORMAT, LINEAR),
    hooks=(f"{_HERE}.hooks:QuantizationHooks",),
    fields={"": f"{_HERE}.options:QuantizationFields"},
    providers=(
        _format("fp8", "fp8:Fp8", "float8 with a scale per tensor, row or block (quant_method fp8, fbgemm_fp8)"),
        _format("compressed_tensors", "compressed:CompressedTensors", "llm-compressor's: float8, int8, 4 bits, NVFP4"),
        _format("awq", "awq:Awq", "AWQ, 4 bits in groups (version gemm)"),
        _format("gptq", "gptq:Gptq", "GPTQ, 4 or 8 bits in groups, act-order too"),
        _format("modelopt", "modelopt:ModelOpt", "ModelOpt's: float8, NVFP4 and MXFP8"),
        _format("mxfp4", "mxfp4:MxFp4", "experts in 4-bit floats, a power of two for 32 of them (gpt-oss)"),
        _format("bitsandbytes", "bitsandbytes:BitsAndBytes", "bitsandbytes' NF4 and FP4, double quantisation too"),
        _format("codes", "codes:KeptCodes", "4 and 8 bits of a GGUF file, as Pegboard converts it (Q4_0, Q8_0)"),
        Provider(
            "linear",
            "dense",
            f"{_HERE}.dense:Dense",
            "dequantises at load: the speed and the memory of unquantised weights",
            config=f"{_HERE}.options:DenseOptions",
            rank=20,
        ),
        Provider(
            "linear",
            "torch",
            f"{_HERE}.torch_products:TorchProducts",
            "keeps the codes, and dequantises them in each product",
            rank=10,
        ),
    ),
)
