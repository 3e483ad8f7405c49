"""What several formats have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pegboard.plugins.quantization.api import FormatContext
from pegboard.toolkit.model.coded import StoredSlot

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.float32, torch.float16, torch.bfloat16)


def modules(ctx: FormatContext, tensor: str) -> Iterator[tuple[str, StoredSlot]]:
    """Yield each module that has a tensor of this name, and the tensor: ``x.q_proj`` for ``x.q_proj.qweight``."""
    for name, slot in ctx.tensors.items():
        module, _, last = name.rpartition(".")
        if last == tensor:
            yield module, slot


def powers_of_two(scales: Tensor) -> Tensor:
    """Return scales as numbers: bytes and float8_e8m0fnu b mean 2^(b - 127) and 255 NaN; other types are kept."""
    return scales.view(torch.float8_e8m0fnu).float() if scales.dtype == torch.uint8 or is_e8m0(scales) else scales


def is_e8m0(scales: Tensor) -> bool:
    """Return whether numbers are stored as powers of two."""
    return scales.dtype == torch.float8_e8m0fnu


def check_type(slot: StoredSlot, *dtypes: torch.dtype) -> StoredSlot:
    """Return a tensor. Raises ModelError where it is of another type."""
    if slot.dtype not in dtypes:
        names = ", ".join(str(one).removeprefix("torch.") for one in dtypes)
        raise slot.wrong(f"should be {names}")
    return slot


def check_shape(slot: StoredSlot, *shape: int) -> StoredSlot:
    """Return a tensor. Raises ModelError where it has another shape."""
    if slot.shape != shape:
        raise slot.wrong(f"should have the shape {list(shape)}")
    return slot


def check_alone(ctx: FormatContext, suffix: str, whole: Mapping[str, object]) -> None:
    """Raise ModelError for a tensor ``x.<suffix>`` where `whole` has no matrix ``x.weight``: scales without codes."""
    for module, slot in modules(ctx, suffix):
        if f"{module}.weight" not in whole:
            raise slot.wrong(f"has no codes beside it, which would be {module}.weight in 8 bits or less")
