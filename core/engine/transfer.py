"""The engine that reads KV out of other servers' memory: built when a gate first asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.contracts import KV_TRANSFER
from pegboard.core.interfaces.kv_transfer import KVTransfer, KVTransferContext, Region

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.engine.choose import Chosen
    from pegboard.core.interfaces.kv_pool import KVPool


def regions_of(pool: KVPool) -> tuple[Region, ...]:
    """Return the buffers of a pool: K, then V of each layer, in the order of its layers."""
    return tuple(
        _region(buffer) for layer_id in pool.layer_ids for buffer in (pool.keys(layer_id), pool.values(layer_id))
    )


def _region(buffer: torch.Tensor) -> Region:
    """Describe [slots, heads, dim], contiguous."""
    slots, heads, _ = buffer.shape
    if not buffer.is_contiguous():
        raise ValueError("a buffer of the KV pool is not contiguous")
    on_host = buffer.device.type == "cpu"
    return Region(
        address=buffer.data_ptr(),
        nbytes=buffer.nbytes,
        slot_bytes=buffer.nbytes // slots,
        heads=heads,
        device=str(buffer.device),
        buffer=buffer.view(torch.uint8).view(-1).numpy().data if on_host else None,
    )


class TransferBuilder:
    """Builds the chosen engine when it is first called, and returns the same one from then on. An engine that no gate
    asks for is neither imported nor built.
    """

    def __init__(self, chosen: Chosen, pool: KVPool) -> None:
        self._chosen = chosen
        self._pool = pool
        self._built: KVTransfer | None = None
        self._closed = False

    def __call__(self) -> KVTransfer:
        """Return the engine. Raises ConfigError where none can work here, with each one's objection."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._built is None:
            ctx = KVTransferContext(regions_of(self._pool))
            choice = self._chosen.selection.choose(KV_TRANSFER, ctx)
            self._built = self._chosen.culprits.know(choice.record, choice.build(ctx))
        return self._built

    def stats(self) -> Mapping[str, float]:
        """Return what the engine tells of itself; nothing where it was not built."""
        return {} if self._built is None else self._built.stats()

    def close(self) -> None:
        """Close the engine, if it was built: before the memory of the pool goes."""
        self._closed = True
        if self._built is not None:
            self._built.close()
