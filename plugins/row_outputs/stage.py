"""In the scheduler: rows are asked for with each step, and their results kept until they are sent."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.req import WHOLE_PREFIX, KeyedTokens
from pegboard.core.interfaces.stage import Interest, Sent, Stage
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.plugins.row_outputs.messages import NAME, Asked, Entry, Said, pooler_of
from pegboard.plugins.row_outputs.seeking import NO_ROW, WANTED, Owners, Pooling, Wanted, seek

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch import BatchExtras
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import StageContext, StepResult, StepView
    from pegboard.plugins.row_outputs.api import PoolSpan

    Found = Mapping[str, NDArray[Any]]

logger = logging.getLogger(__name__)


class RowOutputs(Stage):
    name = NAME

    def __init__(self, ctx: StageContext) -> None:
        self.pooler = pooler_of(ctx)
        self._end = ctx.end
        offers = [name for name in ("input_logprobs",) if name in ctx.runner]
        if "hidden_states" in ctx.runner:
            offers += ["hidden_states", "embeddings"] if ctx.config.model.hidden_states else ["embeddings"]
        self.offers = tuple(offers)

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        feature = message.features.get(self.name)
        if feature is None:
            return None
        asked = msgspec.msgpack.decode(feature, type=Asked)
        wanted = WANTED.of(req)
        if asked.embed:
            if self.pooler is None:
                raise InvalidRequest("this engine makes no embeddings", code="no_embeddings")
            if isinstance(req.tokens, KeyedTokens):
                raise InvalidRequest("this engine takes no media here", code="unsupported")
            wanted.pooling, req.samples = Pooling(self.pooler.first(req.input_len)), False
        wanted.start = asked.logprob_start
        wanted.hidden = [] if asked.hidden_states else None
        return Interest(single=asked.hidden_states)

    def reusable(self, req: Req) -> int:
        wanted = WANTED.of(req)
        missing = wanted.next_prompt
        if missing is not None and missing < req.input_len:
            return missing - 1
        return WHOLE_PREFIX if wanted.pooling is None else wanted.pooling.first

    def pack(self, step: StepView, extras: BatchExtras) -> object | None:
        found = seek(step, self.flag, self.pooler)
        if found is None:
            return None
        rows, step.notes[self.name] = found
        return rows

    def arrived(self, step: StepView, result: StepResult) -> None:
        """Keep what was computed. Requests that ended while the step was under way, or that went back to the queue, get
        nothing.
        """
        owners = step.notes.get(self.name)
        if not isinstance(owners, Owners):
            return
        found = result.parts.get(self.name, {})
        if "logprobs" in found:
            _keep_prompts(owners, found)
        for index, (req, kv) in enumerate(owners.hidden):
            kept = WANTED.of(req).hidden
            if req.kv is kv and not req.finished and kept is not None and "hidden" in found:
                kept.append(found["hidden"][index].astype("<f4").tobytes())
        for req, kv, span, number in owners.pools:
            pooling = WANTED.of(req).pooling
            if req.kv is kv and not req.finished and pooling is not None:
                self._pool(req, pooling, span, found["pooled"][number] if number != NO_ROW else None)

    def _pool(self, req: Req, pooling: Pooling, span: PoolSpan, partial: NDArray[np.float32] | None) -> None:
        if span.start <= pooling.first:
            # The prompt is computed once more, after a retraction: what is cached goes no further (`reusable`).
            pooling.partials = []
        if partial is not None:
            pooling.partials.append((span.start, partial.copy()))
        if span.start + span.count < span.length or self.pooler is None:
            return
        try:
            vector = self.pooler.combine([one for _, one in pooling.partials], span.length)
            pooling.vector = vector.astype("<f4").tobytes()
        except Exception as error:
            logger.exception("%s.combine raised", type(self.pooler).__name__)
            text = f"pooling failed: {type(error).__name__}: {error}"
            self._end(req, FinishReason(FinishType.ABORT, message=text, status=500, code="pooling_failed"))

    def send(self, req: Req, start: int, stop: int) -> Sent | None:
        wanted = WANTED.of(req)
        prompt = _prompt_entries(req, wanted.start, wanted) if wanted.start is not None and not start else None
        vector = b"" if wanted.pooling is None else wanted.pooling.vector
        whole = Said(prompt, vector) if prompt is not None or vector else None
        return Sent(whole, () if wanted.hidden is None else wanted.hidden[start:stop])

    def adopt(self, req: Req, row: msgspec.Raw | None) -> None:
        wanted = WANTED.of(req)
        wanted.start = None  # those of the prompt are where it was computed
        if wanted.hidden is not None:
            wanted.hidden.append(b"" if row is None else msgspec.msgpack.decode(row, type=bytes))


def _keep_prompts(owners: Owners, found: Found) -> None:
    """Give requests the logprobs of their prompts that come next."""
    values = found["logprobs"].tolist()
    row = chosen = 0
    for req, kv, position, count in owners.prompts:
        wanted, kept = WANTED.of(req), req.logprobs
        top, ids = (0, ()) if kept is None else (kept.top, kept.token_ids)
        if req.kv is kv and not req.finished and wanted.next_prompt == position:
            for at in range(count):
                tops = _tops(found, row + at, top)
                if ids:
                    here = chosen + at * len(ids)
                    tops += zip(found["chosen"][here : here + len(ids)].tolist(), ids, strict=True)
                wanted.prompt.append((values[row + at], tops))
        row, chosen = row + count, chosen + count * len(ids)


def _tops(found: Found, row: int, top: int) -> list[tuple[float, int]]:
    """Return the `top` largest logprobs of one row, each with its token."""
    if not top or "top_values" not in found:
        return []
    return list(zip(found["top_values"][row, :top].tolist(), found["top_ids"][row, :top].tolist(), strict=True))


def _prompt_entries(req: Req, start: int, wanted: Wanted) -> list[Entry]:
    """Return logprobs of the prompt, as far as they are known."""
    tokens = req.tokens.view(start, req.input_len).tolist()
    unknown: list[Entry] = [(None, tokens[0], [])] if start == 0 else []
    known = zip(wanted.prompt, tokens[len(unknown) :], strict=False)
    return unknown + [(value, token, tops) for (value, tops), token in known]
