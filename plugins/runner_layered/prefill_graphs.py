"""Graphs of prefills and mixed batches, by their number of tokens."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.forward import ForwardMode
from pegboard.plugins.runner_layered.graphs import Rows, reads_the_same, record_all
from pegboard.toolkit.graphs import StaticExtend, padded

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.graphs import GraphCapture, Replay
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.model_family import Network
    from pegboard.core.interfaces.model_runner import ModelRunnerContext

logger = logging.getLogger(__name__)

PROMPTS = 16
"""Requests of several new tokens that a batch may have: each may leave a tile of attention's queries half empty, and a
graph launches as many tiles as there may be."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded pass: `hidden` [tokens, hidden] are those of `static` once `replay` has run."""

    static: StaticExtend
    replay: Replay
    hidden: torch.Tensor


class PrefillGraphs:
    """For each size two graphs, of all from the embedding to the final norm: one for requests of several new tokens
    each, and one that has room for requests of one new token beside them. What is wanted of the hidden states stays
    outside: it takes few launches, and differs from batch to batch.
    """

    def __init__(
        self, network: Network, ctx: ModelRunnerContext, capture: GraphCapture, sizes: tuple[int, ...]
    ) -> None:
        self._network = network
        self._ctx = ctx
        self._capture = capture
        self.sizes = sizes
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._pool: KVPool | None = None
        self._tables: tuple[torch.Tensor, ...] = ()
        self._hidden = Rows()

    def record(self, pool: KVPool, *row_tables: torch.Tensor) -> None:
        """Record all sizes, and keep those for which there is memory. Raises RuntimeError for what cannot be
        recorded.
        """
        self._pool, self._tables = pool, row_tables
        start, before, wanted = time.perf_counter(), self._capture.memory(), self.sizes
        keys = [(size, mixed) for size in reversed(wanted) for mixed in (True, False)]
        record_all(self._graphs, keys, self._recorded)
        self.sizes = tuple(size for size in wanted if {(size, True), (size, False)} <= self._graphs.keys())
        if lost := [size for size in wanted if size not in self.sizes]:
            logger.warning(
                "graphs: no memory for prefills of %s tokens, which run without; lower memory.max_total_tokens, or "
                "name fewer sizes in runner.prefill_graph_sizes",
                ", ".join(map(str, lost)),
            )
        if self.sizes:
            logger.info(
                "graphs: prefills of %s tokens, %.0f MiB, %.1f s",
                ", ".join(map(str, self.sizes)),
                (self._capture.memory() - before) / 2**20,
                time.perf_counter() - start,
            )

    def _recorded(self, key: tuple[int, bool]) -> bool:
        """Record one graph; return whether there was memory for it."""
        try:
            self._graphs[key] = self._record(self._static(*key))
        except torch.OutOfMemoryError:
            return False
        return True

    def _static(self, tokens: int, mixed: bool) -> StaticExtend:
        assert self._pool is not None
        attention = self._ctx.attention
        decodes = min(attention.ctx.max_batch, tokens) if mixed else 0
        return StaticExtend(tokens, min(PROMPTS, tokens // 2), decodes, self._tables, self._pool, attention)

    def _record(self, static: StaticExtend) -> _Graph:
        """Record a graph. It is warmed once: decodes have made before what is made once."""
        ctx, capture = self._ctx, self._capture
        ctx.attention.prepare(static.batch)
        hidden = self._hidden.of(capture.warm(lambda: self._network.forward(static.batch)))
        ctx.attention.prepare(static.batch)
        return _Graph(static, *capture.capture(lambda: hidden.copy_(self._network.forward(static.batch))))

    def hidden(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Replay the graph of a prefill or mixed batch and return the hidden states [tokens, hidden] of its tokens,
        None where there is no graph for it. They stay until the next replay.
        """
        graph = self._find(batch)
        if graph is None:
            return None
        self._ctx.attention.prepare(graph.static.fill(batch))
        graph.replay()
        return graph.hidden[: batch.num_tokens]

    def _find(self, batch: ForwardBatch) -> _Graph | None:
        size = padded(batch.num_tokens, self.sizes)
        if size is None or not self._fits(batch):
            return None
        graphs = (self._graphs[size, mixed] for mixed in (False, True))
        return next((graph for graph in graphs if graph.static.has_room(batch)), None)

    def _fits(self, batch: ForwardBatch) -> bool:
        """Return whether a batch is plain, over the memory that graphs were recorded with."""
        if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED) or batch.extras:
            return False
        further = batch.overlay, batch.tail_lens, batch.taps, batch.watch, batch.additions
        return reads_the_same(batch, self._ctx, self._pool, self._tables) and all(one is None for one in further)
