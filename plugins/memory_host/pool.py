"""Two host pools, which differ in how their memory is laid out."""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.kv_tiers.api import HostPool
from pegboard.plugins.memory_host.buffer import HostBuffer, Part
from pegboard.plugins.memory_host.copies import Copies, DirectCopies, QueuedCopies

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.plugins.kv_tiers.api import HostPoolContext

_PREPARED_AT_ONCE = 2**25
"""Bytes, in all buffers together."""


class PagedHostPool(HostPool[NoOptions]):
    """What both layouts share: they know where K and V of a layer lie in each page, and move them as bytes.

    A subclass sets `parts` in `lay_out`: K and V by layer id, or the latent, in the order of the context.
    """

    def __init__(self, options: NoOptions, ctx: HostPoolContext) -> None:
        super().__init__(options, ctx)
        ids = [layer.layer_id for layer in ctx.layers]
        if len(set(ids)) < len(ids):
            raise ValueError(f"two layers have the id {max(ids, key=ids.count)}")
        self.device = ctx.device
        self.copies = self.make_copies(ctx.device)
        self.buffers: list[HostBuffer] = []
        self.parts: dict[int, tuple[Part, ...]] = self.lay_out()

    @classmethod
    def supports(cls, options: NoOptions, ctx: HostPoolContext) -> str | None:
        for layer in ctx.layers:
            if not (layer.qk_head_dim and layer.v_head_dim):
                return f"layer {layer.layer_id} has no K or no V"
        return None

    @abstractmethod
    def lay_out(self) -> dict[int, tuple[Part, ...]]:
        """Allocate the memory, and return where K and V of each layer lie in it, or its latent."""

    def make_copies(self, device: torch.device) -> Copies:
        """Return what copies pages between this device and the host."""
        return QueuedCopies() if device.type == "cuda" else DirectCopies()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes] that the pool holds until it is closed."""
        self.buffers.append(HostBuffer(nbytes, self.device))
        return self.buffers[-1].data

    def part_bytes(self, layer: LayerSpec) -> tuple[int, ...]:
        """Return bytes of K and of V that a page has of a layer, or of its latent."""
        return tuple(self.page_size * self.dtype.itemsize * numbers for numbers in layer.kept)

    def save(self, pool: KVPool, device: torch.Tensor, host: torch.Tensor) -> None:
        sources, targets = self._pairs(device, host)
        for layer_id, parts in self.parts.items():
            for buffer, part in zip(pool.buffers(layer_id), parts, strict=True):
                self.copies.save(buffer, sources, part, targets)

    def load(self, pool: KVPool, layer_id: int, host: torch.Tensor, device: torch.Tensor) -> None:
        targets, sources = self._pairs(device, host)
        for buffer, part in zip(pool.buffers(layer_id), self.parts[layer_id], strict=True):
            self.copies.load(part, sources, buffer, targets)

    def write_block(self, host: torch.Tensor, out: memoryview) -> None:
        pages, block = self._block_pages(host), self._block(out)
        for part, place in self._places():
            block[place].view(part.records.dtype)[:] = part.records[pages]

    def read_block(self, data: memoryview, host: torch.Tensor) -> None:
        pages, block = self._block_pages(host), self._block(data)
        for part, place in self._places():
            part.records[pages] = block[place].view(part.records.dtype)

    def prepare(self, seconds: float) -> int:
        """Write to all pages, the first ones first, since these are handed out first."""
        rows = self.num_pages + 1
        step, done, end = max(1, _PREPARED_AT_ONCE * rows // max(1, self.nbytes)), 0, time.monotonic() + seconds
        while done < rows and time.monotonic() < end:
            for buffer in self.buffers:
                page = buffer.nbytes // rows
                buffer.provide(done * page, min(rows, done + step) * page)
            done = min(rows, done + step)
        return max(0, done - 1)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def close(self) -> None:
        self.parts.clear()
        for buffer in self.buffers:
            buffer.close()
        self.buffers.clear()

    def _places(self) -> list[tuple[Part, slice]]:
        """Return each part with its place in a block."""
        places, begin = [], 0
        for part in (part for parts in self.parts.values() for part in parts):
            stop = begin + self.block_pages * part.page_bytes
            places.append((part, slice(begin, stop)))
            begin = stop
        return places

    def _pairs(self, device: torch.Tensor, host: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if device.shape != host.shape:
            raise ValueError(f"{device.shape[0]} device pages cannot be copied to or from {host.shape[0]} host pages")
        return device.numpy(), self._checked(host)

    def _block_pages(self, host: torch.Tensor) -> NDArray[np.int64]:
        if host.shape != (self.block_pages,):
            raise ValueError(f"a block has {self.block_pages} pages, not {list(host.shape)}")
        return self._checked(host)

    def _block(self, data: memoryview) -> NDArray[np.uint8]:
        if data.nbytes != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {data.nbytes}")
        return np.frombuffer(data, np.uint8)

    def _checked(self, host: torch.Tensor) -> NDArray[np.int64]:
        """Return host pages as an index. Raises IndexError where one of them is none."""
        pages: NDArray[np.int64] = host.numpy()
        if pages.size and not 1 <= pages.min() <= pages.max() <= self.num_pages:
            raise IndexError(f"host pages run from 1 to {self.num_pages}, not from {pages.min()} to {pages.max()}")
        return pages


class LayerFirst(PagedHostPool):
    """One K and one V buffer per layer, [pages, page_size, heads, dim], as on the device."""

    def lay_out(self) -> dict[int, tuple[Part, ...]]:
        return {layer.layer_id: tuple(map(self._part, self.part_bytes(layer))) for layer in self.layers}

    def _part(self, page_bytes: int) -> Part:
        pages = self.num_pages + 1
        return Part(self.allocate(pages * page_bytes).view(pages, page_bytes))


class PageFirst(PagedHostPool):
    """Page after page, in each of them layer after layer, first K then V: [page_size, heads, dim] of their own.

    So a page is a block, where a block has one page. Where it has several, each part of it lies in as many places.
    """

    def lay_out(self) -> dict[int, tuple[Part, ...]]:
        pages = self.num_pages + 1
        page_bytes = self.page_size * self.bytes_per_token(self.layers, self.dtype)
        self.pages = self.allocate(pages * page_bytes).view(pages, page_bytes)
        parts, begin = {}, 0
        for layer in self.layers:
            stops = list(itertools.accumulate(self.part_bytes(layer), initial=begin))
            parts[layer.layer_id] = tuple(Part(self.pages[:, first:stop]) for first, stop in itertools.pairwise(stops))
            begin = stops[-1]
        return parts

    def view_block(self, host: torch.Tensor) -> memoryview | None:
        if self.block_pages > 1:
            return None
        (page,) = self._block_pages(host).tolist()
        return self.pages[page].numpy().data

    def write_block(self, host: torch.Tensor, out: memoryview) -> None:
        view = self.view_block(host)
        if view is None:
            super().write_block(host, out)
        else:
            self._block(out)[:] = np.frombuffer(view, np.uint8)

    def read_block(self, data: memoryview, host: torch.Tensor) -> None:
        view = self.view_block(host)
        if view is None:
            super().read_block(data, host)
        else:
            np.frombuffer(view, np.uint8)[:] = self._block(data)

    def close(self) -> None:
        super().close()
        self.pages = self.pages[:0].clone()
