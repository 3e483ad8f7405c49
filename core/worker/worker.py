"""Worker: runs ModelWorkerBatches. Everything that touches the device's tensors of a step is here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.ahead import Verified
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.forward import Taps
from pegboard.core.interfaces.stage import DevicePart
from pegboard.core.worker.computed import Computed
from pegboard.core.worker.device_batch import DeviceBatches
from pegboard.core.worker.device_parts import DeviceParts
from pegboard.core.worker.sampled import check_ids, check_tokens
from pegboard.toolkit.device_queue import OnHost
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from numpy.typing import NDArray

    from pegboard.core.interfaces.attention import AttentionBackend
    from pegboard.core.interfaces.batch import ModelWorkerBatch, SplitPart
    from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.model_runner import ModelRunner
    from pegboard.core.interfaces.trees import TokenTrees
    from pegboard.core.pipeline.guards import GuardedHooks
    from pegboard.core.worker.device_batch import Sent
    from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
    from pegboard.toolkit.device_queue import DeviceQueue, Fetched

_NO_TOKENS = np.empty(0, np.int64)


@dataclass(slots=True)
class _Split:
    """A prefill between two of its parts."""

    sent: Sent
    layers: Generator[None, None, ForwardOutput]
    output: ForwardOutput | None = None


class PendingResult:
    """A launched batch whose tokens, and what else was wanted, are on their way to the host."""

    def __init__(self, fetched: Fetched, arrived: Callable[[Sequence[torch.Tensor]], BatchResult]) -> None:
        self._fetched = fetched
        self._arrived = arrived

    def result(self) -> BatchResult:
        return self._arrived(self._fetched.wait())


class Worker:
    """Turns host arrays into a ForwardBatch, runs it, and brings the tokens back. One device, this process.

    It keeps the token it sampled last for every request row, on the device: a batch that is launched before the host
    has seen the tokens of the one before (`ModelWorkerBatch.future_indices`) takes them from there. And where the row
    table is mirrored, it keeps its own, as old as its batch.
    """

    def __init__(
        self,
        runner: ModelRunner,
        attention: AttentionBackend,
        pool: KVPool,
        rows: ReqToTokenPool,
        queue: DeviceQueue,
        *,
        before: GuardedHooks | None = None,
        after: GuardedHooks | None = None,
        parts: Sequence[DevicePart] = (),
    ) -> None:
        self._runner = runner
        self.parts = DeviceParts(parts)
        self._pool = pool
        self._queue = queue
        self._before = before
        self._after = after
        self._last = torch.zeros(rows.max_rows + 1, dtype=torch.int64, device=queue.device)
        self._last_host = self._last.numpy() if queue.looks else None
        table = rows.device_table(queue.device)
        self.batches = DeviceBatches(queue, table, self._last, pool, attention, self._vocab_size, self.parts.by_name)
        self._split: _Split | None = None

    def run(self, work: ModelWorkerBatch) -> BatchResult:
        """Run one step, to its end. Raises what the model raises; the KV of its tokens is then undefined."""
        return self.launch(work).result()

    def rerun(self, work: ModelWorkerBatch) -> BatchResult:
        """Run a part of a step that failed, without step hooks: `before_forward` has seen the whole."""
        return self.launch(work, hooks=False).result()

    @torch.inference_mode()
    def launch(self, work: ModelWorkerBatch, *, hooks: bool = True) -> PendingResult:
        """Start one step, in launch order. It may go on after this call, unless it has tokens ahead to verify."""
        if work.part is not None and not work.part.first:
            self.batches.send_table(work.table)
            return self._go_on(work, work.part, hooks)
        wants = self.parts.wants(work)
        sent = self.batches.send(work, Taps(wants.states) if wants.states else None)
        batch, sampling = sent.batch, sent.sampling
        if hooks and self._before:
            self._before(batch)
        wanted = {"return_logits": True} if wants.logits else {}
        if work.part is not None:
            self._split = _Split(sent, self._runner.execute_in_parts(batch, sampling, **wanted))
            return self.parts.within(work, batch, partial(self._go_on, work, work.part, hooks))
        run = partial(self._runner.execute, batch, sampling, **wanted)
        return self._finish(work, sent, self.parts.within(work, batch, run), hooks)

    def _go_on(self, work: ModelWorkerBatch, part: SplitPart, hooks: bool) -> PendingResult:
        """Run the next layers of the split prefill. Return its result when they are the last."""
        split, self._split = self._split, None
        if split is None:
            raise RuntimeError("a part of a split prefill arrives whose first parts are not there: they failed")
        done = 0
        while split.output is None and (part.last or done < part.layers):
            try:
                next(split.layers)
                done += 1
            except StopIteration as end:
                split.output = end.value
        if part.last:
            assert split.output is not None
            return self._finish(work, split.sent, split.output, hooks)
        self._split = split
        return PendingResult(OnHost(()), lambda found: BatchResult(_NO_TOKENS))

    def _finish(self, work: ModelWorkerBatch, sent: Sent, output: ForwardOutput, hooks: bool) -> PendingResult:
        batch = sent.batch
        if hooks and self._after:
            self._after(batch, output)
        # Behind the hooks: the next step must start from the same tokens as the host, whatever a hook has put there.
        if work.trees is not None:
            return self._verified(work, work.trees, batch, output)
        output.newest = output.next_token_ids
        if work.sampling is not None:
            output.newest = self._keep_last(work.sampled_rows, sent.sampled_rows, output)
        return self._bring(output, work, batch)

    def _by(self, output: ForwardOutput) -> object:
        """Return the sampler that drew the tokens."""
        return self._runner if output.sampled_by is None else output.sampled_by

    def _keep_last(
        self, rows: NDArray[np.int64], sent_rows: torch.Tensor | None, output: ForwardOutput
    ) -> torch.Tensor:
        """Note the tokens for the next step, and return them as they were noted: within the vocabulary. What is none of
        it, `result` finds, and the next step may be launched before that: an id beyond the embeddings would end a
        device. Raises BadTokens for what cannot be tokens at all.
        """
        tokens, most = output.next_token_ids, self._vocab_size - 1
        check_tokens(tokens, rows.shape[0], self._queue.device, self._by(output))
        if self._last_host is not None:
            # The same memory, at a fraction of what torch takes for so few numbers.
            ids = np.minimum(np.maximum(tokens.numpy(), 0), most)
            self._last_host[rows] = ids
            return torch.from_numpy(ids)
        kept = tokens.clamp(0, most)
        if sent_rows is not None:
            self._last.index_copy_(0, sent_rows, kept)
        return kept

    def _verified(
        self, work: ModelWorkerBatch, trees: TokenTrees, batch: ForwardBatch, output: ForwardOutput
    ) -> PendingResult:
        """Find out which tokens ahead stand, and move their KV to where it belongs. Raises BadTokens."""
        by = self._by(output)
        check_tokens(output.next_token_ids, trees.tokens.shape[0], self._queue.device, by)
        drawn = output.next_token_ids.cpu().numpy()
        check_ids(drawn, self._vocab_size, by)
        verified = Verified(trees, work.sampled_rows, drawn, output.logits, self.batches.sampling)
        accepted = self.parts.accept(work, verified, output)
        assert work.logits_indices is not None
        slots = work.out_cache_loc[work.logits_indices]
        firsts = np.repeat(tree.starts(trees.counts), accepted.counts)
        sources, targets = slots[accepted.nodes], slots[firsts + tree.places(accepted.counts)]
        if (moves := sources != targets).any():
            self._pool.move(*self._queue.bring(sources[moves], targets[moves]))
        tokens = accepted.tokens
        newest = np.maximum(tokens[np.cumsum(accepted.counts) - 1], 0)
        last, rows = self._queue.bring(newest, work.sampled_rows)
        self._last.index_copy_(0, rows, last)
        output.newest, output.accepted = last, accepted
        output.next_token_ids = torch.from_numpy(tokens)
        return self._bring(output, work, batch)

    @property
    def _vocab_size(self) -> int:
        return self._runner.ctx.spec.vocab_size

    def healthy(self) -> bool:
        """Return whether the device still answers."""
        return self._queue.healthy()

    def _bring(self, output: ForwardOutput, work: ModelWorkerBatch, batch: ForwardBatch) -> PendingResult:
        """Have all that a step computed for the host copied there, at once."""
        found = Computed.of(output, self.parts.computed(work, batch, output))
        fetched = self._queue.fetch(found.tensors)

        def arrived(tensors: Sequence[torch.Tensor]) -> BatchResult:
            result = found.result(tensors)
            result.accepted = output.accepted
            result.unsampled = check_ids(result.tokens, self._vocab_size, self._by(output))
            return result

        return PendingResult(fetched, arrived)
