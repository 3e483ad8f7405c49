"""Bringing arrays to the device amid a step, from a plugin that knows them only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    HostArray = NDArray[np.generic]

Bring = Callable[..., "tuple[torch.Tensor, ...]"]
"""Takes numpy arrays to the device, all in one copy, without waiting for it."""


def on_device(device: torch.device, bring: Bring | None, arrays: tuple[HostArray, ...]) -> tuple[torch.Tensor, ...]:
    """Return arrays on the device; without `bring`, one by one. On a CPU the tensors share the arrays' memory."""
    if bring is not None:
        return bring(*arrays)
    import torch

    return tuple(torch.from_numpy(array).to(device) for array in arrays)
