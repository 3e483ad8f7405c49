"""Loading: a batch's prefixes come from the host, layer by layer, while the layers before are computed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.step import StepLost

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.forward import Attention, ForwardBatch, LayerWatch
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.plugins.kv_tiers.api import HostPool, PageLoad

logger = logging.getLogger(__name__)

MISSING, THERE, LOST = 0, 1, -1
"""Values of `LayerWatch.flags`."""


class WatchedAttention:
    """Attention that asks a watch before each layer: so networks and backends need not know of any."""

    def __init__(self, attention: Attention, watch: LayerWatch) -> None:
        self._attention = attention
        self._watch = watch

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._watch.before(layer.layer_id)
        return self._attention.forward(q, k, v, layer, batch, sinks=sinks)


class HostLoads:
    """Fills device pages from the host pool for one batch at a time, in launch order.

    On a CPU a thread copies layer after layer, or, where nothing would be computed meanwhile, the caller does. On a
    CUDA device copies are queued on a stream of their own, with an event per layer.
    """

    def __init__(self, host: HostPool, pool: KVPool, device: torch.device) -> None:
        self._host = host
        self._pool = pool
        self._stream = torch.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-load")
        self._page_bytes = host.page_size * host.bytes_per_token(host.layers, host.dtype)
        self._bytes = 0
        self._seconds = 0.0

    def begin(self, loads: Sequence[PageLoad], *, ahead: bool) -> Loading:
        """Start to load. With `ahead` the layers may come while others are computed, and `before` has to be asked;
        otherwise all are there, or asked for, when this returns.
        """
        host = torch.from_numpy(np.concatenate([load.host for load in loads]))
        device = torch.from_numpy(np.concatenate([load.device for load in loads]))
        self._bytes += host.shape[0] * self._page_bytes
        if self._stream is not None:
            return self._queue(self._stream, host, device)
        loading = Loading(self._pool.layer_ids)
        if ahead:
            loading.copying = self._thread.submit(self._copy, loading, host, device)
        else:
            self._copy(loading, host, device)
        return loading

    def stats(self) -> dict[str, float]:
        """Return the bytes that were loaded, and the seconds that copying them took; on an asynchronous device these
        are not known.
        """
        return {"loaded_bytes_total": self._bytes, "load_seconds_total": self._seconds}

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    @torch.inference_mode()
    def _copy(self, loading: Loading, host: torch.Tensor, device: torch.Tensor) -> None:
        began = time.perf_counter()
        try:
            for layer_id in self._pool.layer_ids:
                self._host.load(self._pool, layer_id, host, device)
                loading.arrived(layer_id)
        except Exception as error:
            logger.exception("loading %d pages from the host failed", host.shape[0])
            loading.fail(error)
        self._seconds += time.perf_counter() - began

    def _queue(self, stream: torch.Stream, host: torch.Tensor, device: torch.Tensor) -> Loading:
        # Batches launched before may still read or write these pages.
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        loading = Loading(self._pool.layer_ids, stream)
        try:
            with stream:
                for layer_id in self._pool.layer_ids:
                    self._host.load(self._pool, layer_id, host, device)
                    loading.events[layer_id] = stream.record_event()
                    loading.arrived(layer_id)
        except Exception as error:
            logger.exception("loading %d pages from the host failed", host.shape[0])
            loading.fail(error)
        return loading


class Loading:
    """What one batch waits for, layer by layer: a LayerWatch."""

    def __init__(self, layer_ids: tuple[int, ...], stream: torch.Stream | None = None) -> None:
        self.flags: NDArray[np.int32] = np.full(len(layer_ids), MISSING, np.int32)
        self.events: dict[int, torch.Event] = {}
        self.copying: Future[None] | None = None
        self._stream = stream
        self._places = {layer_id: place for place, layer_id in enumerate(layer_ids)}
        self._error: Exception | None = None
        self._news = threading.Condition()

    def before(self, layer_id: int) -> None:
        place = self._places[layer_id]
        if self.flags[place] == MISSING:
            with self._news:
                self._news.wait_for(lambda: self.flags[place] != MISSING)
        if self.flags[place] == LOST:
            raise StepLost("the KV of a cached prefix was not loaded from the host") from self._error
        if self._stream is not None:
            torch.accelerator.current_stream(self._stream.device).wait_event(self.events[layer_id])

    def before_all(self) -> None:
        for layer_id in self._places:
            self.before(layer_id)

    def arrived(self, layer_id: int) -> None:
        """Note that a layer is there, or on an asynchronous device that its event is."""
        with self._news:
            self.flags[self._places[layer_id]] = THERE
            self._news.notify_all()

    def fail(self, error: Exception) -> None:
        """Note that the layers which have not arrived never will."""
        with self._news:
            self._error = error
            self.flags[self.flags == MISSING] = LOST
            self._news.notify_all()

    def end(self) -> None:
        """Wait until nothing is copied any more; pages that were being written to may go to others then."""
        if self.copying is not None:
            self.copying.result()
        elif self._stream is not None:
            # For all of the stream: of a layer that failed a part may have been queued, which no event stands for.
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)
