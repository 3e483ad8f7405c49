"""A batch on its way to FlashInfer: lists of pages, their indices on the device, and masks, each made once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.errors import Unsupported
from pegboard.plugins.attn_flashinfer.masks import MaskShape, mask_shape, pack
from pegboard.plugins.attn_flashinfer.planning import Kind, Lens, Pages, Use, first_keys, list_pages, shared_pages
from pegboard.plugins.attn_flashinfer.wrappers import Listed
from pegboard.toolkit.kernels.operations import gather_indices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.attention import AttentionContext
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.plugins.attn_flashinfer.shell import Shell


@dataclass(frozen=True, slots=True)
class View:
    """What layers of a use look at: a KV group through a window. `level` is that of the cascade: 0 is the common
    prefix, 1 what comes after it; for all other uses it is 1, and nothing is common.
    """

    kv_group: int
    window: int | None
    masked: bool
    level: int
    common_prefix: int


def views_of(kind: Kind, use: Use, lens: Lens) -> tuple[View, ...]:
    """Return the views that layers of a kind need; the last one is that of each request's own keys."""
    if use is Use.CASCADE:
        return tuple(View(kind.kv_group, None, False, level, lens.common_prefix) for level in (0, 1))
    return (View(kind.kv_group, kind.window, use is Use.MASKED, 1, 0),)


@dataclass(frozen=True, slots=True)
class Seen:
    """A view of a batch, ready for `plan`."""

    listed: Listed
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Host:
    pages: Pages
    shape: MaskShape | None

    def arrays(self) -> list[NDArray[np.int32] | NDArray[np.int64]]:
        """Return what has to be on the device."""
        own: list[NDArray[np.int32] | NDArray[np.int64]] = [self.pages.kv_indptr, self.pages.firsts]
        if self.shape is not None:
            columns = self.shape.columns
            own += [columns, (columns[2] + 7) // 8]
        return own


class Step:
    """Of one batch. All that the device has to know comes there in one copy."""

    def __init__(self, batch: ForwardBatch, lens: Lens, ctx: AttentionContext, shell: Shell) -> None:
        self._batch, self._lens, self._ctx, self._shell = batch, lens, ctx, shell

    def see(self, views: Iterable[View], buffers: dict[View, torch.Tensor]) -> dict[View, Seen]:
        """Return each view. Its indices are written to its buffer, where there is one, and else to a new tensor."""
        found = {view: self._on_host(view) for view in views}
        arrays = [array for host in found.values() for array in host.arrays()]
        rest = iter(self._ctx.on_device(*arrays))
        seen = {}
        for view, host in found.items():
            kv_indptr, firsts = next(rest), next(rest)
            total = host.pages.total
            if view in buffers:
                indices = buffers[view][:total]
            else:
                indices = torch.empty(total, dtype=torch.int32, device=self._ctx.device)
            self._gather(view, host.pages, kv_indptr, firsts, indices)
            mask = None if host.shape is None else self._mask(view, host.shape, next(rest), next(rest))
            seen[view] = Seen(Listed.of(host.pages, indices, self._shell), mask)
        return seen

    def _on_host(self, view: View) -> _Host:
        page_size = self._ctx.page_size
        if view.level == 0:
            return _Host(shared_pages(view.common_prefix, page_size), None)
        first = first_keys(self._lens, view.window) if view.window is not None else view.common_prefix
        pages = list_pages(self._lens.seq, first, page_size)
        shape = mask_shape(self._lens, pages, page_size) if view.masked else None
        if shape is not None and shape.size >= 1 << 31:
            raise Unsupported("flashinfer", "tree_mask", "more new tokens times keys than masks can hold")
        return _Host(pages, shape)

    def _gather(
        self, view: View, pages: Pages, kv_indptr: torch.Tensor, firsts: torch.Tensor, out: torch.Tensor
    ) -> None:
        rows = self._batch.req_pool_indices
        gather_indices(
            self._batch.kv_groups[view.kv_group].row_table,
            rows[:1] if view.level == 0 else rows,
            kv_indptr,
            out,
            page_size=self._ctx.page_size,
            longest=pages.longest,
            firsts=firsts,
        )

    def _mask(self, view: View, shape: MaskShape, columns: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        assert self._batch.tail_lens is not None
        assert self._batch.tail_bits is not None
        return pack(shape, columns, counts, self._batch.tail_lens, self._batch.tail_bits, view.window)
