"""Batch building: from what was decided to what a worker needs. Flat arrays, no per-token Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.batch import ModelWorkerBatch, ScheduleBatch
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.pipeline.ahead import pack
from pegboard.core.pipeline.flags import SHIFTED, flags_any_of, flags_of
from pegboard.core.pipeline.points import Points
from pegboard.core.pipeline.positions import positions_of
from pegboard.core.pipeline.running import NEVER
from pegboard.core.pipeline.sampling_info import SamplingInfos, mark_pending
from pegboard.core.pipeline.step import Step, computed_again

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch import PrefillItem
    from pegboard.core.interfaces.logits_processor import LogitsProcessor
    from pegboard.core.interfaces.req import Req, ReqKV
    from pegboard.core.interfaces.sampler import Sampler
    from pegboard.core.pipeline.ahead import Ahead
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.core.pipeline.running import RunningBatch
    from pegboard.core.pipeline.shared import CommonPrefix

PADDING = 0
"""The slot whose KV is never read."""


class BatchBuilder:
    """Makes steps. What it hands out is never changed afterwards, since a worker may read it while the next step is
    built; the sampling arrays of a decode batch are shared by all steps of the same requests.

    `asked` are the logits processors, and the sampler where requests may bring parameters for it; those in `alone`
    cannot tell tokens ahead from output, so a request that one of them wants gets none. `shared` finds what a decode
    batch has in common, where attention makes use of that.
    """

    def __init__(
        self,
        memory: MemoryManager,
        asked: Sequence[LogitsProcessor | Sampler],
        vocab_size: int,
        alone: Sequence[LogitsProcessor | Sampler] = (),
        shared: CommonPrefix | None = None,
        points: Points | None = None,
    ) -> None:
        self.points = points or Points()
        self._alone = tuple(alone)
        self._shared = shared
        self.vocab_size = vocab_size
        self._memory = memory
        self._asked = tuple(asked)
        self.numbers = itertools.count(1)
        self._infos = SamplingInfos(vocab_size)

    def flags(self, req: Req) -> int:
        """Return the flags of a new request. Raises what the `wants` of a processor or the sampler raises."""
        return flags_of(req, self._asked, self._alone)

    def decode(self, running: RunningBatch, stamp: int) -> Step | None:
        """Make a batch of one token for each running request that may have one more token; None when there is none.

        Each has one to compute, and room for it. `stamp` is the number of the step under way (NEVER: none): the tokens
        that it samples are not known yet. The running batch then counts the new tokens as scheduled.
        """
        number = next(self.numbers)
        active = running.decoding(stamp)
        whole = active.shape[0] == len(running)
        reqs = list(running.reqs) if whole else [running.reqs[place] for place in active.tolist()]
        if not reqs:
            return None
        seq_lens, rows = _of(running.known_lens, active, whole), _of(running.rows, active, whole)
        positions = seq_lens - 1
        batch = ScheduleBatch(
            bid=number,
            forward_mode=ForwardMode.DECODE,
            reqs=reqs,
            seq_lens=seq_lens,
            extend_lens=np.ones(len(reqs), np.int64),
            prefix_lens=positions,
            decoding=len(reqs),
        )
        input_ids, future = _inputs(running, active, stamp)
        work = ModelWorkerBatch(
            bid=number,
            forward_mode=ForwardMode.DECODE,
            input_ids=input_ids,
            positions=positions + _of(running.deltas, active, whole) if running.any(SHIFTED) else positions,
            rows=rows,
            seq_lens=seq_lens,
            extend_lens=batch.extend_lens,
            prefix_lens=positions,
            out_cache_loc=self._memory.rows.host[rows, positions].astype(np.int64),
            logits_indices=None,
            sampling=self._infos.decoding(running, active, whole, stamp),
            sampled_rows=rows,
            future_indices=future,
            table=self._memory.rows.take_changes(),
            common_prefix=0 if self._shared is None else self._shared.of(running),
        )
        _schedule(running, active, whole, number)
        step = Step(number, batch, work, [req.kv for req in reqs], reqs, running.flags_any)
        step.version = running.version if whole else NEVER
        step.left, step.flags = _of(running.left, active, whole), _of(running.flags, active, whole)
        step.columns = [_of(values, active, whole) for values in running.columns]
        return step

    def extend(
        self,
        items: Sequence[PrefillItem],
        running: RunningBatch,
        *,
        mixed: bool,
        stamp: int,
        split: bool = False,
        ahead: Ahead | None = None,
    ) -> Step:
        """Make a prefill, with decodes of the running batch mixed in at its end, and tokens `ahead` of these, if any.
        Requests whose prompt is through join the running batch; with `split`, only by `CoreServices.join`. The items of
        running requests are all the tokens that they have to compute. Without `items` it is a decode with tokens ahead.
        """
        number = next(self.numbers)
        active = running.decoding(stamp) if mixed else np.empty(0, np.int64)
        decoding = [running.reqs[place] for place in active.tolist()]
        reqs = [item.req for item in items] + decoding
        ends = running.known_lens[active]
        prefix = np.fromiter((item.prefix_len for item in items), np.int64, len(items))
        extend = np.fromiter((item.extend_len for item in items), np.int64, len(items))
        recomputed = computed_again(items, len(reqs), self.points.lookback)
        if recomputed is not None:
            prefix -= recomputed[: len(items)]
            extend += recomputed[: len(items)]
        prefix_lens = np.concatenate([prefix, ends - 1])
        new = np.ones(len(decoding), np.int64) if ahead is None else ahead.trees.counts
        extend_lens = np.concatenate([extend, new])
        through = [item.req for item in items if not item.partial and item.req.samples]
        batch = ScheduleBatch(
            bid=number,
            forward_mode=_mode(items, decoding, split),
            reqs=reqs,
            seq_lens=prefix_lens + extend_lens,
            extend_lens=extend_lens,
            prefix_lens=prefix_lens,
            decoding=len(decoding),
            partial=frozenset(item.req.rid for item in items if item.partial or not item.req.samples),
        )
        if ahead is not None:
            ahead = ahead.after([req.tokens.last for req in through])
        work = _keep_out(self._work(batch, through + decoding, ahead), recomputed)
        loads = self._load(work, [item.req.kv for item in items if item.fresh])
        if decoding and ahead is None:
            at = work.input_ids.shape[0] - len(decoding)
            ids, future = _inputs(running, active, stamp)
            work.input_ids[at:] = ids
            work.future_indices = None if future is None else future + at
            if work.sampling is not None:
                work.sampling.steps[len(through) :] = ends - running.input_lens[active]
                if work.sampling.rows and future is not None:
                    mark_pending(work.sampling, future + len(through))
        _schedule(running, active, False, number)
        if not split:
            running.join(through, number)
        kvs, sampled, flags = [req.kv for req in reqs], through + decoding, flags_any_of(reqs)
        return Step(number, batch, work, kvs, sampled, flags, recomputed=recomputed, ahead=ahead, loads=loads)

    def prebuilt(self, req: Req, running: RunningBatch) -> Step:
        """Make a step of which nothing is to run: a request has its KV, and one token after it, from elsewhere. It
        joins the running batch.
        """
        number, none = next(self.numbers), np.empty(0, np.int64)
        length = np.array([req.kv.committed_len], np.int64)
        mode = ForwardMode.PREBUILT
        batch = ScheduleBatch(number, mode, [req], length, np.zeros(1, np.int64), length)
        work = ModelWorkerBatch(number, mode, none, none, none, none, none, none, none, none, None, none)
        running.join([req], number)
        return Step(number, batch, work, [req.kv], [req], req.flags)

    def half(self, step: Step, start: int, stop: int) -> Step | None:
        """Return requests [start, stop) of a failed step as a step of their own; None where none of them is left.

        Those that have ended since, or went back to the queue, are left out. Whatever was under way before it must be
        settled. Its KV goes to the same places; what comes from the host is loaded once more.
        """
        whole = step.batch
        keep = [
            index
            for index in range(start, stop)
            if not whole.reqs[index].finished and whole.reqs[index].kv is step.kvs[index]
        ]
        if not keep:
            return None
        reqs, kvs = [whole.reqs[index] for index in keep], [step.kvs[index] for index in keep]
        decoding = sum(index >= len(whole.reqs) - whole.decoding for index in keep)
        mode = whole.forward_mode if decoding or whole.forward_mode.is_decode else ForwardMode.EXTEND
        batch = ScheduleBatch(
            bid=whole.bid,
            forward_mode=mode,
            reqs=reqs,
            seq_lens=whole.seq_lens[keep],
            extend_lens=whole.extend_lens[keep],
            prefix_lens=whole.prefix_lens[keep],
            decoding=decoding,
            partial=whole.partial,
            planned_at=whole.planned_at,
        )
        sampled = [req for req in reqs if req.rid not in whole.partial]
        ahead = step.ahead and step.ahead.select(_sampled_places(whole)[keep][_is_sampled(batch)])
        recomputed = None if step.recomputed is None else step.recomputed[keep]
        work = _keep_out(self._work(batch, sampled, ahead), recomputed)
        loads, flags = self._load(work, kvs), flags_any_of(reqs)
        half = Step(step.number, batch, work, kvs, sampled, flags, recomputed=recomputed, ahead=ahead, loads=loads)
        half.touched = half.closed = True
        return half

    def _load(self, work: ModelWorkerBatch, kvs: Iterable[ReqKV]) -> bool:
        """Have what the prefix cache has promised loaded for a batch; whether there is anything."""
        if loads := tuple(kv.load for kv in kvs if kv.load is not None):
            work.payloads[self._memory.cache.loader] = loads
        return bool(loads)

    def _work(self, batch: ScheduleBatch, sampled: list[Req], ahead: Ahead | None) -> ModelWorkerBatch:
        """Return the worker's share of a batch whose slots are allocated. Tokens that the host does not know are -1."""
        reqs = batch.reqs
        rows = np.fromiter((req.kv.row for req in reqs), np.int64, len(reqs))
        host = self._memory.rows.host
        spans = list(zip(reqs, batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=True))
        out_cache_loc = np.concatenate([host[req.kv.row, start:stop] for req, start, stop in spans]).astype(np.int64)
        if batch.forward_mode.is_decode:
            logits_indices, sampled_rows = None, rows
        else:
            keep = _is_sampled(batch)
            logits_indices, sampled_rows = (np.cumsum(batch.extend_lens) - 1)[keep], rows[keep]
        work = ModelWorkerBatch(
            bid=batch.bid,
            forward_mode=batch.forward_mode,
            input_ids=np.concatenate([_known(req, start, stop) for req, start, stop in spans]),
            positions=positions_of(spans),
            rows=rows,
            seq_lens=batch.seq_lens,
            extend_lens=batch.extend_lens,
            prefix_lens=batch.prefix_lens,
            out_cache_loc=out_cache_loc,
            logits_indices=logits_indices,
            sampling=self._infos.of(sampled) if sampled else None,
            sampled_rows=sampled_rows,
            table=self._memory.rows.take_changes(),
        )
        if ahead is not None:
            batch.trees = ahead.trees
            pack(work, ahead, sampled, np.flatnonzero(_is_sampled(batch)), self.vocab_size)
        return work


def _keep_out(work: ModelWorkerBatch, recomputed: NDArray[np.int64] | None) -> ModelWorkerBatch:
    """Have the KV of tokens that are `recomputed` written to the padding slot: their own are in the cache."""
    if recomputed is not None:
        work.out_cache_loc[(np.cumsum(work.extend_lens) - work.extend_lens)[recomputed > 0]] = PADDING
    return work


def _mode(items: Sequence[PrefillItem], decoding: Sequence[Req], split: bool) -> ForwardMode:
    if decoding:
        return ForwardMode.MIXED if items else ForwardMode.TARGET_VERIFY
    return ForwardMode.SPLIT_PREFILL if split else ForwardMode.EXTEND


def _is_sampled(batch: ScheduleBatch) -> NDArray[np.bool_]:
    """Return for each request of a batch whether a token is sampled for it."""
    return np.fromiter((req.rid not in batch.partial for req in batch.reqs), np.bool_, len(batch.reqs))


def _sampled_places(batch: ScheduleBatch) -> NDArray[np.int64]:
    """Return for each request of a batch its place among those that a token is sampled for."""
    return np.cumsum(_is_sampled(batch)) - 1


def _of(values: NDArray[Any], active: NDArray[np.int64], whole: bool) -> NDArray[Any]:
    """Return a copy of the active requests' values; `whole` says that this is all of them."""
    return values.copy() if whole else values[active]


def _inputs(
    running: RunningBatch, active: NDArray[np.int64], stamp: int
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the newest token of each; -1, and its index in the second array, where the step `stamp` is sampling
    it.
    """
    ids = running.last[active]
    if stamp == NEVER:
        return ids, None
    future = np.flatnonzero(running.stamps[active] == stamp)
    if not future.shape[0]:
        return ids, None
    ids[future] = -1
    return ids, future


def _schedule(running: RunningBatch, active: NDArray[np.int64], whole: bool, number: int) -> None:
    """Count one more token of each as scheduled."""
    where = slice(None) if whole else active
    running.known_lens[where] += 1
    running.left[where] -= 1
    running.stamps[where] = number


def _known(req: Req, start: int, stop: int) -> NDArray[np.int64]:
    """Return tokens [start, stop) of a request, -1 for the one that it does not know yet."""
    known = req.tokens.view(start, stop)
    return known if known.shape[0] == stop - start else np.full(stop - start, -1, np.int64)
