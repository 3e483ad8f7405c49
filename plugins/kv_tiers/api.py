"""Contract: KV below the device's pool, on the host and in blocks of storages, and what a prefix cache is lent of it.

A cache decides which page goes where, in the scheduler's thread. It speaks of page numbers and never sees what is in
them: a `PageMover` moves pages in threads of its own, and the device part `kv_tiers` loads them for a batch.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, runtime_checkable

from pegboard.core.interfaces.options import OptionsT

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.keys import PrefixKey
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.core.interfaces.prefix_cache import PrefixCacheContext

NAME = "kv_tiers"
"""Of the service that a cache finds in its context, and of the device part that loads what it promises."""
ORIGINS = ("host", "storage")
"""Where promised tokens come from (`PrefixCache.origins`)."""

# ---- what a cache is lent -----------------------------------------------------------------------------------------


class Tiers:
    """What is below the device's pages, for one prefix cache, which closes it. `identity` is a digest of what KV
    depends on beside its tokens and their namespace, empty where none leaves this process: what does is found by equal
    identities only.
    """

    def __init__(self, mover: PageMover, identity: bytes = b"") -> None:
        self.mover = mover
        self.identity = identity

    def stats(self) -> Mapping[str, float]:
        """Return what was moved, by direction, and how the storages are."""
        return {}

    def prepare(self, seconds: float) -> tuple[int, int]:
        """Provide for the host's memory, for about `seconds` at most. Return the tokens it is there for, and all."""
        return 0, 0

    def close(self) -> None:
        """End the threads, and let go of storages and memory."""


def tiers_of(ctx: PrefixCacheContext) -> Tiers | None:
    """Return what a cache is lent; None where there is nothing beyond the device."""
    found = ctx.services.get(NAME)
    return found if isinstance(found, Tiers) else None


@dataclass(frozen=True, slots=True)
class PageLoad:
    """Host pages int64 [n] with what goes into device pages int64 [n] before a batch reads them: what `load` of a cache
    with these tiers returns. The device pages are the caller's, the host pages stay as they are until `loaded`.
    `ticket` is the cache's own.
    """

    ticket: int
    device: NDArray[np.int64]
    host: NDArray[np.int64]


class Prefetch(Protocol):
    """Blocks on their way from storages to the host (capability `prefetch` of a cache).

    `tokens` of the prompt are on the device or the host by now. `wanted` will be, as far as storages are known to have
    it; None until that is known. Once `done`, nothing more comes.
    """

    @property
    def done(self) -> bool: ...

    @property
    def tokens(self) -> int: ...

    @property
    def wanted(self) -> int | None: ...

    def close(self) -> None:
        """Let go of it, done or not: what has come stays, what is still to come is not wanted. Twice does no harm."""


@runtime_checkable
class Prefetching(Protocol):
    """A prefix cache with the capability `prefetch`."""

    def prefetch(self, key: PrefixKey) -> Prefetch:
        """Begin to bring what storages have of `key` to the host."""


# ---- the mover ----------------------------------------------------------------------------------------------------


class Job(Protocol):
    """A move that was asked for. The mover's threads write `result` and `error` before `done`.

    `result` is how many pages, blocks or keys were moved or found, counted from the first one on: those that come after
    it were not, or are not known to be. `error` says why a job stopped early, "" where nothing went wrong; a miss is
    no error. Until a job is done its host pages are being read or written, whatever `cancel` was told.
    """

    @property
    def done(self) -> bool: ...

    @property
    def result(self) -> int: ...

    @property
    def error(self) -> str: ...


class PageMover(Protocol):
    """Moves whole pages in threads of its own. No call blocks but `wait`, and none raises for what a tier does wrong.

    Device pages are those of the token allocator. Host pages are 1 to `host_pages`; they belong to the cache, all of
    them. A block is what storages keep: `block_pages` consecutive pages of a sequence, the first block beginning at the
    sequence's start. `stores` are the storages' names, nearest first. Where there is no host tier, `host_pages` is 0,
    and where there is no storage, `stores` is empty. Arrays of pages are int64, and the mover copies them.
    """

    @property
    def host_pages(self) -> int: ...

    @property
    def block_pages(self) -> int: ...

    @property
    def stores(self) -> tuple[str, ...]: ...

    def save(self, device: NDArray[np.int64], host: NDArray[np.int64]) -> Job:
        """Copy device pages [n] to host pages [n]. Jobs run in the order in which they were asked for.

        Nothing keeps a device page from being freed and written to meanwhile: what was copied of such a page is
        undefined, and only the caller knows.
        """

    def store(self, store: int, keys: Sequence[bytes], host: NDArray[np.int64]) -> Job:
        """Write blocks, host pages [blocks, block_pages], to the storage of this index. What it has is not written
        again.
        """

    def find(self, keys: Sequence[bytes]) -> Job:
        """Count how many of these blocks some storage has, from the first on."""

    def fetch(self, keys: Sequence[bytes], host: NDArray[np.int64]) -> Job:
        """Read blocks into host pages [blocks, block_pages]. What counts has been verified; what is in the other pages
        is undefined.
        """

    def cancel(self, job: Job) -> None:
        """Ask a job to stop. It is over once it is `done`, with what had been moved by then."""

    def wait(self, jobs: Sequence[Job], timeout: float) -> bool:
        """Wait until all jobs are done, for `timeout` seconds at most; whether they are."""


# ---- contract: host_pool ------------------------------------------------------------------------------------------


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
    layer, in the order of the context, first K then V (of a latent layer K alone), each of them `[block tokens, kv
    heads, head dim]` in the KV's own dtype, little endian, without padding.
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
        return dtype.itemsize * sum(sum(layer.kept) for layer in layers)

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


# ---- contract: kv_storage -----------------------------------------------------------------------------------------


class StorageError(Exception):
    """A storage cannot do what it was asked for. The message is for the operator's log."""


@dataclass(frozen=True, slots=True)
class KVStorageContext:
    """`identity` (hexadecimal) says what the KV was computed by, and in which form it is kept: storages of another
    identity have nothing in common, even in one place. All blocks have `block_bytes`. Deadlines are of `clock`.
    """

    identity: str
    block_bytes: int
    clock: Clock = time.monotonic


class KVStorage(abc.ABC, Generic[OptionsT]):
    """Keeps blocks of bytes. A block is all there, as it was written, or it is not there: one that is torn, damaged or
    stands under another key is a miss, and is removed.

    Keys are any bytes, 32 to 64 of them; a key always stands for the same bytes, so what is there need not be written
    again. Calls come from several threads at once. What is returned counts from the first key on. No call goes on long
    beyond its `deadline`, seconds by the context's clock; it then returns what it has so far. A storage raises
    StorageError where it cannot work (and anything else it raises counts the same); a miss is not an error,
    and neither is a block that was dropped for lack of space.
    """

    def __init__(self, options: OptionsT, ctx: KVStorageContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: KVStorageContext) -> str | None:
        """Return None, or the reason why it cannot work here, with what to do: a folder that cannot be written to, say.
        It changes nothing.
        """
        return None

    @abc.abstractmethod
    def exists(self, keys: Sequence[bytes], deadline: float) -> int:
        """Count how many blocks are there, from the first on. What is there may still turn out to be damaged."""

    @abc.abstractmethod
    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> int:
        """Read blocks into these buffers of `block_bytes`; how many are there and verified, from the first on. What is
        in the other buffers is undefined.
        """

    @abc.abstractmethod
    def set(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> int:
        """Write blocks; how many are there now, from the first on. A block appears all at once."""

    @abc.abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove blocks; those that are not there do not matter."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Remove all blocks of this identity."""

    def stats(self) -> Mapping[str, float]:
        """Return what an operator may want to know (bytes held, blocks removed...), by name."""
        return {}

    def close(self) -> None:  # optional
        """Let go of threads, files and connections. No other call is under way, and none comes after."""
