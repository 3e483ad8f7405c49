"""Decides by probabilities and random numbers which drafts are accepted.

`tree.walk` over what the sampler draws at every node is the ordinary way: it needs none of this, and keeps a request's
tokens what they are without drafts. Thresholds, as in SGLang, accept more and change the distribution. They do not keep
the tokens that a seed gives.

Trees come on the host, everything else on any device. One small copy per call goes to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.core.interfaces.trees import Accepted, TokenTrees
from pegboard.toolkit.sampling.filters import Filters
from pegboard.toolkit.sampling.noise import keys, uniforms
from pegboard.toolkit.sampling.tree import Int64s, places, starts, walk

_LEAST = 1e-9
"""What a threshold of 0 counts as, where it divides."""
_TILE = 2**20
"""Numbers in float64 that are worked on at once, so that a large batch does not take gigabytes."""


def accept_by_thresholds(
    trees: TokenTrees,
    probs: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    single: float,
    acc: float,
) -> Accepted:
    """Accept drafts that the model's probabilities `probs` float32 [nodes, vocab] are high enough for: target-only tree
    sampling.

    From the root down, the children of a node are tried in order, all with the node's one coin. A child stands if the
    coin is at most the probability of the children tried so far, itself included, divided by `acc`; or if its own
    probability is `single` or more. Where no child stands, the last token is drawn by the request's final coin from the
    node's probabilities without those of its children, which were all tried; below a node without children, from all.
    Where nothing but rounding has kept the children from standing, and nothing is left, it is drawn from all as well.

    With both thresholds at 1 the tokens follow `probs`: a child stands with exactly its probability. Lower thresholds,
    from 0, accept more and favour the drafts. A draft of probability 0 never stands, so a grammar and greedy requests
    keep what they are promised.

    `coins` float32 or float64 [nodes] and `final_coins` [requests] are uniform in (0, 1), see `toss`. Sums are float64,
    in the order of the children. Raises ValueError for a threshold outside [0, 1].

    Source: SGLang's kernel `tree_speculative_sampling_target_only` (csrc/speculative/speculative_sampling.cuh; its
    options are speculative_accept_threshold_single and speculative_accept_threshold_acc). It lets a draft of
    probability 0 stand where `single` is 0, and takes the vocabulary's last token where nothing is left.
    """
    for name, value in (("single", single), ("acc", acc)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"threshold {name} must be from 0 to 1, got {value}")
    drafts = _Drafts.of(trees)
    share = _pick(probs, drafts.above, drafts.tokens)
    likely = _host(coins)[drafts.above] <= _sums(drafts.above, share) / max(acc, _LEAST)
    accepted, last = _descend(trees, drafts, (share > 0.0) & (likely | (share >= single)))
    left = probs[_index(last, probs)].to(torch.float64)
    tried = drafts.below(last)
    left[_index(drafts.owners[tried], left), _index(drafts.tokens[tried], left)] = 0.0
    return _finish(accepted, left, probs, last, final_coins)


def toss(trees: TokenTrees, seeds: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return coins float64 [nodes] and final coins float64 [requests] in (0, 1), from each node's seed and step int64
    [nodes] alone, as in the nodes' SamplingBatch.

    Nodes of one depth have the same coin; a path meets only one of them. A final coin is the root's, from a key of its
    own, so it has nothing to do with any coin of the path.
    """
    roots = _index(starts(trees.counts), seeds)
    own = keys(seeds[roots], steps[roots])
    return uniforms(seeds, steps), uniforms(own, torch.zeros_like(own))


def probabilities(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return float32 [n, vocab]: how likely a sampler draws each token of `logits` float32 [n, vocab], which stay.

    The filters and their order are those of `Sampler`; of equal logits at a cut the smaller ids stay. Greedy rows have
    1 at the first maximum. Raises ValueError, naming the row, for one with NaN or without a finite logit.
    """
    found = torch.empty_like(logits)
    step = max(1, _TILE // logits.shape[1])
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        bad = logits[part].isnan().any(-1) | ~logits[part].isfinite().any(-1)
        if bool(bad.any()):
            row = start + int(bad.nonzero()[0])
            raise ValueError(f"row {row} has no probabilities: its logits hold NaN, or nothing finite")
        found[part] = _probabilities(logits[part].clamp(max=torch.finfo(logits.dtype).max), batch, part)
    return found


def _probabilities(logits: torch.Tensor, batch: SamplingBatch, part: slice) -> torch.Tensor:
    """Return float64 [m, vocab] of the rows `part` of a batch, from their logits [m, vocab]."""
    greedy = (batch.temperatures[part] == 0.0)[:, None]
    temperatures = batch.temperatures[part, None].to(torch.float64).masked_fill_(greedy, 1.0)
    wide = logits.to(torch.float64)
    mass = (wide - wide.amax(-1, keepdim=True)).div_(temperatures).exp_()
    filters = Filters.of(batch, part, logits.shape[1])
    if batch.need_top_k or batch.need_top_p:
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        head = mass.gather(1, order)
        mass = torch.zeros_like(mass).scatter_(1, order, head.masked_fill_(~filters.kept(head), 0.0))
    else:
        mass.masked_fill_(mass < filters.least[:, None], 0.0)
    mass /= mass.sum(-1, keepdim=True)
    first = torch.zeros_like(mass).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy, first, mass)


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The nodes that are no roots, in order, int64 [drafts] each: the packed nodes `above` them, their `tokens`, and
    their `owners`, the requests.
    """

    above: Int64s
    tokens: Int64s
    owners: Int64s

    @classmethod
    def of(cls, trees: TokenTrees) -> _Drafts:
        """Take them from trees."""
        nodes = np.flatnonzero(trees.parents >= 0)
        owners = np.repeat(np.arange(len(trees)), trees.counts)[nodes]
        return cls(starts(trees.counts)[owners] + trees.parents[nodes], trees.tokens[nodes], owners)

    def below(self, nodes: Int64s) -> Int64s:
        """Return which of them are children of these packed nodes."""
        return np.flatnonzero(np.isin(self.above, nodes))


def _sums(above: Int64s, share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return float64 [drafts]: the shares of a draft and of its siblings before it, added up in order."""
    _, group, sizes = np.unique(above, return_inverse=True, return_counts=True)
    order = np.argsort(group, kind="stable")
    at = group[order], places(sizes)
    table = np.zeros((len(sizes), int(sizes.max(initial=0))))
    table[at] = share[order]
    found = np.empty_like(share)
    found[order] = table.cumsum(1)[at]
    return found


def _descend(trees: TokenTrees, drafts: _Drafts, stands: NDArray[np.bool_]) -> tuple[Accepted, Int64s]:
    """Go down each tree by the first child that stands, `stands` bool [drafts]. Return what is accepted, with -1 for
    the last token of each request, and the packed nodes int64 [requests] whose children do not stand.
    """
    drawn = np.full(len(trees.tokens), -1, np.int64)
    # Backwards, since of several values for one place the last one stays.
    drawn[drafts.above[stands][::-1]] = drafts.tokens[stands][::-1]
    accepted = walk(trees, drawn)
    return accepted, accepted.nodes[np.cumsum(accepted.counts) - 1]


def _finish(
    accepted: Accepted, left: torch.Tensor, probs: torch.Tensor, last: Int64s, final_coins: torch.Tensor
) -> Accepted:
    """Draw the last token of each request from what is `left` float64 [requests, vocab], by its final coin; from the
    last node's `probs` where nothing is.
    """
    some = left.sum(-1, keepdim=True) > 0.0
    weights = torch.where(some, left, probs[_index(last, probs)].to(left))
    cumulated = weights.cumsum(-1)
    shares = final_coins.to(cumulated)[:, None] * cumulated[:, -1:]
    beyond = (cumulated > shares) & (weights > 0.0)
    # A coin that was rounded to 1 is beyond all of them.
    tokens = torch.where(beyond.any(-1), beyond.to(torch.int8).argmax(-1), weights.argmax(-1))
    accepted.tokens[np.cumsum(accepted.counts) - 1] = tokens.cpu().numpy()
    return accepted


def _pick(table: torch.Tensor, rows: Int64s, columns: Int64s) -> NDArray[np.float64]:
    """Return the entries float64 [n] of a table at these rows and columns, on the host."""
    return _host(table[_index(rows, table), _index(columns, table)])


def _index(places: Int64s, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(places).to(like.device)


def _host(values: torch.Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = values.to("cpu", torch.float64).numpy()
    return found
