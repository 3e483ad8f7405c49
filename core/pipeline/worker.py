"""Worker: runs ModelWorkerBatches. Everything that touches the device's tensors of a step is here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from pegboard.core.interfaces.forward import ForwardBatch, KVGroupView, LogprobOutput
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.core.pipeline.batch_result import BatchResult
from pegboard.core.pipeline.sampled import check_ids, check_tokens
from pegboard.core.pipeline.speculation.judging import with_logprobs_of
from pegboard.core.pipeline.tiers.loading import WatchedAttention, loading_for
from pegboard.core.toolkit.speculation import tree

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from pegboard.core.interfaces.attention import AttentionBackend
    from pegboard.core.interfaces.batch import (
        DraftWork,
        ModelWorkerBatch,
        SamplingInfo,
        SplitPart,
        TableChanges,
        WantedRows,
    )
    from pegboard.core.interfaces.forward import ForwardOutput
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.model_runner import ModelRunner
    from pegboard.core.interfaces.pooler import Pooler
    from pegboard.core.interfaces.speculator import Accepted, DraftTrees
    from pegboard.core.pipeline.guards import GuardedHooks
    from pegboard.core.pipeline.media.states import EncodedMedia
    from pegboard.core.pipeline.req_to_token import ReqToTokenPool
    from pegboard.core.pipeline.speculation.device import DeviceDrafts
    from pegboard.core.pipeline.speculation.judging import Judge
    from pegboard.core.pipeline.tiers.loading import HostLoads, Loading

logger = logging.getLogger(__name__)

Watches = Literal["nothing", "batch", "attention"]
"""Who waits for a layer's loads: the worker for all of them, the runner (capability `layer_watch`), or the attention
that the network calls.
"""

_NO_TOKENS = np.empty(0, np.int64)


@dataclass(slots=True)
class _Split:
    """A prefill between two of its parts."""

    batch: ForwardBatch
    layers: Generator[None, None, ForwardOutput]
    output: ForwardOutput | None = None


class PendingResult:
    """A launched batch whose tokens are on their way to the host. What else was wanted is there already."""

    def __init__(
        self,
        tokens: torch.Tensor,
        result: BatchResult,
        ready: torch.cuda.Event | None,
        vocab_size: int = 0,
        by: object = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._by = by
        self._tokens = tokens
        self._result = result
        self._ready = ready

    def result(self) -> BatchResult:
        if self._ready is not None:
            self._ready.synchronize()
            check_ids(self._tokens.numpy(), self._vocab_size, self._by)
        self._result.tokens = self._tokens.numpy()
        return self._result


class Worker:
    """Turns host arrays into a ForwardBatch, runs it, and brings the tokens back. One device, this process.

    It keeps the token it sampled last for every request row, on the device: a batch that is launched before the host
    has seen the tokens of the one before (`ModelWorkerBatch.pending`) takes them from there. And where the row table is
    mirrored, it keeps its own, as old as its batch.
    """

    def __init__(
        self,
        runner: ModelRunner,
        attention: AttentionBackend,
        pool: KVPool,
        rows: ReqToTokenPool,
        device: torch.device,
        *,
        before: GuardedHooks | None = None,
        after: GuardedHooks | None = None,
        pooler: Pooler | None = None,
        media: EncodedMedia | None = None,
        drafts: DeviceDrafts | None = None,
        judge: Judge | None = None,
        loads: HostLoads | None = None,
        watches: Watches = "nothing",
    ) -> None:
        self.loads = loads
        self._watches = watches
        self.media = media
        self.drafts = drafts
        self.judge = judge
        self._runner = runner
        self._pooler = pooler
        self._attention = attention
        self._pool = pool
        self._device = device
        self._table = rows.device_table(device)
        self._before = before
        self._after = after
        self._last = torch.zeros(rows.max_rows + 1, dtype=torch.int64, device=device)
        self._last_host = self._last.numpy() if device.type == "cpu" else None
        self._sampling: SamplingBatch | None = None
        self._version = 0
        self._split: _Split | None = None

    def run(self, work: ModelWorkerBatch) -> BatchResult:
        """Run one step, to its end. Raises what the model raises; the KV of its tokens is then undefined."""
        return self.launch(work).result()

    def again(self, work: ModelWorkerBatch) -> BatchResult:
        """Run a part of a step that failed, without step hooks: they have seen it."""
        return self.launch(work, hooks=False).result()

    @torch.inference_mode()
    def launch(self, work: ModelWorkerBatch, *, hooks: bool = True) -> PendingResult:
        """Start one step; on an asynchronous device it may go on after this call. Batches run in launch order."""
        self._change_table(work.table)
        if work.part is not None and not work.part.first:
            return self._go_on(work, work.part, hooks)
        ahead = self._watches != "nothing" and work.part is None
        with loading_for(work.loads, self.loads, ahead=ahead) as loading:
            return self._begin(work, loading, hooks)

    def _begin(self, work: ModelWorkerBatch, loading: Loading | None, hooks: bool) -> PendingResult:
        """Run a step, or the first part of one, while some of what it reads may still be coming."""
        batch = self.forward_batch(work)
        if loading is not None:
            self._watch(batch, loading, in_parts=work.part is not None)
        sampling = None if work.sampling is None else self.sampling_batch(work.sampling)
        if hooks and self._before:
            self._before(batch)
        if work.part is not None:
            self._split = _Split(batch, self._runner.execute_in_parts(batch, sampling))
            return self._go_on(work, work.part, hooks)
        if work.trees is not None and self.judge is not None and self.judge.on:
            output = self._runner.execute(batch, sampling, return_logits=True)
        else:
            output = self._runner.execute(batch, sampling)
        if loading is not None:
            loading.before_all()  # what drafts reads further layers
        return self._finish(work, batch, output, hooks)

    def _watch(self, batch: ForwardBatch, loading: Loading, *, in_parts: bool) -> None:
        """Have a batch wait for its loads: layer by layer, or here for all of them."""
        if self._watches == "nothing" or in_parts:
            loading.before_all()
        elif self._watches == "batch":
            batch.watch = loading
        else:
            batch.attn_backend = WatchedAttention(batch.attn_backend, loading)

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
            return self._finish(work, split.batch, split.output, hooks)
        self._split = split
        return PendingResult(torch.empty(0, dtype=torch.int64), BatchResult(_NO_TOKENS), None)

    def _finish(self, work: ModelWorkerBatch, batch: ForwardBatch, output: ForwardOutput, hooks: bool) -> PendingResult:
        if hooks and self._after:
            self._after(batch, output)
        # Behind the hooks: the next step must start from the same tokens as the host, whatever a hook has put there.
        if work.trees is not None:
            return self._verified(work, work.trees, batch, output)
        if work.sampling is not None:
            self._keep_last(work.sampled_rows, output)
        if self.drafts is not None:
            self.drafts.observe(work, batch, output.next_token_ids, None, self._tensor)
        return self._bring(output, work.wanted)

    @torch.inference_mode()
    def draft(self, work: DraftWork) -> DraftTrees:
        """Draft on the device, with no batch under way. Raises what the speculator raises."""
        if self.drafts is None:
            raise RuntimeError("this worker has no speculator")
        self._change_table(work.table)
        return self.drafts.draft(work, self._table, self._pool)

    def _change_table(self, table: TableChanges | None) -> None:
        if table is not None:
            places, slots = self._tensor(table.places), self._tensor(table.slots)
            self._table.view(-1).index_copy_(0, places, slots)

    def _by(self, output: ForwardOutput) -> object:
        """Return the sampler that drew the tokens."""
        return self._runner if output.sampled_by is None else output.sampled_by

    def _keep_last(self, rows: NDArray[np.int64], output: ForwardOutput) -> None:
        """Note the tokens for the next step. Raises BadTokens for what are none; on a device only `result` sees ids."""
        tokens, by = output.next_token_ids, self._by(output)
        check_tokens(tokens, rows.shape[0], self._device, by)
        if self._last_host is not None:
            # The same memory, at a fraction of what torch takes for so few numbers.
            ids = tokens.numpy()
            check_ids(ids, self._vocab_size, by)
            self._last_host[rows] = ids
        else:
            # A step may be launched before the ids are looked at, and one beyond the embeddings would end the device.
            self._last.index_copy_(0, self._tensor(rows), tokens.clamp(0, self._vocab_size - 1))

    def _verified(
        self, work: ModelWorkerBatch, trees: DraftTrees, batch: ForwardBatch, output: ForwardOutput
    ) -> PendingResult:
        """Find out which drafts stand, and move their KV to where it belongs. Raises BadTokens as `_keep_last`."""
        by = self._by(output)
        check_tokens(output.next_token_ids, trees.tokens.shape[0], self._device, by)
        drawn = output.next_token_ids.cpu().numpy()
        check_ids(drawn, self._vocab_size, by)
        accepted = self._accept(work, trees, drawn, output)
        assert work.sample_rows is not None
        slots = work.out_cache_loc[work.sample_rows]
        firsts = np.repeat(tree.starts(trees.counts), accepted.counts)
        sources, targets = slots[accepted.nodes], slots[firsts + tree.places(accepted.counts)]
        if (moves := sources != targets).any():
            self._pool.move(self._tensor(sources[moves]), self._tensor(targets[moves]))
        newest = self._tensor(accepted.tokens[np.cumsum(accepted.counts) - 1])
        self._last.index_copy_(0, self._tensor(work.sampled_rows), newest)
        if self.drafts is not None:
            self.drafts.observe(work, batch, newest, accepted, self._tensor)
        result = self._result(output, work.wanted)
        result.accepted = accepted
        return PendingResult(torch.from_numpy(accepted.tokens), result, None)

    def _accept(
        self, work: ModelWorkerBatch, trees: DraftTrees, drawn: NDArray[np.int64], output: ForwardOutput
    ) -> Accepted:
        """Return what stands: where the tokens `drawn` lead, or what the speculator decides, if it does."""
        logits, sampling = output.logits, self._sampling  # this batch's
        if self.judge is None or logits is None or sampling is None:
            return tree.walk(trees, drawn)
        accepted = self.judge.accept(trees, drawn, logits, sampling, work.sampled_rows)
        if output.logprobs is not None:
            output.logprobs = with_logprobs_of(output.logprobs, accepted, drawn, logits)
        return accepted

    @property
    def _vocab_size(self) -> int:
        return self._runner.ctx.spec.vocab_size

    def healthy(self) -> bool:
        """Return whether the device still answers: a CUDA context is lost with its first fault."""
        if self._device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            logger.exception("%s has failed and does not recover", self._device)
            return False
        return True

    def _bring(self, output: ForwardOutput, wanted: WantedRows | None) -> PendingResult:
        tokens = output.next_token_ids
        if self._device.type != "cuda":
            return PendingResult(tokens, self._result(output, wanted), None)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        found = self._result(output, wanted)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        return PendingResult(host, found, ready, self._vocab_size, self._by(output))

    def _result(self, output: ForwardOutput, wanted: WantedRows | None) -> BatchResult:
        """Return everything but the tokens, on the host."""
        result = BatchResult(_NO_TOKENS, on_host(output.logprobs), on_host(output.prompt_logprobs))
        states = output.row_states
        if wanted is None or states is None:
            return result
        count = wanted.pool_rows.shape[0]
        if count:
            assert self._pooler is not None
            result.pooled = self._pooler.reduce(states[:count], wanted.pool_spans).float().cpu().numpy()
        if states.shape[0] > count:
            result.hidden = states[count:].float().cpu().numpy()
        return result

    def forward_batch(self, work: ModelWorkerBatch) -> ForwardBatch:
        """Return the device's view of a worker batch. On a CPU the tensors share the arrays' memory."""
        rows = self._tensor(work.rows)
        batch = ForwardBatch(
            forward_mode=work.forward_mode,
            batch_size=work.rows.shape[0],
            input_ids=self._input_ids(work, rows),
            positions=self._tensor(work.positions),
            req_pool_indices=rows,
            seq_lens=self._tensor(work.seq_lens),
            seq_lens_cpu=work.seq_lens,
            kv_groups=(KVGroupView(self._table, self._tensor(work.out_cache_loc)),),
            kv_pool=self._pool,
            attn_backend=self._attention,
            taps=None if self.drafts is None else self.drafts.taps(),
            extras=work.extras,
        )
        if work.forward_mode.is_extend:
            batch.extend_lens = self._tensor(work.extend_lens)
            batch.extend_prefix_lens = self._tensor(work.prefix_lens)
            batch.extend_start_loc = self._tensor(np.cumsum(work.extend_lens) - work.extend_lens)
            batch.extend_lens_cpu = work.extend_lens
            batch.extend_prefix_lens_cpu = work.prefix_lens
        if work.tail_lens is not None and work.tail_bits is not None:
            batch.tail_lens, batch.tail_lens_cpu = self._tensor(work.tail_lens), work.tail_lens
            batch.tail_bits = self._tensor(work.tail_bits)
        if work.sample_rows is not None:
            batch.sample_rows = self._tensor(work.sample_rows)
        if work.wanted is not None:
            self._want(batch, work.wanted)
        if work.overlay:
            assert self.media is not None
            batch.overlay = self.media.overlay(work.overlay, self._device)
        return batch

    def _want(self, batch: ForwardBatch, wanted: WantedRows) -> None:
        if wanted.logprob_rows.shape[0]:
            batch.logprob_rows = self._tensor(wanted.logprob_rows)
            batch.logprob_targets = self._tensor(wanted.logprob_targets)
            batch.logprob_requests = tuple(one for count, one in wanted.logprob_requests for _ in range(count))
        if wanted.pool_rows.shape[0] or wanted.hidden_rows.shape[0]:
            batch.hidden_rows = self._tensor(np.concatenate([wanted.pool_rows, wanted.hidden_rows]))

    def _input_ids(self, work: ModelWorkerBatch, rows: torch.Tensor) -> torch.Tensor:
        ids = self._tensor(work.input_ids)
        if work.pending is None:
            return ids
        places = self._tensor(work.pending)
        # Decodes stand at the end of a batch, one token each.
        which = places + (rows.shape[0] - ids.shape[0])
        return ids.index_copy(0, places, self._last[rows[which]])

    def sampling_batch(self, info: SamplingInfo) -> SamplingBatch:
        """Return the sampling tensors; between two steps of the same requests only `steps` changes."""
        sampling = self._sampling
        if sampling is None or info.version != self._version:
            sampling = self._sampling = SamplingBatch.of(
                info.numbers, self._tensor(info.steps), self._vocab_size, self._tensor
            )
            sampling.logprobs = info.logprobs
            self._version = info.version
        sampling.steps = self._tensor(info.steps)
        sampling.rows = info.rows
        mask = info.mask
        sampling.mask = None if mask is None else self._tensor(mask.bits)
        sampling.mask_rows = None if mask is None else self._tensor(mask.rows)
        return sampling

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def on_host(found: LogprobOutput | None) -> LogprobOutput | None:
    """Return all of a batch's logprobs at once: they are read entry by entry, and each would wait for the device."""
    if found is None or found.token_logprobs.device.type == "cpu":
        return found
    return LogprobOutput(
        found.token_logprobs.cpu(),
        None if found.top_values is None else found.top_values.cpu(),
        None if found.top_ids is None else found.top_ids.cpu(),
        {row: values.cpu() for row, values in found.chosen.items()},
    )
