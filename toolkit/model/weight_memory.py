"""Memory of a network's weights, given back and taken again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pegboard.core.interfaces.errors import Unsupported


@dataclass(frozen=True, slots=True)
class _View:
    """Which part of a block of memory a tensor was."""

    tensor: torch.Tensor
    block: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class WeightMemory:
    """Gives the memory of tensors back, which are empty meanwhile, and later the same views of other memory."""

    def __init__(self) -> None:
        self._views: list[_View] = []
        self._blocks: dict[int, int] = {}

    @property
    def released(self) -> bool:
        """Whether memory was given back and not taken again."""
        return bool(self._views)

    def release(self, tensors: Iterable[torch.Tensor]) -> int:
        """Give the memory of tensors back. Return its bytes, which count once where tensors share them. Raises
        Unsupported on a device: graphs that were recorded there have its addresses.
        """
        for tensor in tensors:
            if tensor.device.type == "cuda":
                raise Unsupported("the model", "release", "on a GPU recorded graphs hold on to its memory")
            storage = tensor.untyped_storage()
            if storage.nbytes():
                block, offset = storage.data_ptr(), int(tensor.storage_offset())
                self._blocks[block] = storage.nbytes()
                self._views.append(_View(tensor, block, offset, tensor.shape, tensor.stride()))
        for view in self._views:
            view.tensor.set_(_memory(0, view.tensor.device), 0, (0,), (1,))
        return sum(self._blocks.values())

    def resume(self) -> None:
        """Take memory for all that was given back. The numbers have no meaning until they are written."""
        taken: dict[int, torch.UntypedStorage] = {}
        for view in self._views:
            if view.block not in taken:
                taken[view.block] = _memory(self._blocks[view.block], view.tensor.device)
        for view in self._views:
            view.tensor.set_(taken[view.block], view.offset, view.shape, view.stride)
        self._views, self._blocks = [], {}


def _memory(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def check_put(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError for a tensor of another shape than is expected, or of no float type."""
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise ValueError(f"{name} is {list(tensor.shape)} of {tensor.dtype}, expected {list(shape)} of a float type")


def lent(target: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor that another may fill as `WeightStore.memory_of` has it, None where it cannot."""
    return target.detach() if target.device.type == "cpu" and target.is_contiguous() else None


def fill(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor to its place, unless it is `lent` memory, which is there already."""
    if tensor.data_ptr() != target.data_ptr() or tensor.dtype != target.dtype:
        target.copy_(tensor)
