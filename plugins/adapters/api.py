"""Contract: computing what LoRA adapters add to the products of linear layers (Hu et al. 2021)."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from pegboard.core.interfaces.options import OptionsT

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.forward import Additions
    from pegboard.toolkit.model.linear import Site

    Put = Callable[[NDArray[np.generic]], torch.Tensor]
    """Brings an array to the device, in the batch's single copy."""


COLUMN = "adapters.slot"
"""The column in which batches carry each request's slot in their extras, for additions that are fixed."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to some rows of a site: `scale` * b @ a @ x, to rows [start, start + len(b)). `a` is
    [rank, cols] and `b` [rows, rank], on the host, as the adapter's file has them.
    """

    start: int
    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter, read and checked: what it adds to each site, by the site's number. Parts of one site may differ in
    rank, and not all need to be there.
    """

    sites: dict[int, tuple[LowRank, ...]]


@dataclass(frozen=True, slots=True)
class AdapterContext:
    """The `sites` of the network, the type in which it computes, and its device. There are slots 1 to `slots`; no rank
    is above `max_rank`. `computed_by` is "" where products are tensors of torch; otherwise it names the runner that
    computes them itself, and a backend that does not know its form declines.
    """

    sites: tuple[Site, ...]
    dtype: torch.dtype
    device: torch.device
    slots: int
    max_rank: int
    computed_by: str = ""


class AdapterBackend(abc.ABC, Generic[OptionsT]):
    """Keeps one adapter in each slot, and computes what a batch's adapters add. All calls but `prepare` come from where
    batches run, one after the other.
    """

    def __init__(self, options: OptionsT, ctx: AdapterContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: AdapterContext) -> str | None:
        """Return None, or the reason why it cannot compute adapters here."""
        return None

    @property
    @abc.abstractmethod
    def device_bytes(self) -> int:
        """Bytes of the device that all slots take together, at most, beside what adapters take on the host."""

    @abc.abstractmethod
    def prepare(self, weights: AdapterWeights) -> object:
        """Return an adapter as `activate` wants it, on the host. Called in any thread, beside all other calls; it may
        take seconds.
        """

    def host_bytes(self, prepared: object, matrices: int) -> int:
        """Return the bytes of the host that an adapter takes as `prepare` has made it; `matrices` are those of its
        matrices in the type of the model.
        """
        return matrices

    @abc.abstractmethod
    def activate(self, slot: int, prepared: object) -> None:
        """Put an adapter into a slot, in the place of what is there: batches that begin from now on find it. Short."""

    @abc.abstractmethod
    def clear(self, slot: int) -> None:
        """Forget what is in a slot."""

    @abc.abstractmethod
    def begin(self, slots: NDArray[np.int64], lens: NDArray[np.int64], put: Put) -> Additions | None:
        """Return what the adapters of a batch add; None if no request has one. Request i has `lens[i]` tokens, request
        after request, and its adapter is in `slots[i]`; 0: it has none. What slots hold now counts until the batch is
        through, whatever is activated meanwhile. With the capability `graph` it is FixableAdditions.
        """
