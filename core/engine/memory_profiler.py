"""MemoryProfiler: how much memory the largest steps take, found out by running them before KV gets what is left."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.batch import ModelWorkerBatch, SamplingInfo
from pegboard.core.interfaces.forward import BatchStates, ForwardMode
from pegboard.core.interfaces.sampling import LogprobRequest, SamplingParams
from pegboard.core.interfaces.stage import DevicePart
from pegboard.core.pipeline.running import NUMBERS
from pegboard.core.worker.worker import Worker
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.model.states import state_round

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.model_runner import ModelRunner
    from pegboard.toolkit.device_queue import DeviceQueue

SHORT = (2, 5, 9, 17, 33)
"""Tokens of short prompts: for 1 to 8 query heads of a KV head they need tiles of 16, 32, 64 and 128 rows."""


class _Scratch(DevicePart):
    """Puts all KV groups at the same slots, and all states into slot 0, that of padding."""

    name = "scratch"

    def __init__(self, groups: int, states: Mapping[str, torch.Tensor] | None) -> None:
        self._groups = groups
        self._states = states

    def unpack(self, payload: object, batch: ForwardBatch, put: Callable[[NDArray[np.generic]], torch.Tensor]) -> None:
        batch.kv_groups *= self._groups
        if self._states is None:
            return
        lengths = np.ones(batch.batch_size, np.int64) if batch.extend_lens_cpu is None else batch.extend_lens_cpu
        firsts, slots = np.cumsum(lengths) - lengths, np.zeros(len(lengths), np.int64)
        fresh = np.full(len(lengths), not batch.forward_mode.is_decode)
        batch.states = BatchStates((state_round(firsts, lengths, slots, slots, fresh, put),), self._states)


class MemoryProfiler:
    """Runs the largest steps over a scratch pool: a chunk of one prompt, one of as many prompts as may run, and a
    decode of as many requests, with logprobs. `chunk` None: prompts are not cut, so one as long as the context.
    `states` is the memory of a model whose layers keep some.
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
        states: Mapping[str, torch.Tensor] | None = None,
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
        part = _Scratch(len(runner.ctx.spec.kv_groups), states)
        self._worker = Worker(runner, runner.ctx.attention, self.pool, self._rows, queue, parts=[part])
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
            logits_indices=None if decode else ends - 1,
            sampling=SamplingInfo(next(self._versions), numbers, np.zeros(count, np.int64), logprobs),
            sampled_rows=rows,
            payloads={_Scratch.name: None},
        )
        self._worker.run(work)
