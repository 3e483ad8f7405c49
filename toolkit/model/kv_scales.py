"""Scales of 8-bit keys and values, in the files of a checkpoint."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.weights import checkpoint_files, read_header

_LAYER = r"(?:^|\.)layers\.(?P<layer>\d+)\.(?:self_attn|attention|attn)\."
_SCALE = re.compile(
    _LAYER + r"(?:(?:attn|qkv_proj|k_proj|v_proj)\.)?(?P<part>kv|k|v)_scale$"
    "|" + _LAYER.replace("layer>", "layer_of>") + r"(?P<part_of>k|v)_proj\.output_scale$"
)
_UNUSED = re.compile(_LAYER + r"(?:(?:attn|q_proj|qkv_proj)\.)?(?:q_scale|prob_scale)$")
"""Of queries and of softmax's results, which are never kept in 8 bits here."""


def is_kv_scale(name: str) -> bool:
    """Return whether a checkpoint's tensor belongs to keys and values in 8 bits, and to no weight."""
    return bool(_SCALE.search(name) or _UNUSED.search(name))


@dataclass(frozen=True, slots=True)
class _Scale:
    """One that was read, and from where."""

    value: float
    file: Path
    name: str


def read_kv_scales(directory: str | os.PathLike[str], layers: Iterable[int]) -> dict[int, tuple[float, float]]:
    """Return by layer what keys and values in 8 bits are to be multiplied by; nothing for a checkpoint without scales.

    One `kv_scale` stands for both. Raises ModelError, naming file and tensor, for a scale that is not one positive and
    finite number, for two of the same layer that differ, and for a layer without, where others have them.
    """
    found = _read(Path(directory))
    if not found:
        return {}
    an_other = next(iter(found.values()))
    scales = {}
    for layer in layers:
        both = [found.get((layer, part)) or found.get((layer, "kv")) for part in ("k", "v")]
        for part, one in zip(("keys", "values"), both, strict=True):
            if one is None:
                raise ModelError(
                    f"{an_other.file} has scales of 8-bit KV, such as {an_other.name}, but none of the {part} of layer "
                    f"{layer} ({part[0]}_scale); set memory.kv_dtype to bfloat16 to do without them"
                )
        k, v = (one.value for one in both if one is not None)
        scales[layer] = k, v
    return scales


def _read(directory: Path) -> dict[tuple[int, str], _Scale]:
    """Return all scales by layer and part: k, v or kv."""
    found: dict[tuple[int, str], _Scale] = {}
    for file in checkpoint_files(directory):
        for name, tensor in read_header(file).items():
            if (match := _SCALE.search(name)) is None:
                continue
            key = int(match["layer"] or match["layer_of"]), match["part"] or match["part_of"]
            scale = _Scale(_value(file, name, tensor.shape), file, name)
            other = found.setdefault(key, scale)
            if other.value != scale.value:
                raise ModelError(f"{file}: {name} is {scale.value}, and {other.name} in {other.file} is {other.value}")
    return found


def _value(file: Path, name: str, shape: tuple[int, ...]) -> float:
    from safetensors import safe_open

    if math.prod(shape) != 1:
        raise ModelError(f"{file}: {name} has shape {list(shape)}; one scale for a whole layer is supported, no others")
    with safe_open(str(file), framework="pt") as stored:
        value = float(stored.get_tensor(name))
    if not (math.isfinite(value) and value > 0):
        raise ModelError(
            f"{file}: {name} is {value}, and a scale has to be positive and finite; set memory.kv_dtype to bfloat16 to "
            "do without scales"
        )
    return value
