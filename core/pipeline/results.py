"""Results: append sampled tokens, check what ends, say what is new."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.messages import TokenOutput
from pegboard.core.interfaces.sampler import NO_TOKEN
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.finish import LENGTH, Constraints, Finishers, first_reason
from pegboard.core.pipeline.flags import CONSTRAINED, SPECIAL, STREAM
from pegboard.core.pipeline.logprobs import entries, keep_logprobs
from pegboard.core.pipeline.points import Points
from pegboard.core.pipeline.running import NEVER
from pegboard.toolkit.text.detokenize import TokenDecoder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.req import Req, ReqKV
    from pegboard.core.pipeline.running import RunningBatch
    from pegboard.core.pipeline.step import Step

NOBODYS = -1
"""In `ScheduleBatch.tokens`: sampled for a request that had ended meanwhile, or that wanted none."""


class ResultProcessor:
    """Commits a step's tokens to its requests. Releases no memory and changes no status: the scheduler does."""

    def __init__(
        self, tokenizer: TokenDecoder | None, eos_ids: Iterable[int] = (), points: Points | None = None
    ) -> None:
        self.points = points or Points()
        self.constraints = Constraints(self.points)
        self.finishers = Finishers(tokenizer, self.points)
        self._eos_ids = frozenset(eos_ids)

    def commit(
        self, step: Step, result: BatchResult, running: RunningBatch, now: float
    ) -> tuple[list[Req], list[TokenOutput]]:
        """Update every request of the step; those that finished, in the batch's order, and what to send.

        Requests that ended while the step was under way are left alone: their tokens are dropped. So are those that no
        token could be drawn for: the scheduler ends them.
        """
        batch = step.batch
        batch.tokens, batch.committed_at = result.tokens, now
        accepted = result.accepted
        newest = result.tokens if accepted is None else result.tokens[np.cumsum(accepted.counts) - 1]
        batch.intervals = running.note(step.sampled, newest, now, step.version)
        if step.version != NEVER and not step.touched and not result.unsampled:
            return self._commit_decode(step, result, running, now)
        return self._commit_any(step, result, running, now)

    def _commit_decode(
        self, step: Step, result: BatchResult, running: RunningBatch, now: float
    ) -> tuple[list[Req], list[TokenOutput]]:
        """Commit one token for each of many. Only those that may end, or that want more than their token, are looked
        at.
        """
        outputs: list[TokenOutput] = []
        tokens, eos_ids = result.tokens, self._eos_ids
        looked_at: list[int] = []
        rows = zip(
            step.sampled,
            step.kvs,
            tokens.tolist(),
            step.batch.seq_lens.tolist(),
            step.left.tolist(),
            step.flags.tolist(),
            strict=True,
        )
        for row, (req, kv, token, seq_len, left, flags) in enumerate(rows):
            kv.committed_len = seq_len
            req.tokens.append(token)
            if left <= 0 or flags & SPECIAL or token in eos_ids:
                looked_at.append(row)
            elif flags & STREAM:
                req.output.sent_len += 1
                outputs.append(TokenOutput(rid=req.rid, token_ids=[token]))
        finished: list[Req] = []
        for row in looked_at:
            req, token = step.sampled[row], int(tokens[row])
            if req.logprobs is not None and result.logprobs is not None:
                keep_logprobs(req, row, result.logprobs)
            self._finish(req, token, now, finished)
            if (output := self.output(req)) is not None:
                outputs.append(output)
        gained = [req for row in looked_at if _has_gained(req := step.sampled[row])]
        if gained:
            running.refresh(gained)
        return finished, outputs

    def _commit_any(
        self, step: Step, result: BatchResult, running: RunningBatch, now: float
    ) -> tuple[list[Req], list[TokenOutput]]:
        """Commit what each request has gained: one token, or those ahead that stand, too, and what its finishers add.
        What comes after an end is dropped.
        """
        batch, accepted = step.batch, result.accepted
        finished: list[Req] = []
        outputs: list[TokenOutput] = []
        counts = itertools.repeat(1) if accepted is None else iter(accepted.counts.tolist())
        batch.tokens = taken = result.tokens.copy()
        tokens, kept = result.tokens.tolist(), np.zeros(len(step.sampled), np.int64)
        batch.gained = None if accepted is None else kept
        index = start = 0
        for req, kv, prefix, seq_len in zip(
            batch.reqs, step.kvs, batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=True
        ):
            # A request that ended or was retracted meanwhile has another `kv`: this one is no longer its own.
            kv.committed_len = seq_len
            if req.rid in batch.partial:
                self._end_with_prompt(req, kv, now, finished, outputs)
                continue
            stop, ended = start + next(counts), req.finished
            took = 0 if ended else self._take(req, result, tokens, range(start, stop), now, finished)
            if took < stop - start:
                taken[start + took : stop] = NOBODYS
            if step.ahead_of(index):
                # What was computed beyond the tokens that it took is of no use.
                kv.committed_len = prefix + max(1, took)
            kept[index] = took
            index, start = index + 1, stop
            if not ended and (output := self.output(req)) is not None:
                outputs.append(output)
        gained = step.sampled if accepted is not None else [req for req in step.sampled if _has_gained(req)]
        if gained:
            running.refresh(gained)
        return finished, outputs

    def _take(
        self, req: Req, result: BatchResult, tokens: list[int], places: range, now: float, finished: list[Req]
    ) -> int:
        """Give a request the `tokens` of a result at `places`, as far as it goes on; how many it took."""
        nodes = None if result.accepted is None else result.accepted.nodes
        if tokens[places.stop - 1] == NO_TOKEN:
            places = places[:-1]
        if not req.remaining_tokens and places:
            self._finish(req, tokens[places.start], now, finished)
            return 0
        took = 0
        for place in places:
            token = tokens[place]
            req.tokens.append(token)
            if req.output_len == 1:
                req.timing.first_token = now
            if req.logprobs is not None and result.logprobs is not None:
                keep_logprobs(req, place if nodes is None else int(nodes[place]), result.logprobs)
            self._finish(req, token, now, finished, more=place + 1 < places.stop)
            took += 1
            if req.finished or self.constraints.wait_for(req):
                break
        return took

    def output(self, req: Req) -> TokenOutput | None:
        """Return what has not been sent of a request; None when there is nothing to say yet."""
        out = req.output
        if not req.finished and (not req.stream or out.sent_len == req.output_len):
            return None
        ids = req.tokens.view(req.input_len + out.sent_len).tolist()
        logprobs = None if req.logprobs is None else entries(req, ids)
        features, rows = self.points.send(req, out.sent_len, out.sent_len + len(ids))
        out.sent_len += len(ids)
        return TokenOutput(
            rid=req.rid,
            token_ids=ids,
            finish_reason=None if out.finish_reason is None else out.finish_reason.to_dict(),
            prompt_tokens=req.input_len,
            completion_tokens=req.output_len,
            cached_tokens=out.cached_tokens,
            cached_from=dict(out.cached_from) or None,
            num_retractions=out.num_retractions,
            logprobs=logprobs,
            features=features,
            rows=rows,
        )

    def _end_with_prompt(
        self, req: Req, kv: ReqKV, now: float, finished: list[Req], outputs: list[TokenOutput]
    ) -> None:
        """End a request that samples nothing, if all of its prompt is computed now."""
        if req.samples or req.finished or req.kv is not kv or kv.committed_len < req.input_len:
            return
        req.output.finish_reason = FinishReason(FinishType.LENGTH)
        req.timing.finished = now
        finished.append(req)
        if (output := self.output(req)) is not None:
            outputs.append(output)

    def _finish(self, req: Req, token: int, now: float, finished: list[Req], *, more: bool = False) -> None:
        # Without output, because none may be, the token is not the request's.
        finishers = self.finishers.of(req) if req.output_len else (LENGTH,)
        reason = first_reason(finishers, req, token)
        if reason is None and req.flags & CONSTRAINED:
            reason = self.constraints.advance(req, token, finishers, more=more)
        req.output.finish_reason = reason
        if req.finished:
            req.timing.finished = now
            finished.append(req)


def _has_gained(req: Req) -> bool:
    """Return whether a request whose step is committed has more tokens to compute than the newest one."""
    return req.seq_len > req.kv.committed_len + 1
