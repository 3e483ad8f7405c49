"""Contract: proposing tokens that the model then verifies."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from pegboard.core.interfaces.options import OptionsT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.layers import ModelSpec
    from pegboard.core.interfaces.sampling import SamplingParams

MAX_NODES = 64
"""Most nodes of a draft tree: the bits of an int64 say which of them a node follows."""


@dataclass(frozen=True, slots=True)
class SpeculatorContext:
    """The model, and the most nodes that a tree may have, its root included (2 to MAX_NODES)."""

    spec: ModelSpec
    max_nodes: int


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What a speculator may know of a request.

    `tokens` int64 [n] are prompt and output, a view that may be read, not kept; the last one is the newest, which is
    known and not computed. The first `input_len` are the prompt's, in which numbers beyond the vocabulary stand for
    media. Nothing that is learnt from one `namespace` may show in the drafts of another one: how fast an answer comes
    would tell what others have written. A tree may have `most` nodes, its root included. `memo` stays with the request
    to its end, for the speculator to keep things in, under itself as the key.
    """

    tokens: NDArray[np.int64]
    input_len: int
    namespace: str
    most: int
    memo: dict[object, Any]


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """Drafts of several requests, packed: `counts` int64 [requests] says how many nodes each has, `tokens` and
    `parents` are int64 [nodes].

    A tree's first node is its root, the request's newest token. `parents` are indices within the own tree, -1 for the
    root; a parent comes before its children, and siblings have distinct tokens. A tree without branches is a chain, in
    which each node follows the one before. A count of 1 is a request without drafts.
    """

    counts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.counts.shape[0])


@dataclass(frozen=True, slots=True)
class Accepted:
    """What stands of a verified batch, packed request after request: `counts` int64 [requests] tokens that each has
    gained, 1 at least; `nodes` int64 [gained] the packed nodes whose logits gave them; `tokens` int64 [gained].

    The nodes of a request are a path from its root. Each token but the last is that of the next node on it.
    """

    counts: NDArray[np.int64]
    nodes: NDArray[np.int64]
    tokens: NDArray[np.int64]


class Speculator(abc.ABC, Generic[OptionsT]):
    """Proposes what running requests may go on with. The model scores all of it in one pass, and what it would have
    produced itself is kept: a draft changes how many passes an answer takes, never its tokens.

    It cannot fail a request. What it raises, ill-formed trees and answers that take long cost the drafts of one step;
    after several failures in a row it is not asked any more. All calls come from the scheduler's loop, so they hold
    back every request: work per call should be bounded, whatever a request's length.
    """

    max_nodes: int
    """Most nodes of its trees, roots included, and at most `ctx.max_nodes`. 1: it never drafts."""

    def __init__(self, options: OptionsT, ctx: SpeculatorContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: SpeculatorContext) -> str | None:
        """Return None, or the reason why it cannot draft for this model."""
        return None

    def concerns(self, params: SamplingParams) -> bool:
        """Return whether a request with these parameters is to be drafted for. Asked once per request."""
        return True

    @abc.abstractmethod
    def propose(self, rows: Sequence[DraftRow]) -> DraftTrees:
        """Return a tree for each of `rows`, whose root is the row's newest token; chains alone without the capability
        `branches`. A tree depends on what the request, and those before it, have said, not on the other rows; the same
        rows get the same trees when they are asked for again.
        """

    def learn(self, rows: Sequence[DraftRow], offered: NDArray[np.int64], gained: NDArray[np.int64]) -> None:
        """Take note of how drafts did: of `offered` int64 [rows] nodes, roots included, so many tokens were `gained`
        int64 [rows]. The rows have the gained tokens, as far as the requests went on by them.
        """
        return
