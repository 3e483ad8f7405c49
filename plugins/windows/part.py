"""Where batches run: the row tables of the groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from pegboard.core.interfaces.forward import KVGroupView
from pegboard.core.interfaces.stage import DevicePart
from pegboard.plugins.windows.messages import NAME, Ask, Memory, WindowWork

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.ahead import DeviceServices
    from pegboard.core.interfaces.forward import ForwardBatch

R = TypeVar("R")


class WindowPart(DevicePart):
    """Keeps the row table of each KV group but the first, which is as old as the batch that runs."""

    name = NAME
    kv_groups = True

    def __init__(self) -> None:
        self._tables: tuple[torch.Tensor, ...] = ()
        self._changes: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def run(self, payload: object, services: DeviceServices) -> object:
        """Take the tables, and say what memory there is."""
        assert isinstance(payload, Ask)
        pool, self._tables = services.pool, services.further_tables
        pages = pool.ctx.further_pages or (pool.ctx.num_pages,) * len(self._tables)
        return Memory(tuple(pages), *services.row_table.shape)

    def unpack(self, payload: object, batch: ForwardBatch, put: Callable[[NDArray[np.generic]], torch.Tensor]) -> None:
        assert isinstance(payload, WindowWork)
        self._changes = tuple((put(group.places), put(group.slots)) for group in payload.groups)
        views = (
            KVGroupView(table, put(group.out_cache_loc))
            for table, group in zip(self._tables, payload.groups, strict=True)
        )
        batch.kv_groups = (*batch.kv_groups, *views)

    def execute(self, payload: object, batch: ForwardBatch, run: Callable[[], R]) -> R:
        for table, (places, slots) in zip(self._tables, self._changes, strict=True):
            table.view(-1).index_copy_(0, places, slots)
        return run()
