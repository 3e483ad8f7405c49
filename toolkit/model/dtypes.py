"""Resolves `model.dtype`, the type of weights and activations for a checkpoint on a device, and `memory.kv_dtype`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.toolkit.model.kv_config import kept_in_eight_bits
from pegboard.toolkit.model.weights import checkpoint_files, read_header

logger = logging.getLogger(__name__)

HALVES = (torch.bfloat16, torch.float16)

KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Values of `memory.kv_dtype`."""


def resolve_dtype(name: str, directory: Path, hf_config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """Return the type that `model.dtype` says, or for `auto` the checkpoint's own on a GPU, and on a CPU bfloat16 where
    the checkpoint is a 16-bit one and this CPU computes with bfloat16, else float32.

    It depends on nothing else: not on the providers that are chosen later, so that answers do not change with a
    compiler or an attention backend. Raises ModelError for a type that torch does not have.
    """
    if name != "auto":
        return _torch_dtype(name)
    if device.type != "cpu":
        return own_dtype(directory, hf_config)
    try:
        own = own_dtype(directory, hf_config)
    except ModelError as error:
        # It does not decide what is computed with here, so it need not end the start.
        own = stored_dtype(directory)
        logger.warning("%s; the weights are %s", error, _short(own))
    dtype = torch.bfloat16 if own in HALVES and cpu_has_bfloat16() else torch.float32
    why = "" if own == dtype else f"; the checkpoint is {_short(own)}"
    if own in HALVES and dtype == torch.float32:
        why += ", and this CPU has no instructions for bfloat16"
    logger.info("model.dtype: %s, automatic%s", _short(dtype), why)
    return dtype


def resolve_kv_dtype(name: str, model: ModelContext, *, able: bool) -> torch.dtype:
    """Return the type that `memory.kv_dtype` says, or for `auto` the model's own.

    For a checkpoint that was made for 8-bit KV, `auto` is that type on a GPU, if an attention backend that may be
    chosen is `able` to read it. On a CPU such KV takes longer to read, and what computes fastest there does not know
    it.
    """
    if name != "auto":
        return KV_DTYPES[name]
    if not kept_in_eight_bits(model.hf_config):
        return model.dtype
    if model.device.type != "cpu" and able:
        logger.info("memory.kv_dtype: fp8_e4m3, automatic: the checkpoint was made for it")
        return torch.float8_e4m3fn
    why = "on a CPU that is slower" if able else "no attention backend that may be chosen reads it"
    logger.info(
        "memory.kv_dtype: %s, automatic; the checkpoint was made for fp8_e4m3, but %s", _short(model.dtype), why
    )
    return model.dtype


def kv_dtype_name(dtype: torch.dtype) -> str:
    """Return the value of `memory.kv_dtype` that stands for a type."""
    return next((name for name, one in KV_DTYPES.items() if one is dtype), _short(dtype))


def own_dtype(directory: Path, hf_config: Mapping[str, Any]) -> torch.dtype:
    """Return the precision that a checkpoint was published in: what config.json says, else that of its largest tensor;
    float32 where neither is known. Raises ModelError for a type that torch does not have.

    config.json comes first, because files may store more than there is: a quantised GGUF is converted to float32.
    """
    text = hf_config.get("text_config")
    for config in (hf_config, text if isinstance(text, Mapping) else {}):
        if name := config.get("dtype") or config.get("torch_dtype"):
            return _torch_dtype(str(name).removeprefix("torch."))
    return stored_dtype(directory)


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the type of a checkpoint's largest tensor, codes of quantised weights left out; float32 where it is not
    known.
    """
    try:
        stored = [tensor for file in checkpoint_files(directory) for tensor in read_header(file).values()]
    except ModelError:
        # Weights in another format: the loader says what is wrong with them.
        return torch.float32
    numbers = [tensor for tensor in stored if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1]
    largest = max(numbers, key=lambda tensor: tensor.nbytes, default=None)
    return largest.dtype if largest is not None else torch.float32


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 natively (AMX, or AVX-512 bf16). Elsewhere every product would first
    be converted, and float32 is both faster and more exact.
    """
    # Not in every torch that pyproject.toml allows.
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"config.json: dtype {name!r:.80} is not a type to compute with; set model.dtype")
    return dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
