"""Ahead: tokens ahead of requests, the room that there is for them, and how they get into a step's batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.batch import SamplingInfo, TokenMask
from pegboard.core.pipeline.sampling_info import mask_of
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch import ModelWorkerBatch
    from pegboard.core.interfaces.constraint import NodeMasks
    from pegboard.core.interfaces.executor import Executor
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.trees import TokenTrees
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.core.pipeline.running import RunningBatch


@dataclass(frozen=True, slots=True)
class Ahead:
    """The trees of some requests. `masks` has for each of them what its constraint allows at each node; None where it
    has no constraint, or no tokens ahead.
    """

    trees: TokenTrees
    masks: tuple[NodeMasks | None, ...]

    def after(self, roots: Sequence[int]) -> Ahead:
        """Return these trees after requests without any, whose newest tokens are `roots`."""
        first = tree.chains((root, ()) for root in roots)
        return Ahead(tree.join((first, self.trees)), (*(None for _ in roots), *self.masks))

    def select(self, requests: NDArray[np.int64]) -> Ahead | None:
        """Return the trees of some of the requests, by their indices; None where none of them has tokens ahead."""
        trees = tree.take_part(self.trees, requests)
        if not (trees.counts > 1).any():
            return None
        return Ahead(trees, tuple(self.masks[index] for index in requests.tolist()))


@dataclass(frozen=True, slots=True)
class Room:
    """The AheadRoom of the requests at `places` of a `batch`, whose `flags` are these."""

    batch: RunningBatch
    memory: MemoryManager
    executor: Executor
    places: NDArray[np.int64]
    most: NDArray[np.int64]
    reqs: Sequence[Req]
    rows: NDArray[np.int64]
    known_lens: NDArray[np.int64]
    newest: NDArray[np.int64]
    flags: NDArray[np.int64]

    @property
    def running(self) -> int:
        return len(self.batch)

    def of(self, flag: int) -> Room:
        """Return it for a stage that takes part in the requests with this flag."""
        return replace(self, most=np.where(self.flags & flag != 0, self.most, 1))

    def wish(self, index: int, tokens: int) -> int:
        place = int(self.places[index])
        if self.batch.allocated[place] >= tokens or tokens > self.memory.rows.width:
            return int(self.batch.allocated[place])
        return self.memory.wish(self.batch, place, tokens)

    def ask(self, stage: str, payload: object) -> object:
        table = self.memory.rows.take_changes()
        try:
            return self.executor.ask(stage, payload, table)
        except Exception:
            # The step runs all the same, and may have pages whose places the worker has not got.
            self.memory.rows.send_again(table)
            raise


def pack(
    work: ModelWorkerBatch, ahead: Ahead, sampled: Sequence[Req], places: NDArray[np.int64], vocab_size: int
) -> None:
    """Put the tokens ahead of the requests `sampled` into a batch that has room for them at its end of each; `places`
    int64 [sampled] are their indices in the batch. Sampling has one row per node then.
    """
    trees = ahead.trees
    counts, own = trees.counts, tree.places(trees.counts)
    ends = np.cumsum(work.extend_lens)[places]
    rows = np.repeat(ends - counts, counts) + own
    work.trees, work.logits_indices = trees, rows
    work.input_ids[rows] = trees.tokens
    depths = tree.depths(trees)
    if not tree.is_chain(trees):
        work.positions[..., rows] += depths - own
        work.tail_lens = np.zeros(work.rows.shape[0], np.int64)
        work.tail_lens[places] = np.where(counts > 1, counts, 0)
        work.tail_bits = np.zeros(work.input_ids.shape[0], np.int64)
        work.tail_bits[rows] = tree.tail_bits(trees)
    if work.sampling is not None:
        work.sampling = _per_node(work.sampling, ahead, sampled, depths, vocab_size)


def _per_node(
    info: SamplingInfo, ahead: Ahead, reqs: Sequence[Req], depths: NDArray[np.int64], vocab_size: int
) -> SamplingInfo:
    """Return what is sampled at each node, from what is at each request."""
    trees = ahead.trees
    owner = np.repeat(np.arange(len(trees)), trees.counts)
    owners = owner.tolist()
    rows = info.rows
    if rows:
        chain = tree.is_chain(trees)
        ways = (
            trees.tokens[node - depth + 1 : node + 1] if chain else trees.tokens[tree.path(trees, node)[1:]]
            for node, depth in enumerate(depths.tolist())
        )
        rows = tuple(replace(rows[one], ahead_ids=ids) for one, ids in zip(owners, ways, strict=True))
    return SamplingInfo(
        version=info.version,
        numbers=info.numbers.take(owner),  # an index would copy records field by field
        steps=info.steps[owner] + depths,
        logprobs=tuple(info.logprobs[one] for one in owners) if info.logprobs else (),
        rows=rows,
        mask=_mask(ahead, reqs, vocab_size),  # one that is free at the root may bind after it
    )


def _mask(ahead: Ahead, reqs: Sequence[Req], vocab_size: int) -> TokenMask | None:
    """Return what the constraints allow at each node; None where all nodes may have any token."""
    places: list[int] = []
    bits: list[NDArray[np.int32]] = []
    for req, masks, start in zip(reqs, ahead.masks, tree.starts(ahead.trees.counts).tolist(), strict=True):
        if masks is not None:
            bound = np.flatnonzero(~masks.free)
            places += (start + bound).tolist()
            bits += list(masks.bits[bound])
        elif (row := mask_of(req, vocab_size)) is not None:
            places.append(start)
            bits.append(row)
    return TokenMask(np.array(places, np.int64), np.stack(bits)) if places else None
