"""Graphs of decode steps: which steps can be one, what is recorded, and replaying it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from pegboard.core.interfaces.forward import FixableAdditions, ForwardMode
from pegboard.toolkit.graphs import ExtraShapes, StaticBatch, extra_shapes, padded, states_fit

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.graphs import GraphCapture, Replay
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.model_family import Network
    from pegboard.core.interfaces.model_runner import ModelRunnerContext

logger = logging.getLogger(__name__)

KeyT = TypeVar("KeyT", bound=tuple[object, ...])
GraphT = TypeVar("GraphT")

_WARM = 2
"""Runs before one is recorded: the first compiles and makes what is made once, the second is as all others are."""


def why_not(ctx: ModelRunnerContext) -> str | None:
    """Return what keeps decode steps from being graphs, None for nothing."""
    if ctx.capture is None:
        return f"nothing records graphs on {ctx.device}"
    lacking = [name for name in ("attention", "model_family") if "graph" not in ctx.provides.get(name, ())]
    if lacking:
        return f"the chosen {' and '.join(lacking)} cannot be part of one (without the capability graph)"
    return None if ctx.network is None else ctx.network.capture_objection()


class Rows:
    """One tensor of which each graph writes the first rows: with results of their own, all sizes of decode batches up
    to 256 would take 1.1 GiB for a vocabulary of 128k. Made beside the largest graph, which is recorded first.
    """

    def __init__(self) -> None:
        self._all: torch.Tensor | None = None

    def of(self, result: torch.Tensor) -> torch.Tensor:
        """Return where as many rows are kept."""
        if self._all is None:
            self._all = torch.empty_like(result)
        return self._all[: len(result)]


def record_all(graphs: dict[KeyT, GraphT], wanted: Iterable[KeyT], record: Callable[[KeyT], bool]) -> None:
    """Record all that is wanted, the largest first: what it takes is enough for the others. Where memory is short, for
    which `record` returns False, the largest ones are given up.
    """
    for key in wanted:
        while not record(key):
            if not graphs:
                break
            del graphs[max(graphs)]


def reads_the_same(
    batch: ForwardBatch, ctx: ModelRunnerContext, pool: KVPool | None, row_tables: Sequence[torch.Tensor]
) -> bool:
    """Return whether a batch is over the memory that graphs were recorded with, and has one position per token."""
    if batch.kv_pool is not pool or batch.attn_backend is not ctx.attention:
        return False  # what attention reads is watched
    if len(batch.kv_groups) != len(row_tables) or batch.positions.dim() != 1:
        return False
    tables = ((group.row_table, table) for group, table in zip(batch.kv_groups, row_tables, strict=True))
    return all(one.data_ptr() == other.data_ptr() and one.shape == other.shape for one, other in tables)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded step: `logits` [size, vocab] are those of `static` once `replay` has run."""

    static: StaticBatch
    replay: Replay
    logits: torch.Tensor


_Key = tuple[int, ExtraShapes, bool]
"""Of a graph: its size, the extras that it reads, and whether something is added to products."""


class DecodeGraphs:
    """The graphs of a runner: embedding, layers, final norm and the logits of all rows. Processors, masks and sampling
    stay outside.

    `static` of each size belongs to the graph. Those of batches with extras of plugins are recorded when such a batch
    first comes; until then there is nothing that such a graph could read.
    """

    def __init__(self, network: Network, ctx: ModelRunnerContext, capture: GraphCapture) -> None:
        self._network = network
        self.ctx = ctx
        self._capture = capture
        self._sizes: tuple[int, ...] = ()
        self._graphs: dict[_Key, _Graph] = {}
        self._refused: set[_Key] = set()
        self._pool: KVPool | None = None
        self._tables: tuple[torch.Tensor, ...] = ()
        self._states: Mapping[str, torch.Tensor] | None = None
        self._logits = Rows()

    @property
    def sizes(self) -> tuple[int, ...]:
        """What was recorded, in ascending order."""
        return self._sizes

    def record(self, pool: KVPool, *row_tables: torch.Tensor, states: Mapping[str, torch.Tensor] | None = None) -> None:
        """Record all sizes, with the row table of each KV group and the memory of states. Raises RuntimeError for what
        cannot be recorded.
        """
        self._pool, self._tables, self._states = pool, row_tables, states
        wanted = self.ctx.graph_sizes
        keys: list[_Key] = [(size, (), False) for size in reversed(wanted)]
        record_all(self._graphs, keys, self._recorded)
        self._sizes = tuple(sorted(size for size, *_ in self._graphs))
        if lost := [size for size in wanted if size not in self._sizes]:
            logger.warning(
                "graphs: no memory for decode steps of %s requests, which run without; lower "
                "memory.max_total_tokens, or name fewer sizes in runner.graph_sizes",
                ", ".join(map(str, lost)),
            )
        if self._sizes:
            taken = self._capture.memory() / 2**20
            logger.info("graphs: decode steps of %s requests, %.0f MiB", ", ".join(map(str, self._sizes)), taken)

    def _recorded(self, key: _Key, additions: FixableAdditions | None = None) -> bool:
        """Record one graph; return whether there was memory for it."""
        try:
            self._graphs[key] = self._record(key, additions)
        except torch.OutOfMemoryError:
            return False
        return True

    def _record(self, key: _Key, additions: FixableAdditions | None) -> _Graph:
        size, extras, _ = key
        ctx, capture, static = self.ctx, self._capture, self._static(size, extras)
        if additions is not None:
            static.batch.additions = additions.fixed(size, static.batch.extras)

        def run() -> torch.Tensor:
            return self._network.logits(self._network.forward(static.batch))

        for _ in range(_WARM):
            ctx.attention.prepare(static.batch)
            logits = self._logits.of(capture.warm(run))
        ctx.attention.prepare(static.batch)
        return _Graph(static, *capture.capture(lambda: logits.copy_(run())))

    def _static(self, size: int, extras: ExtraShapes) -> StaticBatch:
        assert self._pool is not None
        return StaticBatch(size, self._tables, self._pool, self.ctx.attention, extras, self._states)

    def logits(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Replay the graph of a decode step and return the logits [batch, vocab] of its requests, None where there is
        no graph for it. They stay until the next replay, and may be changed.
        """
        graph = self._find(batch)
        if graph is None:
            return None
        self.ctx.attention.prepare(graph.static.fill(batch))
        graph.replay()
        return graph.logits[: batch.batch_size]

    def _find(self, batch: ForwardBatch) -> _Graph | None:
        size = padded(batch.batch_size, self._sizes)
        if size is None or not self._fits(batch):
            return None
        shapes = extra_shapes(batch) if batch.extras else ()
        additions = batch.additions
        if shapes is None or (key := (size, shapes, additions is not None)) in self._refused:
            return None
        assert additions is None or isinstance(additions, FixableAdditions)
        graph = self._graphs.get(key)
        if graph is None and self._recorded_late(key, additions):
            graph = self._graphs[key]
        return graph

    def _recorded_late(self, key: _Key, additions: FixableAdditions | None) -> bool:
        """Record a graph between two steps. What cannot be recorded now runs without from here on."""
        size, extras, _ = key
        try:
            done = self._recorded(key, additions)
            why = "no memory is left"
        except RuntimeError as error:
            done, why = False, str(error)
        if not done:
            names = ", ".join([*(name for name, _, _ in extras), *(["additions"] if additions is not None else [])])
            logger.warning("graphs: decode steps of %d requests with %s run without: %s", size, names, why)
            self._refused.add(key)
        return done

    def _fits(self, batch: ForwardBatch) -> bool:
        """Return whether a batch is a plain decode over the memory that graphs were recorded with."""
        if batch.forward_mode is not ForwardMode.DECODE or batch.num_tokens != batch.batch_size:
            return False
        fixable = batch.additions is None or isinstance(batch.additions, FixableAdditions)
        same = reads_the_same(batch, self.ctx, self._pool, self._tables) and states_fit(batch.states, self._states)
        return fixable and same and all(one is None for one in _further(batch))


def _further(batch: ForwardBatch) -> Iterator[object]:
    """Yield what only some batches have, and graphs do not."""
    yield from (batch.logits_indices, batch.hidden_rows, batch.logprob_rows, batch.overlay)
    yield from (batch.tail_lens, batch.taps, batch.watch)
