"""MemoryProfiler: how much memory the largest steps take, found out by running them before KV gets what is left."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from pegboard.core.interfaces.batch import ModelWorkerBatch, SamplingInfo
from pegboard.core.interfaces.errors import OutOfMemory
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.sampling import LogprobRequest, SamplingParams
from pegboard.core.pipeline.req_to_token import ReqToTokenPool
from pegboard.core.pipeline.running import NUMBERS
from pegboard.core.pipeline.worker import Worker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.model_runner import ModelRunner
    from pegboard.core.pipeline.device import DeviceQueue

logger = logging.getLogger(__name__)

MARGIN = 0.02
"""Of all memory: what is left to the allocator's gaps, and to what libraries take at their first calls."""
PER_GRAPH = 2 * 2**20
"""Bytes that a captured graph takes for itself, beside what all of them share."""


SHORT = (2, 5, 9, 17, 33)
"""Tokens of short prompts: for 1 to 8 query heads of a KV head they need tiles of 16, 32, 64 and 128 rows."""


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


class MemoryProfiler:
    """Runs the largest steps over a scratch pool: a chunk of one prompt, one of as many prompts as may run, and a
    decode of as many requests, with logprobs. `chunk` None: prompts are not cut, so one as long as the context.
    """

    def __init__(
        self,
        runner: ModelRunner,
        make_pool: Callable[[int], KVPool],
        queue: DeviceQueue,
        page_size: int,
        running: int,
        chunk: int | None,
        max_context_len: int,
    ) -> None:
        self._running = running
        self._chunk = min(chunk or max_context_len, max_context_len)
        self._page_size = page_size
        num_pages = -(-self._chunk // page_size)
        self._width = num_pages * page_size
        self._rows = ReqToTokenPool(running, self._width, page_size, mirrored=True)
        # All rows have the same slots: what is computed is of no use.
        self._rows.host[1:] = np.arange(page_size, page_size + self._width)
        self.pool = make_pool(num_pages)
        self._worker = Worker(runner, runner.ctx.attention, self.pool, self._rows, queue)
        self._vocab_size = runner.ctx.spec.vocab_size
        self._versions = itertools.count(1)

    def prefills(self) -> None:
        """Run a chunk of one prompt, and one of many; then short ones beside a request of one token: kernels for small
        tiles are compiled now, and not while the first users wait.
        """
        self._run(np.array([self._chunk]))
        many = min(self._running, self._chunk)
        lengths = np.full(many, self._chunk // many)
        lengths[: self._chunk % many] += 1
        self._run(lengths)
        for length in SHORT:
            self._run(np.array([1, min(length, self._width)])[-self._running :])

    def prefill(self, tokens: int) -> None:
        """Run so many tokens of as few prompts as hold them."""
        count = min(-(-tokens // self._chunk), self._running)
        self._run(np.full(count, min(tokens // count, self._chunk)))

    def decode(self) -> None:
        """Run a decode of as many requests as may run, in the middle of their contexts."""
        count = self._running
        self._run(np.ones(count, np.int64), prefix=self._width - 1)

    def _run(self, lengths: NDArray[np.int64], prefix: int = 0) -> None:
        """Run requests of so many new tokens behind `prefix` old ones, each with a token sampled, and its logprobs."""
        decode = prefix > 0
        count, total = len(lengths), int(lengths.sum())
        ends = np.cumsum(lengths)
        positions = np.arange(total) - np.repeat(ends - lengths, lengths) + prefix
        params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9)
        numbers = np.array([params.row(seed, self._vocab_size) for seed in range(count)], NUMBERS)
        logprobs = (LogprobRequest(top=5),) * count
        rows = np.arange(1, count + 1)
        work = ModelWorkerBatch(
            bid=0,
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            input_ids=np.zeros(total, np.int64),
            positions=positions,
            rows=rows,
            seq_lens=lengths + prefix,
            extend_lens=lengths,
            prefix_lens=np.full(count, prefix),
            out_cache_loc=positions + self._page_size,
            sample_rows=None if decode else ends - 1,
            sampling=SamplingInfo(next(self._versions), numbers, np.zeros(count, np.int64), logprobs),
            sampled_rows=rows,
        )
        self._worker.run(work)
