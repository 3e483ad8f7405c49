"""DeviceBatches: the device's view of worker batches, all of which goes over in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.forward import ForwardBatch, KVGroupView
from pegboard.core.interfaces.sampling import SamplingBatch

if TYPE_CHECKING:
    from pegboard.core.interfaces.attention import AttentionBackend
    from pegboard.core.interfaces.batch import ModelWorkerBatch, SamplingInfo, TableChanges
    from pegboard.core.interfaces.forward import Taps
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.stage import DevicePart
    from pegboard.toolkit.device_queue import DeviceQueue

_PER_TOKEN = 96
_PER_ROW = 192
"""Bytes that a step's arrays take at most for each token, and for each request, alignment included."""


@dataclass(slots=True)
class Sent:
    """A batch on the device. `sampled_rows` int64 [sampled] are where their tokens are kept, None where none are."""

    batch: ForwardBatch
    sampling: SamplingBatch | None
    sampled_rows: torch.Tensor | None


class DeviceBatches:
    """Makes them. `last` int64 [rows] has the token that was sampled last for each request row; `table` is the row
    table as old as the batch.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        table: torch.Tensor,
        last: torch.Tensor,
        pool: KVPool,
        attention: AttentionBackend,
        vocab_size: int,
        parts: Mapping[str, DevicePart] | None = None,
    ) -> None:
        self._parts = parts or {}
        self.queue = queue
        self.table = table
        self._last = last
        self._pool = pool
        self._attention = attention
        self._vocab_size = vocab_size
        self._sampling: SamplingBatch | None = None
        self._version = 0

    @cached_property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """Row tables of all KV groups. A device part keeps all but the first."""
        further = max((layer.kv_group for layer in self._attention.ctx.layers), default=0)
        return self.table, *(torch.zeros_like(self.table) for _ in range(further))

    @property
    def sampling(self) -> SamplingBatch | None:
        """That of the last batch that sampled."""
        return self._sampling

    def send(self, work: ModelWorkerBatch, taps: Taps | None) -> Sent:
        """Return a batch on the device. On a CPU its tensors share the arrays' memory."""
        queue = self.queue
        if not queue.looks:
            queue.begin(_most_bytes(work))
        changes = self._put_changes(work.table)
        future = self._put_future(work)
        batch = self._put_batch(work, taps)
        sampling = None if work.sampling is None else self._put_sampling(work.sampling)
        rows = None if work.sampling is None or queue.looks else queue.put(work.sampled_rows)
        queue.send()
        self._change(changes)
        if future is not None:
            places, sources = future
            # Out of place: on a CPU the ids are the scheduler's own array.
            batch.input_ids = batch.input_ids.index_copy(0, places, self._last[sources])
        return Sent(batch, sampling, rows)

    def send_table(self, table: TableChanges | None) -> None:
        """Bring changes of the row table alone."""
        if table is not None:
            if not self.queue.looks:
                self.queue.begin(table.places.nbytes + table.slots.nbytes)
            changes = self._put_changes(table)
            self.queue.send()
            self._change(changes)

    def _put_changes(self, table: TableChanges | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if table is None else (self.queue.put(table.places), self.queue.put(table.slots))

    def _change(self, changes: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if changes is not None:
            self.table.view(-1).index_copy_(0, *changes)

    def _put_future(self, work: ModelWorkerBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return packed tokens whose ids only the device knows, and the rows that they were sampled for."""
        if work.future_indices is None:
            return None
        # Decodes stand at the end of a batch, one token each.
        rows = work.rows[work.future_indices + (work.rows.shape[0] - work.input_ids.shape[0])]
        return self.queue.put(work.future_indices), self.queue.put(rows)

    def _put_batch(self, work: ModelWorkerBatch, taps: Taps | None) -> ForwardBatch:
        put = self.queue.put
        batch = ForwardBatch(
            forward_mode=work.forward_mode,
            batch_size=work.rows.shape[0],
            input_ids=put(work.input_ids),
            positions=put(work.positions),
            req_pool_indices=put(work.rows),
            seq_lens=put(work.seq_lens),
            seq_lens_cpu=work.seq_lens,
            kv_groups=(KVGroupView(self.table, put(work.out_cache_loc)),),
            kv_pool=self._pool,
            attn_backend=self._attention,
            taps=taps,
            common_prefix=work.common_prefix,
            extras={name: self._put_extra(value) for name, value in work.extras.items()} if work.extras else {},
        )
        if work.forward_mode.is_extend:
            batch.extend_lens = put(work.extend_lens)
            batch.extend_prefix_lens = put(work.prefix_lens)
            batch.extend_start_loc = put(np.cumsum(work.extend_lens) - work.extend_lens)
            batch.extend_lens_cpu = work.extend_lens
            batch.extend_prefix_lens_cpu = work.prefix_lens
        if work.tail_lens is not None and work.tail_bits is not None:
            batch.tail_lens, batch.tail_lens_cpu = put(work.tail_lens), work.tail_lens
            batch.tail_bits = put(work.tail_bits)
        if work.logits_indices is not None:
            batch.logits_indices = put(work.logits_indices)
        for name, payload in work.payloads.items():
            self._parts[name].unpack(payload, batch, put)
        return batch

    def _put_extra(self, value: object) -> object:
        """Bring a plugin's array along; another value stays what it is."""
        return self.queue.put(value) if isinstance(value, np.ndarray) else value

    def _put_sampling(self, info: SamplingInfo) -> SamplingBatch:
        """Return the sampling tensors; between two steps of the same requests only `steps` changes."""
        sampling, put = self._sampling, self.queue.put
        steps = put(info.steps)
        if sampling is None or info.version != self._version:
            sampling = self._sampling = SamplingBatch.of(info.numbers, steps, self._vocab_size, put)
            sampling.logprobs = info.logprobs
            ids = [token for one in info.logprobs if one is not None for token in one.token_ids]
            sampling.logprob_ids = put(np.array(ids, np.int64)) if ids else None
            self._version = info.version
        sampling.steps = steps
        sampling.rows = info.rows
        mask = info.mask
        sampling.mask = None if mask is None else put(mask.bits)
        sampling.mask_rows = None if mask is None else put(mask.rows)
        return sampling


def _most_bytes(work: ModelWorkerBatch) -> int:
    """Return what a batch's arrays take together, plugins' apart, and a little more."""
    most: int = 4096 + _PER_TOKEN * work.input_ids.shape[0] + _PER_ROW * work.rows.shape[0]
    if work.table is not None:
        most += work.table.places.nbytes + work.table.slots.nbytes
    if work.sampling is not None:
        most += _PER_ROW * work.sampling.steps.shape[0]
        if work.sampling.mask is not None:
            most += work.sampling.mask.bits.nbytes
    for value in work.extras.values():
        if isinstance(value, np.ndarray):
            most += int(value.nbytes)
    return most
