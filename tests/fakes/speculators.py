"""A small speculator that drafts on the device, correct in all that the suite asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.layers import LayerSpec
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DeviceSpeculator, DraftBatch, SpeculatorContext, Stands
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    from pegboard.core.interfaces.attention import AttentionBackend
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.model_runner import ModelEnds

_NOWHERE = -1


class SumSpeculator(DeviceSpeculator[NoOptions]):
    """Drafts chains from the sum of a request's entries. A token's entry is its embedding with the model's state at the
    token before, and lies in the keys of a further layer at the token's slot.
    """

    lookback = 1

    def __init__(self, options: NoOptions, ctx: SpeculatorContext) -> None:
        super().__init__(options, ctx)
        dim, first = ctx.spec.hidden_size, 1 + max(layer.layer_id for layer in ctx.spec.layers)
        self.layers = (LayerSpec(first, 1, 1, dim, dim, 1.0),)
        self.taps = (len(ctx.spec.layers) // 2,)
        self.max_nodes = min(5, ctx.max_nodes)
        self.reserve = self.max_nodes - 2  # the last draft has no entry

    def load(self, ends: ModelEnds, attention: AttentionBackend) -> None:
        self.ends = ends
        count = self.ctx.max_rows + 1
        # Of each row: the state of its last computed token, how many were computed then, and up to where entries are.
        self.edge = torch.zeros(count, self.ctx.spec.hidden_size)
        self.edge_at, self.written = np.full(count, _NOWHERE), np.full(count, _NOWHERE)

    def observe(self, batch: ForwardBatch, taps: torch.Tensor, stands: Stands) -> None:
        table, rows = batch.kv_groups[0].row_table, batch.req_pool_indices.tolist()
        states, ids = taps[stands.tokens], batch.input_ids[stands.tokens]
        sampled = dict(zip(stands.sampled.tolist(), range(len(stands.sampled)), strict=True))
        for request, (row, first) in enumerate(zip(rows, tree.starts(stands.counts).tolist(), strict=True)):
            start, count = int(stands.starts[request]), int(stands.counts[request])
            own, tokens = states[first : first + count], ids[first : first + count]
            edge, skipped = self.boundary(row, start, own, fresh=bool(stands.fresh[request]))
            before = torch.cat([edge, own[:-1]])
            if request in sampled and stands.room[sampled[request]]:
                tokens, before = (
                    torch.cat([tokens, stands.newest[sampled[request], None]]),
                    torch.cat([before, own[-1:]]),
                )
            slots = table[row, start + skipped : start + len(tokens)].long()
            self.write(batch.kv_pool, slots, tokens[skipped:], before[skipped:])
            self.edge[row], self.edge_at[row], self.written[row] = own[-1], start + count, start + len(tokens)

    def boundary(self, row: int, start: int, own: torch.Tensor, *, fresh: bool) -> tuple[torch.Tensor, int]:
        """Return the state [1, hidden] before the first token of a pass, and how many tokens' entries lack it: 0 or 1.
        There is none before a request's very first token.
        """
        if not fresh and self.edge_at[row] == start:
            return self.edge[row, None], 0
        return torch.zeros_like(self.edge[:1]), int(start > 0)

    def write(self, pool: KVPool, slots: torch.Tensor, ids: torch.Tensor, states: torch.Tensor) -> None:
        """Write the entries of tokens int64 [n] behind states [n, hidden]."""
        entries = (self.ends.embed(ids) + states)[:, None]
        pool.write(self.layers[0].layer_id, slots, entries, entries)

    def draft(self, batch: DraftBatch) -> TokenTrees:
        asked = zip(
            batch.rows.tolist(), batch.seq_lens.tolist(), batch.newest.tolist(), batch.most.tolist(), strict=True
        )
        return tree.join(self.grow(batch, *one) for one in asked)

    def grow(self, batch: DraftBatch, row: int, length: int, newest: int, most: int) -> TokenTrees:
        """Return the tree of a request in `row` with `length` tokens, the newest included."""
        slots, drafted = batch.row_table[row, : length + self.reserve].long(), []
        if self.edge_at[row] != length - 1:
            return tree.chains([(newest, ())])
        if self.written[row] < length:
            self.write(batch.kv_pool, slots[length - 1 : length], torch.tensor([newest]), self.edge[row, None])
            self.written[row] = length
        for place in range(length, length + min(most, self.max_nodes) - 1):
            state = torch.sin(batch.kv_pool.keys(self.layers[0].layer_id)[slots[:place], 0].sum(0, keepdim=True))
            drafted.append(self.ends.logits(state)[0].topk(2).indices.tolist())
            if place < len(slots):
                self.write(batch.kv_pool, slots[place : place + 1], torch.tensor(drafted[-1][:1]), state)
        return self.shape(newest, drafted, most)

    def shape(self, newest: int, drafted: list[list[int]], most: int) -> TokenTrees:
        """Return the tree of what is most likely, and what comes next, at each depth."""
        return tree.chains([(newest, [best for best, _ in drafted])])


class BranchingSumSpeculator(SumSpeculator):
    """Proposes the second best beside the first draft, too, in place of the last one."""

    def shape(self, newest: int, drafted: list[list[int]], most: int) -> TokenTrees:
        if len(drafted) < 2:
            return super().shape(newest, drafted, most)
        (first, second), *rest = drafted[:-1]
        tokens = [newest, first, second, *(best for best, _ in rest)]
        parents = [-1, 0, 0, 1, *range(3, 2 + len(rest))][: len(tokens)]
        return TokenTrees(np.array([len(tokens)]), np.array(tokens, np.int64), np.array(parents, np.int64))


class TokenSumSpeculator(SumSpeculator):
    """Knows of the tokens alone: it reads no states, and needs none behind a cached prefix."""

    lookback = 0

    def __init__(self, options: NoOptions, ctx: SpeculatorContext) -> None:
        super().__init__(options, ctx)
        self.taps = ()

    def observe(self, batch: ForwardBatch, taps: torch.Tensor, stands: Stands) -> None:
        super().observe(batch, taps.new_zeros(len(taps), self.ctx.spec.hidden_size).float(), stands)

    def boundary(self, row: int, start: int, own: torch.Tensor, *, fresh: bool) -> tuple[torch.Tensor, int]:
        return torch.zeros_like(own[:1]), 0
