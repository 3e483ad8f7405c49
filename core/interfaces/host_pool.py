"""Contract: where KV lies on the host, below the device's pool."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from pegboard.core.interfaces.options import OptionsT

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec


@dataclass(frozen=True, slots=True)
class HostPoolContext:
    """`num_pages` usable pages (page 0 comes on top and is never one) of `page_size` tokens, for the KV that these
    `layers` keep in `dtype`. `device` is the one that it comes from. `block_pages` pages make a block.
    """

    num_pages: int
    page_size: int
    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device
    block_pages: int = 1


class HostPool(abc.ABC, Generic[OptionsT]):
    """Pages of KV in host memory, in a layout of its own. All calls may run beside each other in several threads, as
    long as no host page is written by one of them and used by another; that is the caller's care.

    A *block* is `block_pages` pages in one byte format, the same whatever the layout and the page size: layer after
    layer, in the order of the context, first K then V, each of them `[block tokens, kv heads, head dim]` in the KV's
    own dtype, little endian, without padding.
    """

    def __init__(self, options: OptionsT, ctx: HostPoolContext) -> None:
        self.options = options
        self.num_pages = ctx.num_pages
        self.page_size = ctx.page_size
        self.layers = ctx.layers
        self.dtype = ctx.dtype
        self.block_pages = ctx.block_pages
        self.block_bytes = ctx.block_pages * ctx.page_size * self.bytes_per_token(ctx.layers, ctx.dtype)

    @classmethod
    def supports(cls, options: OptionsT, ctx: HostPoolContext) -> str | None:
        """Return None, or the reason why this pool cannot hold these layers."""
        return None

    @classmethod
    def bytes_per_token(cls, layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
        """Return bytes that one token takes in all layers; asked before the pool is built, to size it."""
        return dtype.itemsize * sum(layer.num_kv_heads * (layer.qk_head_dim + layer.v_head_dim) for layer in layers)

    @abc.abstractmethod
    def save(self, pool: KVPool, device: torch.Tensor, host: torch.Tensor) -> None:
        """Copy all layers of device pages int64 [n] to host pages int64 [n], both on the host. Returns when the host
        pages have it. The device pages may be written to meanwhile; then what they are given is undefined.
        """

    @abc.abstractmethod
    def load(self, pool: KVPool, layer_id: int, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy one layer of host pages int64 [n] to device pages int64 [n], both on the host. On an asynchronous device
        it is queued on the current stream; the host pages must then stay until that is through.
        """

    @abc.abstractmethod
    def write_block(self, host: torch.Tensor, out: memoryview) -> None:
        """Write the block of host pages int64 [block_pages] into `out`, `block_bytes` long."""

    @abc.abstractmethod
    def read_block(self, data: memoryview, host: torch.Tensor) -> None:
        """Fill host pages int64 [block_pages] from a block, `block_bytes` long."""

    def view_block(self, host: torch.Tensor) -> memoryview | None:
        """Return the memory of these host pages int64 [block_pages] where it is a block as it stands, to be read or
        written in place; None, as here, where the layout is another one.
        """
        return None

    def prepare(self, seconds: float) -> int:
        """Have the system provide the memory of host pages now and not when they are first written to, for about
        `seconds` at most. The number of pages, from the first on, that are provided for. Called before the first
        request, when no page holds anything; a pool whose memory is there from the beginning has nothing to do.
        """
        return self.num_pages

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of all buffers."""

    def close(self) -> None:  # optional: most pools have nothing to give back
        """Give the memory back. Nothing may be moving any more."""
