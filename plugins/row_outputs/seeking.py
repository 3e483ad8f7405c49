"""Which rows of a step are wanted, and whose they are."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.req import ReqSlot
from pegboard.core.interfaces.sampling import LogprobRequest
from pegboard.plugins.row_outputs.api import PoolSpan
from pegboard.plugins.row_outputs.messages import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req, ReqKV
    from pegboard.core.interfaces.stage import StepView
    from pegboard.plugins.row_outputs.api import Pooler

logger = logging.getLogger(__name__)

NO_ROW = -1


@dataclass(slots=True)
class Pooling:
    """An embedding in the making: `partials` are (position, vector float32 [hidden]) of the steps so far, from the
    position `first` on that the pooler needs.
    """

    first: int
    partials: list[tuple[int, NDArray[np.float32]]] = field(default_factory=list)
    vector: bytes = b""


@dataclass(slots=True)
class Wanted:
    """What a request wants, and has already.

    `start` is the first prompt position whose own logprob is wanted, None for none; `prompt` has those that are known,
    from `start` on (from 1 on: nothing precedes a prompt's first token), as (logprob, top list). `hidden` has float32
    little-endian [hidden] for each token that was sampled; None where hidden states are not wanted.
    """

    start: int | None = None
    prompt: list[tuple[float, list[tuple[float, int]]]] = field(default_factory=list)
    hidden: list[bytes] | None = None
    pooling: Pooling | None = None

    @property
    def next_prompt(self) -> int | None:
        """The first prompt position whose logprob is wanted and not known; None where none is wanted."""
        return None if self.start is None else max(self.start, 1) + len(self.prompt)


WANTED: ReqSlot[Wanted] = ReqSlot(Wanted)


@dataclass(slots=True)
class Owners:
    """Whose results the rows of a step are. `kv` is a request's as it was at launch (see StepView).

    `prompts`: (request, kv, prompt position of the first logprob, count). `pools`: (request, kv, span, number of its
    partial result, or NO_ROW where the pooler reads nothing of this span). `hidden`: (request, kv) per row.
    """

    prompts: list[tuple[Req, ReqKV, int, int]] = field(default_factory=list)
    pools: list[tuple[Req, ReqKV, PoolSpan, int]] = field(default_factory=list)
    hidden: list[tuple[Req, ReqKV]] = field(default_factory=list)


def seek(step: StepView, flag: int, pooler: Pooler | None) -> tuple[Rows, Owners] | None:
    """Return what the requests of a step with this flag want of it; None where none wants anything."""
    seeker, batch = _Seeker(pooler), step.batch
    if not batch.forward_mode.is_decode:
        prefilled = len(batch.reqs) - batch.decoding
        # What is computed again has been asked for before.
        recomputed = np.zeros_like(batch.extend_lens) if step.recomputed is None else step.recomputed
        starts = np.cumsum(batch.extend_lens) - batch.extend_lens + recomputed
        for req, at, prefix, extend in zip(
            batch.reqs[:prefilled],
            starts.tolist(),
            (batch.prefix_lens + recomputed).tolist(),
            (batch.extend_lens - recomputed).tolist(),
            strict=False,
        ):
            if req.flags & flag:
                seeker.prompt(req, at, prefix, extend)
                seeker.pool(req, at, prefix, extend)
    rows = _last_rows(step)
    for place, req in enumerate(step.sampled):
        if req.flags & flag and WANTED.of(req).hidden is not None:
            seeker.owners.hidden.append((req, req.kv))
            seeker.hidden_rows.append(place if rows is None else int(rows[place]))
    return seeker.found()


def _last_rows(step: StepView) -> NDArray[np.int64] | None:
    """Return the packed token of each sampled request that is known and not drafted; None where it is its place."""
    work = step.work
    if work.trees is None or work.logits_indices is None:
        return work.logits_indices
    counts = work.trees.counts
    rows: NDArray[np.int64] = work.logits_indices[np.cumsum(counts) - counts]
    return rows


class _Seeker:
    """Collects the rows of one batch."""

    def __init__(self, pooler: Pooler | None) -> None:
        self.owners = Owners()
        self.hidden_rows: list[int] = []
        self._pooler = pooler
        self._rows: list[NDArray[np.int64]] = []
        self._targets: list[NDArray[np.int64]] = []
        self._requests: list[tuple[int, LogprobRequest]] = []
        self._pool_rows: list[NDArray[np.int64]] = []
        self._spans: list[PoolSpan] = []

    def prompt(self, req: Req, at: int, prefix: int, extend: int) -> None:
        """Logprobs of prompt tokens that stand after tokens [prefix, prefix + extend)."""
        kept, missing = req.logprobs, WANTED.of(req).next_prompt
        if kept is None or missing is None:
            return
        # A chunk after one that is still under way goes on where that one ends.
        start, stop = max(prefix, missing - 1), min(prefix + extend, req.input_len - 1)
        if start >= stop:
            return
        self._rows.append(np.arange(at + start - prefix, at + stop - prefix))
        self._targets.append(req.tokens.view(start + 1, stop + 1).copy())
        self._requests.append((stop - start, LogprobRequest(kept.top, kept.token_ids)))
        self.owners.prompts.append((req, req.kv, start + 1, stop - start))

    def pool(self, req: Req, at: int, prefix: int, extend: int) -> None:
        """Keep the part of a prompt that is pooled in this step, if any."""
        if WANTED.of(req).pooling is None or self._pooler is None:
            return
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
        self.owners.pools.append((req, req.kv, span, number))

    def found(self) -> tuple[Rows, Owners] | None:
        if not (self._rows or self.owners.pools or self.owners.hidden):
            return None
        rows = Rows(
            logprob_rows=_joined(self._rows),
            logprob_targets=_joined(self._targets),
            logprob_requests=tuple(self._requests),
            pool_rows=_joined(self._pool_rows),
            pool_spans=tuple(self._spans),
            hidden_rows=np.array(self.hidden_rows, np.int64),
        )
        return rows, self.owners


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
