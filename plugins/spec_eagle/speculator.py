"""The speculator: shows a head the model's states, and grows trees of what it says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.spec_eagle.config import read_draft
from pegboard.plugins.spec_eagle.entries import Due, Int64s, Memory, on
from pegboard.plugins.spec_eagle.growth import Growth
from pegboard.plugins.spec_eagle.options import EagleOptions
from pegboard.plugins.speculation.api import DeviceSpeculator, DraftBatch, SpeculatorContext, Stands
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    from pegboard.core.interfaces.attention import AttentionBackend
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.model_runner import ModelEnds
    from pegboard.core.interfaces.sampling import SamplingBatch
    from pegboard.core.interfaces.trees import Accepted

logger = logging.getLogger(__name__)

_NOWHERE = -1


class EagleSpeculator(DeviceSpeculator[EagleOptions]):
    """EAGLE-1, EAGLE-2 and EAGLE-3 (Li et al. 2024 and 2025): a decoder layer that reads the model's states drafts what
    the model may say next; the most probable of it makes a tree.

    The entries of all tokens that stand are computed from the model's own states, also those of accepted drafts, which
    the head has guessed from states of its own before.
    """

    lookback = 1

    def __init__(self, options: EagleOptions, ctx: SpeculatorContext) -> None:
        super().__init__(options, ctx)
        assert ctx.model is not None
        self.directory = Path(options.draft)
        self.draft_spec = read_draft(self.directory, ctx.spec, options.taps)
        layer = self.draft_spec.layer(1 + max((one.layer_id for one in ctx.spec.layers), default=-1))
        self.layers = (layer,)
        self.taps = self.draft_spec.taps
        self.max_nodes = min(options.nodes, ctx.max_nodes)
        self.reserve = options.written

    @classmethod
    def supports(cls, options: EagleOptions, ctx: SpeculatorContext) -> str | None:
        if not options.draft:
            return "speculation.draft is not set: it has to name the directory of an EAGLE head"
        if ctx.model is None:
            return "it drafts where the model runs, and there is none"
        try:
            draft = read_draft(Path(options.draft), ctx.spec, options.taps)
        except ModelError as error:
            return str(error)
        if options.topk > (vocab := draft.vocab_size or ctx.spec.vocab_size):
            return f"speculation.topk {options.topk}: the head can draft {vocab} tokens"
        return None

    def load(self, ends: ModelEnds, attention: AttentionBackend) -> None:
        from pegboard.plugins.spec_eagle.checkpoint import load_draft

        model = self.ctx.model
        assert model is not None
        hidden = self.draft_spec.decoder.hidden_size
        network, ids = load_draft(
            self.directory, self.draft_spec, self.layers[0], self.ctx.spec.hidden_size, ends,
            dtype=model.dtype, device=model.device,
        )  # fmt: skip
        places = ", ".join(map(str, self.taps))
        logger.info(
            "the head in %s reads the model's states at %s (inputs of layers, from 0 on)", self.directory, places
        )
        self._ids, self._network, self._attention = ids, network, attention
        self._embed = ends.embed if network.embedding is None else network.embedding
        count = self.ctx.max_rows + 1
        # Of each row: the mixed state of its last computed token, and the output of its newest token's entry.
        self._edge = torch.zeros(count, hidden, dtype=model.dtype, device=model.device)
        self._outputs = torch.zeros_like(self._edge)
        # How many tokens of a row were computed when they were kept.
        self._edge_at = np.full(count, _NOWHERE, np.int64)
        self._output_at = np.full(count, _NOWHERE, np.int64)

    def numerics(self) -> str:
        from pegboard.toolkit.model.weights_digest import weights_digest

        return f"EAGLE head {weights_digest(self.directory).hex()}, {self.draft_spec}"

    def observe(self, batch: ForwardBatch, taps: torch.Tensor, stands: Stands) -> None:
        rows = stands.rows
        ends = stands.starts + stands.counts
        offsets = tree.starts(stands.counts)
        # A request whose last state was not seen has a gap among its entries, and no drafts any more.
        known = stands.fresh | (self._edge_at[rows] == stands.starts)
        # Should anything below fail, nothing is known of these rows: what is kept may be an earlier request's.
        self._edge_at[rows] = self._output_at[rows] = _NOWHERE
        states = self._network.mixed(taps.index_select(0, stands.tokens))
        # The first token of a fresh request has no state before it, or is a cached prefix's last one.
        firsts, lasts = stands.starts + stands.fresh, ends.copy()
        lasts[stands.sampled[stands.room]] += 1
        lasts[~known] = 0
        due = Due.of(firsts, lasts)
        if len(due.tokens):
            outputs = self._compute(batch, stands, states, rows, due)
        last_states = self._tensor(offsets + stands.counts - 1)
        self._edge.index_copy_(0, batch.req_pool_indices, states.index_select(0, last_states))
        self._edge_at[rows[known]] = ends[known]
        newest = np.flatnonzero(due.lasts > ends[due.requests])
        if len(newest):
            kept = rows[due.requests[newest]]
            at = self._tensor(np.cumsum(due.counts)[newest] - 1)
            self._outputs.index_copy_(0, self._tensor(kept), outputs.index_select(0, at))
            self._output_at[kept] = ends[due.requests[newest]]

    def _compute(
        self, batch: ForwardBatch, stands: Stands, states: torch.Tensor, rows: Int64s, due: Due
    ) -> torch.Tensor:
        """Compute the entries that are due. Return their outputs [due, hidden]."""
        starts, counts = stands.starts[due.owners], stands.counts[due.owners]
        offsets = tree.starts(stands.counts)[due.owners]
        behind = np.zeros(len(rows), np.int64)
        behind[stands.sampled] = np.arange(len(stands.sampled))
        # Tokens: those computed, then the newest. States before them: those computed, then the last ones of before.
        all_ids = torch.cat([batch.input_ids.index_select(0, stands.tokens), stands.newest])
        all_states = torch.cat([states, self._edge.index_select(0, batch.req_pool_indices)])
        computed = due.tokens < starts + counts
        which = np.where(computed, offsets + due.tokens - starts, len(states) + behind[due.owners])
        before = np.where(due.tokens > starts, offsets + due.tokens - 1 - starts, len(states) + due.owners)
        place = self._tensor(which)
        ids = all_ids.index_select(0, place)
        embeds = self._embeds(batch, stands, all_ids).index_select(0, place)
        memory = Memory(batch.kv_groups[0].row_table, batch.kv_pool, self._attention)
        entries = memory.batch(rows[due.requests], due.lasts - 1, due.counts, ids)
        made: torch.Tensor = self._network(
            embeds, all_states.index_select(0, self._tensor(before)), entries.positions, entries
        )
        return made

    def _embeds(self, batch: ForwardBatch, stands: Stands, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens that stand and of the newest ones; of media, their own states."""
        embeds = self._embed(ids)
        if batch.overlay is None or self._network.embedding is not None:
            return embeds
        all_embeds = self._embed(batch.input_ids)
        all_embeds.index_copy_(0, batch.overlay.rows, batch.overlay.states.to(all_embeds.dtype))
        return torch.cat([all_embeds.index_select(0, stands.tokens), embeds[len(stands.tokens) :]])

    def draft(self, batch: DraftBatch) -> TokenTrees:
        computed = batch.seq_lens - 1
        known = np.flatnonzero((self._edge_at[batch.rows] == computed) & (batch.most > 1))
        found = [TokenTrees(_ONE, np.array([token], np.int64), _ROOT) for token in batch.newest.tolist()]
        if not len(known):
            return tree.join(found)
        memory = Memory(batch.row_table, batch.kv_pool, self._attention)
        rows, computed, newest = batch.rows[known], computed[known], batch.newest[known]
        most = np.minimum(batch.most[known], self.max_nodes)
        self._catch_up(memory, rows, computed, newest)
        outputs = self._outputs.index_select(0, self._tensor(rows))
        steps = min(self.options.steps, int(most.max()) - 1)
        growth = Growth(self._network, self._embed, self._ids, memory, rows, computed)
        for place, one in zip(
            known.tolist(), growth.trees(outputs, newest, most, self.options.topk, steps), strict=True
        ):
            found[place] = one
        return tree.join(found)

    def accept(self, trees: TokenTrees, logits: torch.Tensor, sampling: SamplingBatch, rows: Int64s) -> Accepted:
        if self.options.accept == "match":
            return super().accept(trees, logits, sampling, rows)
        return self.options.accepted(trees, logits, sampling)

    def _catch_up(self, memory: Memory, rows: Int64s, computed: Int64s, newest: Int64s) -> None:
        """Compute the newest tokens' entries where there was no slot for them when they were sampled."""
        due = np.flatnonzero(self._output_at[rows] != computed)
        if not len(due):
            return
        at, ids = self._tensor(rows[due]), self._tensor(newest[due])
        entries = memory.batch(rows[due], computed[due], np.ones(len(due), np.int64), ids)
        states = self._edge.index_select(0, at)
        self._outputs.index_copy_(0, at, self._network(self._embed(ids), states, entries.positions, entries))
        self._output_at[rows[due]] = computed[due]

    def _tensor(self, array: Int64s) -> torch.Tensor:
        return on(self._edge.device, array)


_ONE, _ROOT = np.array([1], np.int64), np.array([-1], np.int64)
