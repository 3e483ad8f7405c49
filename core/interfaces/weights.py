"""Weights that are replaced, or whose memory is given back, while an engine serves."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's whole shape, and the type in which it is kept. Those of one `group` but "" come in one update."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    group: str = ""


class WeightStore(abc.ABC):
    """The loaded weights of a model, by their names in its checkpoint. Called where batches run, between two of them.

    An update is `begin`, a `put` for each tensor, and `finish`. Its tensors are compared with `expected` before it
    begins. If one of its calls raises, the weights have no meaning until an update of all of them has finished.
    """

    @abc.abstractmethod
    def expected(self) -> Mapping[str, TensorSpec]:
        """Return all tensors of the model, whether their memory is there or not."""

    def ignores(self, name: str) -> bool:
        """Return whether checkpoints of the model may have a tensor of this name that is not needed."""
        return False

    @abc.abstractmethod
    def begin(self, names: Collection[str]) -> None:
        """Begin an update of the tensors with these names, after one that was broken off, too."""

    def memory_of(self, name: str) -> torch.Tensor | None:
        """Return the memory on the CPU, contiguous, that a tensor of an update that has begun will have. It may be
        filled before `put` is called with it, which saves a copy. None where there is no such memory.
        """
        return None

    @abc.abstractmethod
    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a tensor by one of its shape and of any float type, which is converted; it may be on another device,
        and is not kept. Raises KeyError for a name and ValueError for a shape that is not expected.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """End the update. Raises ValueError if tensors that `begin` named did not come, or any after `release`."""

    @abc.abstractmethod
    def read(self, name: str, most: int) -> torch.Tensor:
        """Return the first numbers of a tensor, `most` at most: a flat copy on the CPU, in the type in which they are
        kept. Raises KeyError for an unknown name, and Unsupported where they cannot be read.
        """

    @abc.abstractmethod
    def release(self) -> int:
        """Give the memory of all weights back; its bytes. No batch runs until an update of all of them has finished."""
