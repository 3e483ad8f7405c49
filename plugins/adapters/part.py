"""Where batches run: adapters are read and kept on the host, and put into slots as batches need them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.stage import DevicePart
from pegboard.plugins.adapters.api import AdapterContext
from pegboard.plugins.adapters.messages import NAME, BatchSlots, Drop, Load, Loaded, Poll
from pegboard.plugins.adapters.reading import AdapterReader
from pegboard.toolkit.system.blame import in_words
from pegboard.toolkit.system.compute import compute_alone, give_way

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.ahead import DeviceServices, LoadedModel
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.plugins.adapters.api import AdapterBackend
    from pegboard.plugins.adapters.options import AdapterSection
    from pegboard.toolkit.model.linear import NetworkSites

logger = logging.getLogger(__name__)


class AdapterPart(DevicePart):
    """Reads adapters, one at a time, in a thread that ends with the last of them. `make` builds the backend, once
    `sites` are known.
    """

    name = NAME

    def __init__(
        self,
        section: AdapterSection,
        sites: NetworkSites,
        dtype: torch.dtype,
        make: Callable[[AdapterContext], AdapterBackend],
    ) -> None:
        self._section = section
        self._sites = sites
        self._dtype = dtype
        self._make = make
        self._roots = [Path(one).resolve() for one in section.directories]
        self._prepared: dict[int, object] = {}
        self._in_slots: dict[int, int] = {}
        self._orders: queue.SimpleQueue[Load] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Loaded, object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._left = 0
        """Loads that were ordered and have not ended."""

    def attach(self, model: LoadedModel) -> None:
        """Read what the config names. Raises ModelError."""
        section, sites = self._section, self._sites.all
        ctx = AdapterContext(sites, self._dtype, model.device, section.slots, section.max_rank, self._sites.computed_by)
        self._backend = self._make(ctx)
        self._reader = AdapterReader(sites, self._dtype, section.max_rank)
        self.device_bytes = self._backend.device_bytes
        for uid, (name, path) in enumerate(section.preload.items(), start=1):
            try:
                self._done.put(self._read(uid, Path(path)))
            except ModelError as error:
                raise ModelError(f"adapters.preload.{name}: {error}") from error

    def unpack(self, payload: object, batch: ForwardBatch, put: Callable[[NDArray[np.generic]], torch.Tensor]) -> None:
        assert isinstance(payload, BatchSlots)
        for slot, uid in payload.uids.items():
            if self._in_slots.get(slot) != uid:
                self._backend.activate(slot, self._prepared[uid])
                self._in_slots[slot] = uid
        batch.additions = self._backend.begin(payload.slots, payload.lens, put)

    def run(self, payload: object, services: DeviceServices) -> object:
        if isinstance(payload, Load):
            self._order(payload)
            return True
        if isinstance(payload, Drop):
            self._drop(payload.uids)
            return True
        assert isinstance(payload, Poll)
        found = []
        while not self._done.empty():
            loaded, prepared = self._done.get()
            if not loaded.error:
                self._prepared[loaded.uid] = prepared
            found.append(loaded)
        return found

    def _drop(self, uids: Sequence[int]) -> None:
        for uid in uids:
            self._prepared.pop(uid, None)
        for slot, uid in list(self._in_slots.items()):
            if uid in uids:
                self._backend.clear(slot)
                del self._in_slots[slot]

    def _order(self, order: Load) -> None:
        with self._lock:
            self._orders.put(order)
            self._left += 1
            if self._left == 1:
                threading.Thread(target=self._work, name="adapters", daemon=True).start()

    def _work(self) -> None:
        compute_alone()
        give_way()
        while True:
            order = self._orders.get()
            self._done.put(self._load(order))
            with self._lock:
                self._left -= 1
                if not self._left:
                    return

    def _load(self, order: Load) -> tuple[Loaded, object]:
        try:
            if not order.digest:
                return self._read(order.uid, self._allowed(order.path))
            found = self._read(order.uid, Path(order.path))
            if found[0].digest != order.digest:
                raise ModelError(f"the files in {order.path} are not those that were loaded; load it again")
            return found
        except ModelError as error:
            return Loaded(order.uid, str(error)), None
        except Exception as error:
            logger.exception("loading an adapter failed")
            return Loaded(order.uid, f"{order.path} cannot be loaded: {in_words(error)}"), None

    def _allowed(self, path: str) -> Path:
        """Return a directory, links resolved. Raises ModelError for one outside of those that the config allows."""
        found = Path(path).resolve()
        if not any(found.is_relative_to(root) for root in self._roots):
            raise ModelError(f"{path} is not below adapters.directories")
        return found

    def _read(self, uid: int, path: Path) -> tuple[Loaded, object]:
        if not path.is_dir():
            raise ModelError(f"{path} is not a directory")
        read = self._reader.read(path)
        prepared = self._backend.prepare(read.weights)
        nbytes = self._backend.host_bytes(prepared, read.nbytes)
        return Loaded(uid, digest=read.digest, rank=read.rank, nbytes=nbytes), prepared
