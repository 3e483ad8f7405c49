"""Wanted: what a step computes beside tokens, for the requests that ask for it: logprobs of the prompt, hidden states,
and the vectors that become embeddings.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.batch import WantedRows
from pegboard.core.interfaces.pooler import PoolSpan
from pegboard.core.interfaces.sampling import LogprobRequest
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.registry.blame import in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.forward import LogprobOutput
    from pegboard.core.interfaces.pooler import Pooler
    from pegboard.core.interfaces.req import Req, ReqKV

logger = logging.getLogger(__name__)

NO_ROW = -1


@dataclass(slots=True)
class Wanted:
    """Whose results `WantedRows` are. `kv` is a request's as it was at launch (see Step).

    `prompts`: (request, kv, prompt position of the first logprob, count). `pools`: (request, kv, span, number of its
    partial result, or NO_ROW where the pooler reads nothing of this span). `hidden`: (request, kv) per row.
    """

    prompts: list[tuple[Req, ReqKV, int, int]] = field(default_factory=list)
    pools: list[tuple[Req, ReqKV, PoolSpan, int]] = field(default_factory=list)
    hidden: list[tuple[Req, ReqKV]] = field(default_factory=list)


def find(
    batch: ScheduleBatch,
    sampled: Sequence[Req],
    sample_rows: NDArray[np.int64] | None,
    pooler: Pooler | None,
    again: NDArray[np.int64] | None = None,
) -> tuple[WantedRows, Wanted] | None:
    """Return what the requests of a batch ask for; None where none asks for anything. `sample_rows` are the packed
    tokens after which the tokens of `sampled` are drawn, None for one each; `again` as in Step.
    """
    seeker = _Seeker(pooler)
    prefilled = len(batch.reqs) - batch.decoding
    # What is computed again has been asked for before.
    again = np.zeros_like(batch.extend_lens) if again is None else again
    starts = np.cumsum(batch.extend_lens) - batch.extend_lens + again
    for req, at, prefix, extend in zip(
        batch.reqs[:prefilled],
        starts.tolist(),
        (batch.prefix_lens + again).tolist(),
        (batch.extend_lens - again).tolist(),
        strict=False,
    ):
        if req.logprobs is not None:
            seeker.prompt(req, at, prefix, extend)
        if req.pooling is not None:
            seeker.pool(req, at, prefix, extend)
    rows = range(len(sampled)) if sample_rows is None else sample_rows.tolist()
    for req, row in zip(sampled, rows, strict=True):
        if req.output.hidden is not None:
            seeker.wanted.hidden.append((req, req.kv))
            seeker.hidden_rows.append(row)
    return seeker.found()


class _Seeker:
    """Collects the rows of one batch."""

    def __init__(self, pooler: Pooler | None) -> None:
        self.wanted = Wanted()
        self.hidden_rows: list[int] = []
        self._pooler = pooler
        self._rows: list[NDArray[np.int64]] = []
        self._targets: list[NDArray[np.int64]] = []
        self._requests: list[tuple[int, LogprobRequest]] = []
        self._pool_rows: list[NDArray[np.int64]] = []
        self._spans: list[PoolSpan] = []

    def prompt(self, req: Req, at: int, prefix: int, extend: int) -> None:
        """Logprobs of prompt tokens that stand after tokens [prefix, prefix + extend)."""
        kept = req.logprobs
        assert kept is not None
        missing = kept.next_prompt
        if missing is None:
            return
        # A chunk after one that is still under way goes on where that one ends.
        start, stop = max(prefix, missing - 1), min(prefix + extend, req.input_len - 1)
        if start >= stop:
            return
        self._rows.append(np.arange(at + start - prefix, at + stop - prefix))
        self._targets.append(req.tokens.view(start + 1, stop + 1).copy())
        self._requests.append((stop - start, LogprobRequest(kept.top, kept.token_ids)))
        self.wanted.prompts.append((req, req.kv, start + 1, stop - start))

    def pool(self, req: Req, at: int, prefix: int, extend: int) -> None:
        """Keep the part of a prompt that is pooled in this step, if any."""
        assert self._pooler is not None
        span = PoolSpan(prefix, extend, req.input_len)
        offsets: Sequence[int] = ()
        try:
            offsets = self._pooler.rows(span)
        except Exception:
            # `combine` will miss them, and say so to this request alone.
            logger.exception("%s.rows raised", type(self._pooler).__name__)
        number = NO_ROW
        if len(offsets):
            number = len(self._spans)
            self._spans.append(span)
            self._pool_rows.append(at + np.array(offsets, np.int64))
        self.wanted.pools.append((req, req.kv, span, number))

    def found(self) -> tuple[WantedRows, Wanted] | None:
        if not (self._rows or self.wanted.pools or self.wanted.hidden):
            return None
        rows = WantedRows(
            logprob_rows=_joined(self._rows),
            logprob_targets=_joined(self._targets),
            logprob_requests=tuple(self._requests),
            pool_rows=_joined(self._pool_rows),
            pool_spans=tuple(self._spans),
            hidden_rows=np.array(self.hidden_rows, np.int64),
        )
        return rows, self.wanted


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def keep(wanted: Wanted, result: BatchResult, pooler: Pooler | None) -> None:
    """Give each request what was computed for it.

    Requests that ended while the step was under way, or that went back to the queue, get nothing.
    """
    if wanted.prompts and result.prompt_logprobs is not None:
        _keep_prompts(wanted, result.prompt_logprobs)
    for index, (req, kv) in enumerate(wanted.hidden):
        if req.kv is kv and not req.finished and req.output.hidden is not None and result.hidden is not None:
            req.output.hidden.append(result.hidden[index].copy())
    for req, kv, span, number in wanted.pools:
        if req.kv is not kv or req.finished or req.pooling is None:
            continue
        pooling = req.pooling
        if span.start <= pooling.first:
            # The prompt is computed once more, after a retraction: what is cached goes no further (`matchable_key`).
            pooling.partials = []
        if number != NO_ROW and result.pooled is not None:
            pooling.partials.append((span.start, result.pooled[number].copy()))
        if span.start + span.count == span.length and pooler is not None:
            try:
                pooling.vector = pooler.combine([vector for _, vector in pooling.partials], span.length)
            except Exception as error:
                logger.exception("%s.combine raised", type(pooler).__name__)
                pooling.failure = f"pooling failed: {in_words(error)}"


def failure_of(req: Req) -> FinishReason | None:
    """Return why a request has failed whose prompt is computed; None where it has not."""
    if req.pooling is None or not req.pooling.failure:
        return None
    return FinishReason(FinishType.ABORT, message=req.pooling.failure, status=500, code="pooling_failed")


def _keep_prompts(wanted: Wanted, found: LogprobOutput) -> None:
    row = 0
    values = found.token_logprobs.tolist()
    for req, kv, position, count in wanted.prompts:
        kept = req.logprobs
        if kept is not None and req.kv is kv and not req.finished and kept.next_prompt == position:
            for at in range(row, row + count):
                kept.prompt.append((values[at], tops_of(found, at, kept.top, kept.token_ids)))
        row += count


def tops_of(found: LogprobOutput, row: int, top: int, token_ids: tuple[int, ...]) -> list[tuple[float, int]]:
    """Return the `top` largest logprobs of one row, and after them those of `token_ids`, each with its token."""
    tops: list[tuple[float, int]] = []
    if top and found.top_values is not None and found.top_ids is not None:
        tops = list(zip(found.top_values[row, :top].tolist(), found.top_ids[row, :top].tolist(), strict=True))
    if token_ids and row in found.chosen:
        tops += zip(found.chosen[row].tolist(), token_ids, strict=True)
    return tops
