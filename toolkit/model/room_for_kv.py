"""The memory for KV: what the largest steps leave, measured by running them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pegboard.core.interfaces.errors import OutOfMemory

logger = logging.getLogger(__name__)

MARGIN = 0.02
"""Of all memory: what is left to the allocator's gaps, and to what libraries take at their first calls."""
PER_GRAPH = 2 * 2**20
"""Bytes that a captured graph takes for itself, beside what all of them share."""


class MemoryMeter(Protocol):
    """Bytes of a device."""

    def total(self) -> int:
        """Return all that the device has."""

    def free(self) -> int:
        """Return what nothing uses now, and what was used before and is kept for later given back."""

    def watch(self) -> None:
        """Begin to look for a peak."""

    def peak(self) -> int:
        """Return the bytes that were taken at most since `watch`, beyond those that were taken then."""


class CudaMeter:
    """Those of a CUDA device, as torch's allocator takes them: whole segments, its gaps included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def watch(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device) - self._before


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes that steps take beside weights and KV: at most in any step (`step`), in the largest decode (`decode`) and
    in the largest prefill that will be a graph (`prefill`). Graphs share the last two: those of decodes come first.
    """

    step: int
    decode: int
    graphs: int = 0
    """Graphs that will be captured."""
    prefill: int = 0


def pool_bytes(free: int, total: int, needs: PeakMemory) -> int:
    """Return what is left for KV, at least 0: of `free` bytes without a pool, on a device of `total`."""
    graphs = needs.decode + needs.prefill + needs.graphs * PER_GRAPH if needs.graphs else 0
    return max(0, free - needs.step - graphs - int(MARGIN * total))


def measure(
    meter: MemoryMeter, prefills: Callable[[], None], *others: Callable[[], None], graphs: int = 0
) -> PeakMemory:
    """Run the largest prefills and the `others`, which are the largest decode and, where there is one, the largest
    prefill that will be a graph; return what they need.
    """
    peaks = []
    for run in (prefills, *others):
        meter.watch()
        run()
        peaks.append(meter.peak())
    return PeakMemory(max(peaks), peaks[1], graphs, *peaks[2:])


class LargestSteps(Protocol):
    """What runs the largest steps."""

    def prefills(self) -> None: ...

    def decode(self) -> None: ...

    def prefill(self, tokens: int) -> None: ...


def room_for_kv(meter: MemoryMeter, make: Callable[[], LargestSteps], graphs: int = 0, tokens: int = 0) -> int:
    """Return the bytes that the largest steps leave for KV. Of the `graphs` the largest prefill has so many `tokens`, 0
    if none is a prefill. Raises OutOfMemory where the steps do not fit at all.
    """
    free, total = meter.free(), meter.total()
    try:
        profiler = make()
        further = [lambda: profiler.prefill(tokens)] if tokens else []
        needs = measure(meter, profiler.prefills, profiler.decode, *further, graphs=graphs)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the largest steps do not fit into the {free / 2**30:.1f} GiB that the weights leave free; lower "
            "scheduler.chunked_prefill_size or scheduler.max_running_requests, or set memory.gpu_share"
        ) from error
    room = pool_bytes(free, total, needs)
    logger.info(
        "of %.1f GiB beside the weights the largest step takes %.2f GiB, the largest decode %.2f; KV gets %.1f GiB",
        free / 2**30,
        needs.step / 2**30,
        needs.decode / 2**30,
        room / 2**30,
    )
    return room
