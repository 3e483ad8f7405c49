"""Batch building: from what was decided to what a worker needs. Flat arrays, no per-token Python."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.batch import ModelWorkerBatch, SamplingInfo, ScheduleBatch
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.sampling import LogprobRequest, SamplingRow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.logits_processor import LogitsProcessor
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.admission import PrefillItem
    from pegboard.core.pipeline.memory import MemoryManager


class BatchBuilder:
    """Makes ScheduleBatch and ModelWorkerBatch. Keeps the sampling arrays of a decode batch while its requests stay
    the same.
    """

    def __init__(self, memory: MemoryManager, processors: Sequence[LogitsProcessor], vocab_size: int) -> None:
        self._memory = memory
        self._processors = tuple(processors)
        self._vocab_size = vocab_size
        self._bids = itertools.count(1)
        self._versions = itertools.count(1)
        self._sampled: list[Req] = []
        self._info: SamplingInfo | None = None

    def decode(self, reqs: list[Req]) -> ScheduleBatch:
        """One token for each of `reqs`, whose rows have room for it."""
        n = len(reqs)
        seq_lens = np.fromiter((req.seq_len for req in reqs), np.int64, n)
        return ScheduleBatch(
            bid=next(self._bids),
            forward_mode=ForwardMode.DECODE,
            reqs=list(reqs),
            seq_lens=seq_lens,
            extend_lens=np.ones(n, np.int64),
            prefix_lens=seq_lens - 1,
            decoding=n,
        )

    def extend(self, items: Sequence[PrefillItem], decoding: Sequence[Req] = ()) -> ScheduleBatch:
        """A prefill, with decodes mixed in at its end."""
        reqs = [item.req for item in items] + list(decoding)
        prefix = [item.prefix_len for item in items] + [req.seq_len - 1 for req in decoding]
        extend = [item.extend_len for item in items] + [1] * len(decoding)
        prefix_lens, extend_lens = np.array(prefix, np.int64), np.array(extend, np.int64)
        return ScheduleBatch(
            bid=next(self._bids),
            forward_mode=ForwardMode.MIXED if decoding else ForwardMode.EXTEND,
            reqs=reqs,
            seq_lens=prefix_lens + extend_lens,
            extend_lens=extend_lens,
            prefix_lens=prefix_lens,
            decoding=len(decoding),
            partial=frozenset(item.req.rid for item in items if item.partial),
        )

    def worker_batch(self, batch: ScheduleBatch) -> ModelWorkerBatch:
        """The worker's share of a batch whose slots are allocated."""
        reqs = batch.reqs
        rows = np.fromiter((req.kv.row for req in reqs), np.int64, len(reqs))
        sampled = [req for req in reqs if req.rid not in batch.partial] if batch.partial else reqs
        if batch.forward_mode.is_decode:
            positions = batch.prefix_lens
            input_ids = np.fromiter((req.tokens.last for req in reqs), np.int64, len(reqs))
            out_cache_loc = self._memory.rows.host[rows, positions].astype(np.int64)
            sample_rows = None
        else:
            spans = list(zip(reqs, batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=True))
            input_ids = np.concatenate([req.tokens.view(start, stop) for req, start, stop in spans])
            positions = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
            host = self._memory.rows.host
            out_cache_loc = np.concatenate([host[req.kv.row, start:stop] for req, start, stop in spans]).astype(
                np.int64
            )
            ends = np.cumsum(batch.extend_lens) - 1
            keep = np.fromiter((req.rid not in batch.partial for req in reqs), np.bool_, len(reqs))
            sample_rows = ends[keep]
        return ModelWorkerBatch(
            bid=batch.bid,
            forward_mode=batch.forward_mode,
            input_ids=input_ids,
            positions=positions,
            rows=rows,
            seq_lens=batch.seq_lens,
            extend_lens=batch.extend_lens,
            prefix_lens=batch.prefix_lens,
            out_cache_loc=out_cache_loc,
            sample_rows=sample_rows,
            sampling=self._sampling(sampled) if sampled else None,
            extras=batch.extras,
        )

    def _sampling(self, reqs: list[Req]) -> SamplingInfo:
        steps = np.fromiter((req.output_len for req in reqs), np.int64, len(reqs))
        info = self._info
        if info is None or not _same(reqs, self._sampled):
            info = self._info = self._new_sampling(reqs)
            self._sampled = list(reqs)
        info.steps = steps
        if info.rows:
            # Views of the growing token buffers: made anew, because an append may have moved them.
            info.rows = _rows(reqs)
        return info

    def _new_sampling(self, reqs: list[Req]) -> SamplingInfo:
        params = [req.sampling for req in reqs]
        n = len(params)
        vocab = self._vocab_size
        wanted = any(processor.wants(p) for processor in self._processors for p in params)
        logprobs = tuple(
            None if req.logprobs is None else LogprobRequest(req.logprobs.top, req.logprobs.token_ids) for req in reqs
        )
        return SamplingInfo(
            version=next(self._versions),
            temperatures=np.fromiter((p.temperature for p in params), np.float32, n),
            top_ps=np.fromiter((p.top_p for p in params), np.float32, n),
            top_ks=np.fromiter((p.top_k if 0 < p.top_k < vocab else vocab for p in params), np.int64, n),
            min_ps=np.fromiter((p.min_p for p in params), np.float32, n),
            seeds=np.fromiter((req.seed for req in reqs), np.int64, n),
            steps=np.empty(0, np.int64),
            logprobs=logprobs if any(logprobs) else (),
            rows=_rows(reqs) if wanted else (),
        )


def _rows(reqs: Sequence[Req]) -> tuple[SamplingRow, ...]:
    return tuple(SamplingRow(req.sampling, req.prompt_ids, req.output_ids) for req in reqs)


def _same(left: list[Req], right: list[Req]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def greedy_only(temperatures: NDArray[np.float32], top_ks: NDArray[np.int64]) -> bool:
    """Whether no row of a batch needs a random number."""
    return bool(((temperatures == 0.0) | (top_ks == 1)).all())
