"""Client: the connection to Mooncake Store, which is made in a thread, and the memory that blocks travel through."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pegboard.plugins.kv_tiers.api import StorageError
from pegboard.plugins.storage_mooncake.options import MooncakeOptions

logger = logging.getLogger(__name__)

AGAIN = 10.0
"""Seconds after which a connection that failed is tried again."""
LOCAL_BUFFER = 16 << 20
"""Bytes that the library keeps for copies of its own."""


class Store(Protocol):
    """What is used of `MooncakeDistributedStore`. Codes are 0 or what was read where it went well, and negative."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int: ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def unregister_buffer(self, buffer_ptr: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]: ...

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]: ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int: ...

    def close(self) -> int: ...


def library() -> type[Store]:
    """Return the class of stores. Raises ImportError."""
    from mooncake.store import MooncakeDistributedStore

    found: type[Store] = MooncakeDistributedStore
    return found


class Client:
    """A store, once it is connected, and `frames` pieces of registered memory of `frame_bytes`, for the thread that
    holds `lock`. The library waits for a minute and more where no master answers, so that is left to a thread.
    """

    def __init__(self, options: MooncakeOptions, frames: int, frame_bytes: int) -> None:
        self._options = options
        self._frame_bytes = frame_bytes
        self._memory = np.zeros((frames, frame_bytes), np.uint8)
        self._store: Store | None = None
        self._ready, self._closing = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self._thread = threading.Thread(target=self._connect, name="pegboard-mooncake", daemon=True)
        self._thread.start()

    @property
    def frames(self) -> int:
        return len(self._memory)

    def frame(self, number: int) -> memoryview:
        """Return a piece of the memory."""
        return memoryview(self._memory[number].data)

    def store(self) -> Store:
        """Return the store. Raises StorageError where it is not connected, and is not soon."""
        if not self._ready.wait(self._options.timeout) or self._store is None:
            raise StorageError(f"Mooncake's master at {self._options.master} does not answer")
        return self._store

    def read(self, keys: Sequence[str]) -> list[int]:
        """Read objects into the first frames. Return their sizes, or codes."""
        return self.store().batch_get_into(list(keys), *self._pieces(len(keys)))

    def write(self, keys: Sequence[str]) -> list[int]:
        """Write objects from the first frames, unless they are there. Return codes."""
        return self.store().batch_put_from(list(keys), *self._pieces(len(keys)))

    def close(self) -> None:
        """Let go of the store. One that is being connected is left to its thread."""
        self._closing.set()
        if self._ready.is_set() and self._store is not None:
            self._store.unregister_buffer(self._memory.ctypes.data)
            self._store.close()

    def _pieces(self, count: int) -> tuple[list[int], list[int]]:
        first = self._memory.ctypes.data
        return [first + number * self._frame_bytes for number in range(count)], [self._frame_bytes] * count

    def _connect(self) -> None:
        while not self._closing.is_set():
            store, options = library()(), self._options
            code = store.setup(
                options.hostname,
                options.metadata,
                options.segment_bytes,
                LOCAL_BUFFER,
                options.protocol,
                options.devices,
                options.master,
            )
            code = code or store.register_buffer(self._memory.ctypes.data, self._memory.nbytes)
            if code == 0:
                self._store = store
                self._ready.set()
                return
            logger.warning("Mooncake's master at %s cannot be reached (%d); trying again", options.master, code)
            self._closing.wait(AGAIN)
