"""SamplingInfos: what a worker needs to sample a token for each request of a batch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.batch import SamplingInfo, TokenMask
from pegboard.core.interfaces.constraint import constraint_of
from pegboard.core.interfaces.req import ReqSlot
from pegboard.core.interfaces.sampling import LogprobRequest, SamplingRow
from pegboard.core.pipeline.flags import CONSTRAINED, LOGPROBS, PROCESSED
from pegboard.core.pipeline.running import NEVER, NUMBERS
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.running import RunningBatch

logger = logging.getLogger(__name__)

_MEMOS: ReqSlot[dict[object, Any]] = ReqSlot(dict)
"""What logits processors and samplers keep of a request."""


class SamplingInfos:
    """Makes them; the arrays of a decode batch are shared by all steps of the same requests."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._versions = itertools.count(1)
        self._info: SamplingInfo | None = None
        self._info_of = NEVER

    def decoding(self, running: RunningBatch, active: NDArray[np.int64], whole: bool, stamp: int) -> SamplingInfo:
        """Return those of the running requests at the places `active`; `whole` says that this is all of them. The
        newest tokens of some are known only to the step `stamp`.
        """
        steps = running.known_lens[active] - running.input_lens[active]
        info = self._info if whole and self._info_of == running.version else None
        if info is None:
            logprobs: tuple[LogprobRequest | None, ...] = ()
            if running.any(LOGPROBS):
                logprobs = tuple(_logprobs(running.reqs[place]) for place in active.tolist())
            info = SamplingInfo(
                version=next(self._versions),
                numbers=running.numbers.take(active),  # an index would copy records field by field
                steps=steps,
                logprobs=logprobs if any(logprobs) else (),
            )
            if whole:
                self._info, self._info_of = info, running.version
        else:
            info = SamplingInfo(info.version, info.numbers, steps, info.logprobs)
        if running.any(PROCESSED):
            late = running.stamps == stamp
            info.rows = tuple(row_of(running.reqs[place], int(late[place])) for place in active.tolist())
        info.mask = self._mask([running.reqs[place] for place in active.tolist()]) if running.any(CONSTRAINED) else None
        return info

    def of(self, reqs: Sequence[Req]) -> SamplingInfo:
        """Return those of any requests, all of whose tokens are known."""
        logprobs = tuple(_logprobs(req) for req in reqs)
        return SamplingInfo(
            version=next(self._versions),
            numbers=np.array([req.sampling.row(req.seed, self._vocab_size) for req in reqs], NUMBERS),
            steps=np.fromiter((req.output_len for req in reqs), np.int64, len(reqs)),
            logprobs=logprobs if any(logprobs) else (),
            rows=tuple(row_of(req, 0) for req in reqs) if any(req.flags & PROCESSED for req in reqs) else (),
            mask=self._mask(reqs) if any(req.flags & CONSTRAINED for req in reqs) else None,
        )

    def _mask(self, reqs: Iterable[Req]) -> TokenMask | None:
        """Return what the constraints of `reqs` allow next; None where any token may come for each of them."""
        masks = {at: mask for at, req in enumerate(reqs) if (mask := mask_of(req, self._vocab_size)) is not None}
        if not masks:
            return None
        return TokenMask(np.fromiter(masks, np.int64, len(masks)), np.stack(list(masks.values())))


def mask_of(req: Req, vocab_size: int) -> NDArray[np.int32] | None:
    """Return what the constraint of a request allows next, int32 [words]; None where any token may come. Nothing may
    where the constraint raises or answers with anything else, so that the request ends alone.
    """
    constraint = constraint_of(req)
    if constraint is None:
        return None
    words = -(-vocab_size // 32)
    try:
        mask = constraint.mask()
        if mask is None or (mask.shape == (words,) and mask.dtype == np.int32):
            return mask
        logger.error("the mask of the constraint of %s is %s %s", quoted(req.name), mask.dtype, mask.shape)
    except Exception:
        logger.exception("the constraint of %s does not say what may come next", quoted(req.name))
    return np.zeros(words, np.int32)


def mark_pending(info: SamplingInfo, places: NDArray[np.int64]) -> None:
    """Note that the newest tokens of the rows at `places` are not known yet."""
    rows = list(info.rows)
    for place in places.tolist():
        rows[place] = replace(rows[place], pending=1)
    info.rows = tuple(rows)


def row_of(req: Req, pending: int = 0) -> SamplingRow:
    """Return what processors may know of a request. It has views of the growing token buffers, so make it anew for each
    step: an append may have moved them.
    """
    return SamplingRow(req.sampling, req.prompt_ids, req.output_ids, pending, _MEMOS.of(req))


def _logprobs(req: Req) -> LogprobRequest | None:
    return None if req.logprobs is None else LogprobRequest(req.logprobs.top, req.logprobs.token_ids)
