"""Drafts: the trees of one step, and how they get into its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.batch import SamplingInfo, TokenMask
from pegboard.core.pipeline.grammar.state import state_of
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch import ModelWorkerBatch
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.trees import TokenTrees
    from pegboard.core.pipeline.grammar.drafts import NodeMasks


@dataclass(frozen=True, slots=True)
class Drafts:
    """The trees of some requests. `masks` has for each of them what its grammar allows at each node; None where it has
    no grammar, or no drafts.
    """

    trees: TokenTrees
    masks: tuple[NodeMasks | None, ...]

    def behind(self, roots: Sequence[int]) -> Drafts:
        """Return these drafts behind requests without any, whose newest tokens are `roots`."""
        first = tree.chains((root, ()) for root in roots)
        return Drafts(tree.join((first, self.trees)), (*(None for _ in roots), *self.masks))

    def part(self, requests: NDArray[np.int64]) -> Drafts | None:
        """Return the drafts of some of the requests, by their indices; None where none of them has any."""
        trees = tree.take_part(self.trees, requests)
        if not (trees.counts > 1).any():
            return None
        return Drafts(trees, tuple(self.masks[one] for one in requests.tolist()))


def pack(work: ModelWorkerBatch, drafts: Drafts, sampled: Sequence[Req], places: NDArray[np.int64]) -> None:
    """Put the drafts of the requests `sampled` into a batch that has room for them at its end of each; `places` int64
    [sampled] are their indices in the batch. Sampling has one row per node then.
    """
    trees = drafts.trees
    counts, own = trees.counts, tree.places(trees.counts)
    ends = np.cumsum(work.extend_lens)[places]
    rows = np.repeat(ends - counts, counts) + own
    work.trees, work.sample_rows = trees, rows
    work.input_ids[rows] = trees.tokens
    depths = tree.depths(trees)
    if not tree.is_chain(trees):
        work.positions[..., rows] += depths - own
        work.tail_lens = np.zeros(work.rows.shape[0], np.int64)
        work.tail_lens[places] = np.where(counts > 1, counts, 0)
        work.tail_bits = np.zeros(work.input_ids.shape[0], np.int64)
        work.tail_bits[rows] = tree.tail_bits(trees)
    if work.sampling is not None:
        work.sampling = _per_node(work.sampling, drafts, sampled, depths)


def _per_node(info: SamplingInfo, drafts: Drafts, reqs: Sequence[Req], depths: NDArray[np.int64]) -> SamplingInfo:
    """Return what is sampled at each node, from what is at each request."""
    trees = drafts.trees
    owner = np.repeat(np.arange(len(trees)), trees.counts)
    owners = owner.tolist()
    rows = info.rows
    if rows:
        chain = tree.is_chain(trees)
        drafted = (
            trees.tokens[node - depth + 1 : node + 1] if chain else trees.tokens[tree.path(trees, node)[1:]]
            for node, depth in enumerate(depths.tolist())
        )
        rows = tuple(replace(rows[one], draft_ids=ids) for one, ids in zip(owners, drafted, strict=True))
    return SamplingInfo(
        version=info.version,
        numbers=info.numbers.take(owner),  # an index would copy records field by field
        steps=info.steps[owner] + depths,
        logprobs=tuple(info.logprobs[one] for one in owners) if info.logprobs else (),
        rows=rows,
        mask=_mask(drafts, reqs),  # a grammar that is free at the root may bind behind it
    )


def _mask(drafts: Drafts, reqs: Sequence[Req]) -> TokenMask | None:
    """Return what the grammars allow at each node; None where all nodes may have any token."""
    places: list[int] = []
    bits: list[NDArray[np.int32]] = []
    for req, masks, start in zip(reqs, drafts.masks, tree.starts(drafts.trees.counts).tolist(), strict=True):
        if masks is not None:
            bound = np.flatnonzero(~masks.free)
            places += (start + bound).tolist()
            bits += list(masks.bits[bound])
        elif (state := state_of(req)) is not None and not state.free:
            places.append(start)
            bits.append(state.row)
    return TokenMask(np.array(places, np.int64), np.stack(bits)) if places else None
