"""Worker: runs ModelWorkerBatches. Everything that touches the device's tensors of a step is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pegboard.core.interfaces.forward import ForwardBatch, KVGroupView, LogprobOutput
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.core.pipeline.batch import greedy_only

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.attention import AttentionBackend
    from pegboard.core.interfaces.batch import ModelWorkerBatch, SamplingInfo
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.model_runner import ModelRunner
    from pegboard.core.pipeline.req_to_token import ReqToTokenPool


@dataclass(slots=True)
class BatchResult:
    """What came out of a step, on the host: `tokens` int64 [sampled], and logprobs where somebody asked."""

    tokens: NDArray[np.int64]
    logprobs: LogprobOutput | None = None


class Worker:
    """Turns host arrays into a ForwardBatch, runs it, and brings the tokens back. One device, this process."""

    def __init__(
        self,
        runner: ModelRunner,
        attention: AttentionBackend,
        pool: KVPool,
        rows: ReqToTokenPool,
        device: torch.device,
        *,
        before: Sequence[Callable[..., Any]] = (),
        after: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self._runner = runner
        self._attention = attention
        self._pool = pool
        self._rows = rows
        self._device = device
        self._before = tuple(before)
        self._after = tuple(after)
        self._sampling: SamplingBatch | None = None
        self._version = 0

    def run(self, work: ModelWorkerBatch) -> BatchResult:
        """One step. Raises what the model raises; the KV of its tokens is then undefined."""
        self._rows.sync()
        batch = self.forward_batch(work)
        sampling = None if work.sampling is None else self.sampling_batch(work.sampling)
        for hook in self._before:
            hook(batch)
        output = self._runner.execute(batch, sampling)
        for hook in self._after:
            hook(batch, output)
        return BatchResult(output.next_token_ids.cpu().numpy(), on_host(output.logprobs))

    def forward_batch(self, work: ModelWorkerBatch) -> ForwardBatch:
        """The device's view of a worker batch. On a CPU the tensors share the arrays' memory."""
        batch = ForwardBatch(
            forward_mode=work.forward_mode,
            batch_size=work.rows.shape[0],
            input_ids=self._tensor(work.input_ids),
            positions=self._tensor(work.positions),
            req_pool_indices=self._tensor(work.rows),
            seq_lens=self._tensor(work.seq_lens),
            seq_lens_cpu=work.seq_lens,
            kv_groups=(KVGroupView(self._rows.table, self._tensor(work.out_cache_loc)),),
            kv_pool=self._pool,
            attn_backend=self._attention,
            extras=work.extras,
        )
        if work.forward_mode.is_extend:
            batch.extend_lens = self._tensor(work.extend_lens)
            batch.extend_prefix_lens = self._tensor(work.prefix_lens)
            batch.extend_start_loc = self._tensor(np.cumsum(work.extend_lens) - work.extend_lens)
            batch.extend_lens_cpu = work.extend_lens
            batch.extend_prefix_lens_cpu = work.prefix_lens
        if work.sample_rows is not None:
            batch.sample_rows = self._tensor(work.sample_rows)
        return batch

    def sampling_batch(self, info: SamplingInfo) -> SamplingBatch:
        """Sampling tensors; between two steps of the same requests only `steps` changes."""
        sampling = self._sampling
        if sampling is None or info.version != self._version:
            sampling = self._sampling = SamplingBatch(
                temperatures=self._tensor(info.temperatures),
                top_ps=self._tensor(info.top_ps),
                top_ks=self._tensor(info.top_ks),
                min_ps=self._tensor(info.min_ps),
                seeds=self._tensor(info.seeds),
                steps=self._tensor(info.steps),
                all_greedy=greedy_only(info.temperatures, info.top_ks),
                need_top_p=bool((info.top_ps < 1.0).any()),
                need_top_k=bool((info.top_ks < self._runner.ctx.spec.vocab_size).any()),
                need_min_p=bool((info.min_ps > 0.0).any()),
                logprobs=info.logprobs,
            )
            self._version = info.version
        sampling.steps = self._tensor(info.steps)
        sampling.rows = info.rows
        return sampling

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def on_host(found: LogprobOutput | None) -> LogprobOutput | None:
    """All of a batch's logprobs at once: they are read entry by entry, and each would wait for the device."""
    if found is None or found.token_logprobs.device.type == "cpu":
        return found
    return LogprobOutput(
        found.token_logprobs.cpu(),
        None if found.top_values is None else found.top_values.cpu(),
        None if found.top_ids is None else found.top_ids.cpu(),
        {row: values.cpu() for row, values in found.chosen.items()},
    )
