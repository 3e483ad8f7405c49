"""Contract: proposing tokens that the model then verifies. What plugins with a speculator import of this one."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.options import OptionsT

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.attention import AttentionBackend
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec, ModelSpec
    from pegboard.core.interfaces.model_family import ModelContext
    from pegboard.core.interfaces.model_runner import ModelEnds
    from pegboard.core.interfaces.sampling import SamplingBatch, SamplingParams
    from pegboard.core.interfaces.trees import Accepted, TokenTrees


@dataclass(frozen=True, slots=True)
class SpeculatorContext:
    """The model, and the most nodes that a tree may have, its root included (2 to MAX_NODES).

    `model` and `max_rows` are for those that draft on its device: request rows have the numbers 0 to `max_rows`.
    """

    spec: ModelSpec
    max_nodes: int
    model: ModelContext | None = None
    max_rows: int = 0


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What a speculator may know of a request.

    `tokens` int64 [n] are prompt and output, a view that may be read, not kept; the last one is the newest, which is
    known and not computed. The first `input_len` are the prompt's, in which numbers beyond the vocabulary stand for
    keyed tokens. Nothing that is learnt from one `namespace` may show in the drafts of another one: how fast an answer
    comes would tell what others have written. A tree may have `most` nodes, its root included. `memo` stays with the
    request to its end, for the speculator to keep things in, under itself as the key.
    """

    tokens: NDArray[np.int64]
    input_len: int
    namespace: str
    most: int
    memo: dict[object, Any]


@dataclass(frozen=True, slots=True)
class Stands:
    """What stands of a pass once its drafts are verified, for the requests of its batch. Arrays are on the host,
    tensors on the device.

    Request r has the row `rows[r]`, as in `DraftBatch`. Of it the positions from `starts[r]` on, `counts[r]` of them,
    are computed and stay (all int64 [batch]); `tokens` int64 [sum of counts] are their places in the batch, request
    after request. Their KV is in the slots that the row table has for these positions. `fresh` bool [batch] says that
    this is the first pass in which the request has its row: what an earlier one left there is another request's. With
    `Speculator.lookback` the first token of a fresh request that stands behind a cached prefix is that prefix's last
    one, computed once more; its KV, that of further layers included, is in its slot and need not be written. Behind a
    prefix that ends in a keyed token there is none, and nothing tells the two apart.

    `sampled` int64 [n] are the requests that a token was sampled for, `newest` int64 [n] these tokens. `room` bool [n]
    says which of them have a slot already, in the row table behind what stands; its KV is written again when the
    token itself is computed.
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    tokens: torch.Tensor
    fresh: NDArray[np.bool_]
    sampled: NDArray[np.int64]
    newest: torch.Tensor
    room: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The requests to be drafted for on the device. Arrays int64 [n] are on the host: `rows` in the row table,
    `seq_lens` (tokens known, the newest included), `newest` tokens, and the `most` nodes that a tree may have.

    `row_table` int32 [rows, positions] has slots for the newest token of each and for `Speculator.reserve` tokens
    behind it. What is written there may be written over by any later pass.
    """

    rows: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    newest: NDArray[np.int64]
    most: NDArray[np.int64]
    row_table: torch.Tensor
    kv_pool: KVPool


class Speculator(abc.ABC, Generic[OptionsT]):
    """Proposes what running requests may go on with. The model scores all of it in one pass, and what it would have
    produced itself is kept: a draft changes how many passes an answer takes, never its tokens. The capability `judges`
    is the one exception.

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
    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        """Return a tree for each of `rows`, whose root is the row's newest token; chains alone without the capability
        `branches`. A tree depends on what the request, and those before it, have said, not on the other rows; the same
        rows get the same trees when they are asked for again.
        """

    def learn(self, rows: Sequence[DraftRow], offered: NDArray[np.int64], gained: NDArray[np.int64]) -> None:
        """Take note of how drafts did: of `offered` int64 [rows] nodes, roots included, so many tokens were `gained`
        int64 [rows]. The rows have the gained tokens, as far as the requests went on by them.
        """
        return

    def accept(
        self, trees: TokenTrees, logits: torch.Tensor, sampling: SamplingBatch, rows: NDArray[np.int64]
    ) -> Accepted:
        """Decide which drafts stand, in place of the walk over what the sampler draws at each node. Raises Unsupported
        without the capability `judges`.

        Tokens then differ from those without speculation: a seed gives others, and they depend on what was drafted
        when. With rejection sampling they follow the same distribution; with thresholds below 1 they do not. Nothing
        may be gained that `logits` rule out (minus infinity), and a greedy request has to get the tokens that it gets
        anyway: at each node the first maximum.

        `logits` float32 [nodes, vocab] are the processed ones, grammars' masks included, on the model's device; they
        stay as they are. `sampling` has a row per node: its request's parameters and seed, and its own step. An answer
        depends on these and on the own tree alone, not on the other requests, and is the same when it is asked for
        again: coins come from seeds and steps (`toolkit.speculation.judging.toss`). It runs where the model runs, under
        inference mode and never beside another call. What it raises, and answers that are ill-formed, cost a step its
        judgement: the tokens are those that were drawn.

        `trees` are those of the last `propose` or `draft`, of all requests or, when a batch that failed is run again in
        parts, of some. A request without drafts has its root alone; its token is the one that was drawn, whatever is
        said here. Nodes may have been cut, with all below them, for want of memory, because they do not pay, or by a
        grammar; those that are left keep their order. `rows` int64 [requests] are the requests' rows, as in
        `DraftBatch`. What `draft` has kept of a node, such as the probabilities that it was drawn from, is found by the
        row and the tokens on the node's path, since siblings are distinct; in a chain by the row and the depth.

        Where drafts were drawn at random, `concerns` has to decline requests with grammars: whether a grammar cuts a
        draft depends on which token was drawn, and what is drawn in its place would follow another distribution.
        """
        raise Unsupported(f"the speculator {type(self).__name__}", "judges")


class DeviceSpeculator(Speculator[OptionsT]):
    """Drafts on the model's device, from states of the model itself (capability `device`). Its facts are known once it
    is built, from configs alone, and do not change.

    `observe`, `draft` and `load` run where the model runs, in launch order and under inference mode. What `observe`
    and `draft` raise costs drafts, as anywhere; what `load` raises stops the start. What they are given is not kept:
    its memory is used again.
    """

    layers: tuple[LayerSpec, ...] = ()
    """Further layers of the KV pool, in its first KV group, with ids behind the model's. Their memory starts as zeros.
    Their KV of a token has to depend on the tokens up to it alone: it stays with cached prefixes.
    """
    taps: tuple[int, ...] = ()
    """Which states of the model it reads, see `Taps`."""
    reserve: int = 0
    """Slots behind the newest token that drafting writes to."""
    lookback: int = 0
    """1: behind a cached prefix it needs the states of the prefix's last token; 0: it does not."""

    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        """Not asked: `draft` is."""
        raise NotImplementedError("this speculator drafts on the device")

    @abc.abstractmethod
    def load(self, ends: ModelEnds, attention: AttentionBackend) -> None:
        """Read the weights, once, after the model's and before memory is sized. `ends` are the model's; `attention` is
        what attends over further layers. Raises ModelError naming file, tensor and shapes for those that do not fit.
        """

    def numerics(self) -> str:
        """Name what the KV of its further layers depends on beside the model, once it is loaded; see
        `ModelRunner.numerics`.
        """
        return ""

    @abc.abstractmethod
    def observe(self, batch: ForwardBatch, taps: torch.Tensor, stands: Stands) -> None:
        """Take note of a pass of the model, `taps` [tokens, states x hidden] being those asked for, side by side.
        Called after every pass, with drafts or without, before anything else runs.
        """

    @abc.abstractmethod
    def draft(self, batch: DraftBatch) -> TokenTrees:
        """Return a tree for each request of `batch`, as `propose` does; of one node where nothing is known of a
        request.
        """
