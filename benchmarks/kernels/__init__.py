"""Which kernels are compiled, for which shapes: one module per owner, found by its being here.

To add cases, put a module into this folder that has `CASES: tuple[Case, ...]`. A case calls what launches kernels, with
tensors of the device "meta", in the shapes and types of a real model; nothing runs. Whatever it launches (through
`toolkit.kernels.launch`) is recorded, and compiled for the arguments and constants that it was launched with: so
there is no list of signatures that could be wrong. Launches that compile to the same are compiled once. What holds
kernels back on this device (`kernels.usable`) is off meanwhile.

    CASES = (Case("rms_norm 4096", lambda target: rms_norm(target.empty(8, 4096), target.empty(4096), 1e-5)),)

Code that chooses block sizes by the device's compute capability gets `target.capability`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Target:
    """What is compiled for: "sm_90" as (9, 0)."""

    capability: tuple[int, int]

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return a tensor without data."""
        return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Case:
    """A name for the table, and what launches. Kernels named in `tensor_cores` must use those of the target."""

    name: str
    run: Callable[[Target], object]
    tensor_cores: frozenset[str] = frozenset()
