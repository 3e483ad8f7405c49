"""Batches of the head's own layer: whose entries are computed, from what, and where they go.

The head reads a token together with the model's state at the token before it. Such an entry's keys and values are kept
at the token's own slot, so that they depend on the tokens up to it alone, as those of the model do: a cached prefix has
its entries, whatever follows it. SGLang and vLLM keep them a slot earlier, where the token behind a prefix matters.

So entry i of a request is that of token i + 1: the row table, less its first column, is the table of entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.core.interfaces.attention import AttentionBackend
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, KVGroupView
from pegboard.core.interfaces.kv_pool import KVPool
from pegboard.toolkit.sampling.tree import places, starts

Int64s = NDArray[np.int64]


def on(device: torch.device, array: Int64s) -> torch.Tensor:
    """Bring an array to a device; on a CPU the tensor shares its memory."""
    made = torch.from_numpy(array)
    return made if device.type == "cpu" else made.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Memory:
    """Where entries are kept: `row_table` int32 [rows, positions] of the model's tokens, the pool, and what attends."""

    row_table: torch.Tensor
    pool: KVPool
    attention: AttentionBackend

    def batch(
        self,
        rows: Int64s,
        ends: Int64s,
        counts: Int64s,
        input_ids: torch.Tensor,
        tails: tuple[Int64s, torch.Tensor] | None = None,
    ) -> ForwardBatch:
        """Return the batch of the last `counts` of `ends` entries of each request, all int64 [requests], ready for
        attention; `rows` in the table. `tails` are `tail_lens` and `tail_bits`.
        """
        tensor = partial(on, self.row_table.device)
        firsts = ends - counts
        at = np.repeat(firsts, counts) + places(counts)
        entries = self.row_table[:, 1:]
        slots = entries[tensor(np.repeat(rows, counts)), tensor(at)].long()
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(rows),
            input_ids=input_ids,
            positions=tensor(at),
            req_pool_indices=tensor(rows),
            seq_lens=tensor(ends),
            seq_lens_cpu=ends,
            kv_groups=(KVGroupView(entries, slots),),
            kv_pool=self.pool,
            attn_backend=self.attention,
            extend_lens=tensor(counts),
            extend_prefix_lens=tensor(firsts),
            extend_start_loc=tensor(starts(counts)),
            extend_lens_cpu=counts,
            extend_prefix_lens_cpu=firsts,
        )
        if tails is not None:
            batch.tail_lens_cpu, batch.tail_lens, batch.tail_bits = tails[0], tensor(tails[0]), tails[1]
        self.attention.prepare(batch)
        return batch


@dataclass(frozen=True, slots=True)
class Due:
    """Which entries of a pass are due: of request r the tokens `firsts[r]` to `lasts[r]` - 1, at `tokens` int64 [due]
    in all, of the requests `owners` int64 [due]. All are indices of the batch's requests and of the row's positions.
    """

    requests: Int64s
    firsts: Int64s
    lasts: Int64s
    owners: Int64s
    tokens: Int64s

    @classmethod
    def of(cls, firsts: Int64s, lasts: Int64s) -> Due:
        """Return those of requests whose entries from token `firsts` up to token `lasts` int64 [batch] are due."""
        requests = np.flatnonzero(lasts > firsts)
        counts = (lasts - firsts)[requests]
        tokens = np.repeat(firsts[requests], counts) + places(counts)
        return cls(requests, firsts[requests], lasts[requests], np.repeat(requests, counts), tokens)

    @property
    def counts(self) -> Int64s:
        return self.lasts - self.firsts
