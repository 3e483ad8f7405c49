"""Matrices of a GGUF file whose codes are kept: Q4_0 and Q8_0, as tensors that the weight format `codes` reads."""

from __future__ import annotations

from collections.abc import Mapping

import gguf
import numpy as np
from numpy.typing import NDArray

QUANTIZATION = {"quant_method": "pegboard"}
"""What config.json says of a model with such matrices."""

_COLUMNS = 32
"""Of a block, which has a float16 scale and then its codes."""
KINDS: Mapping[gguf.GGMLQuantizationType, int] = {
    gguf.GGMLQuantizationType.Q4_0: 2 + _COLUMNS // 2,
    gguf.GGMLQuantizationType.Q8_0: 2 + _COLUMNS,
}
"""Bytes of a block."""

Array = NDArray[np.uint8] | NDArray[np.int8] | NDArray[np.float16]


def keeps_codes(tensor: gguf.ReaderTensor) -> bool:
    """Return whether a tensor is a matrix of one of the kinds."""
    return tensor.tensor_type in KINDS and len(tensor.shape) == 2


def kept_bytes(tensor: gguf.ReaderTensor) -> int:
    """Return how many bytes `kept` makes of a tensor."""
    return int(tensor.n_elements) // _COLUMNS * KINDS[tensor.tensor_type]


def kept(tensor: gguf.ReaderTensor) -> dict[str, Array]:
    """Return ``codes`` and ``scales`` float16 [rows, cols / 32] of a matrix [rows, cols], whose numbers are those of
    `gguf.dequantize`.

    Codes of Q8_0 are int8 [rows, cols]. Those of Q4_0, which stand for 8 less, are uint8 [rows, cols / 2], two
    neighbours to a byte, the first in the low bits; in the file the halves of a block share bytes. Blocks of zeros,
    whose scale is 0, get 1.
    """
    rows = int(tensor.shape[1])
    blocks = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(rows, -1, KINDS[tensor.tensor_type])
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    codes = blocks[:, :, 2:]
    four_bits = tensor.tensor_type is gguf.GGMLQuantizationType.Q4_0
    if four_bits:
        codes = np.concatenate((codes & 15, codes >> 4), axis=-1)
    nothing = scales == 0
    if nothing.any():
        codes, scales = codes.copy(), scales.copy()
        codes[nothing], scales[nothing] = 8 if four_bits else 0, 1
    flat = codes.reshape(rows, -1)
    if four_bits:
        return {"codes": flat[:, ::2] | flat[:, 1::2] << 4, "scales": scales}
    return {"codes": np.ascontiguousarray(flat).view(np.int8), "scales": scales}
