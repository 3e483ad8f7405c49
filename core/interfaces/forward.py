"""What goes into a forward pass and what comes out."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.core.interfaces.sampling import LogprobRequest
    from pegboard.core.interfaces.trees import Accepted


class ForwardMode(enum.Enum):
    """What a batch computes."""

    EXTEND = "extend"
    """Several new tokens per request behind what is cached or computed: of prompts, or of outputs known at once."""
    DECODE = "decode"
    """One new token per request."""
    MIXED = "mixed"
    """Extend and decode requests in one batch; a decode is an extend of one token."""
    IDLE = "idle"
    """No tokens; runs only so that collectives of several ranks match."""
    TARGET_VERIFY = "target_verify"
    """The newest tokens of requests, and tokens ahead of them."""
    PREBUILT = "prebuilt"
    """Never launched: the prompt's KV has come from elsewhere, and nothing is left to prefill."""
    SPLIT_PREFILL = "split_prefill"
    """A prefill that runs some of the layers at a time."""

    @property
    def is_extend(self) -> bool:
        """Whether requests bring a varying number of new tokens (`ForwardBatch.extend_*` are set)."""
        return self in _EXTEND_LIKE

    @property
    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


_EXTEND_LIKE = frozenset(
    {
        ForwardMode.EXTEND,
        ForwardMode.MIXED,
        ForwardMode.TARGET_VERIFY,
        ForwardMode.SPLIT_PREFILL,
    }
)


@dataclass(slots=True)
class KVGroupView:
    """One KV group of a batch: `row_table` int32 [rows, max_context] maps (request row, position) to slot, on the
    device; `out_cache_loc` int64 [tokens] is where this batch's new K and V go.
    """

    row_table: torch.Tensor
    out_cache_loc: torch.Tensor


class Attention(Protocol):
    """What a network calls in each layer; see `AttentionBackend.forward` for the shapes."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write k and v at the batch's slots, then attend."""


@dataclass(frozen=True, slots=True)
class EmbedOverlay:
    """States that take the place of token embeddings: `states` [m, hidden] at the packed tokens `rows` int64 [m], in
    ascending order. `deep[k]` [m, hidden] is added to the output of layer k at the same rows. In the model's dtype.
    """

    rows: torch.Tensor
    states: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()


class Taps:
    """States of a pass that are read outside the model, from `places` in the order in which they are wanted. Place i is
    the input of layer i, the residual included; the number of layers stands for the output of the last one, and one
    more for the state after the final norm.
    """

    def __init__(self, places: tuple[int, ...]) -> None:
        self.places = places
        self._found: dict[int, torch.Tensor] = {}

    def note(self, place: int, states: torch.Tensor) -> None:
        """Take the states [tokens, hidden] at a place, if they are wanted. They must not change any more."""
        if place in self.places:
            self._found[place] = states

    def joined(self, places: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return states [tokens, places x hidden], side by side, in the model's dtype. Raises KeyError for a place not
        noted.
        """
        import torch

        found = [self._found[place] for place in (self.places if places is None else places)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


class LayerWatch(Protocol):
    """Learns how far a pass is, and holds it back until a layer's older KV is there. One thread calls it, layer after
    layer. The worker puts one into a batch some of whose KV is still being loaded.

    `flags` int32 [layers, by their order in the KV pool] is for a runner that computes all layers in one call: 0 while
    the layer's KV is not there, 1 once it is, -1 where it is lost.
    """

    @property
    def flags(self) -> NDArray[np.int32]: ...

    def before(self, layer_id: int) -> None:
        """Return once what is launched next may read the layer's older KV. Raises StepLost where it is lost."""

    def before_all(self) -> None:
        """Return once the older KV of all layers may be read. Raises StepLost."""


class Additions(Protocol):
    """What is added to the products of linear layers in one batch."""

    def add(self, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to `out` [tokens, rows], in place, what `x` [tokens, cols] brings at a site, by its number. Both have a
        row for each token of the batch.
        """


@runtime_checkable
class FixableAdditions(Additions, Protocol):
    """Additions that may be part of graphs."""

    def fixed(self, size: int, extras: Mapping[str, torch.Tensor]) -> Additions:
        """Return the same for decode batches of a `fixed` size, whose `extras`, which stay in place, say what is added.
        What it asks of the device depends on the size alone.
        """


@dataclass(frozen=True, slots=True)
class StateRound:
    """Runs of packed tokens that can be computed together, one per request at most: run i has the `lengths[i]` tokens
    from `firsts[i]` on (int64 [runs], on the host). What its layers keep of the tokens before is at slot `sources[i]`,
    and what they keep of these as well goes to slot `targets[i]` (int64 [runs]). Where `fresh[i]` (bool [runs]) no
    token comes before: the state is zeros, and the source's contents mean nothing and may be NaN. `fresh` None: tokens
    come before all runs, as in a decode.
    """

    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sources: torch.Tensor
    targets: torch.Tensor
    fresh: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class BatchStates:
    """The states of a batch (`ModelSpec.states`): `memory` has a tensor [slots, *shape] for each, by its name. Slot 0
    belongs to no request.

    Rounds are computed in order: a run may read what an earlier round has written. Together they are all tokens of the
    batch. Slots are written to once in a batch, and not where a state from before the batch is read: so a pass that
    failed can be run again. Several runs may read one slot. Padding of a `fixed` batch reads and writes slot 0.
    """

    rounds: tuple[StateRound, ...]
    memory: Mapping[str, torch.Tensor]


@dataclass(slots=True)
class ForwardBatch:
    """What the model and the attention backend read. Tensors are on the model's device; `*_cpu` are numpy on the host.

    Tokens of all requests are packed, request after request: `input_ids` int64 [tokens]; `positions` int64 [tokens], or
    [axes, tokens] in a batch that computes a prompt with TokenPositions: of M-RoPE time, height, width.
    `req_pool_indices` int64 [batch] are rows of the row table. `seq_lens` int64 [batch] count a request's KV with this
    batch's tokens included. In extend-like modes `extend_lens` (new tokens), `extend_prefix_lens` (KV before them) and
    `extend_start_loc` (first packed token), all int64 [batch], are set; in decode they are None (1, seq_lens - 1 and
    arange). `logits_indices` int64 [sampled] are the packed tokens whose logits are wanted; None means every token, as
    in decode. `attn_metadata` belongs to the attention backend, which sets it in `prepare`. `overlay` has the states
    that take the place of token embeddings (capability `overlay`).

    `logprob_rows` int64 [p] are packed tokens of prompts whose successors' logprobs are wanted; `logprob_targets` int64
    [p] are those successors, and `logprob_requests` says for each what else (capability `input_logprobs`).
    `hidden_rows` int64 [h] are packed tokens whose last hidden states are wanted (capability `hidden_states`).

    `tail_lens` int64 [batch] (`tail_lens_cpu` on the host) and `tail_bits` int64 [tokens] are set where tokens do not
    see all earlier ones, as in trees (capability `tree_mask`). The tail of request r is its last `tail_lens[r]` keys,
    64 at most: all of its new tokens, and perhaps older ones. A token sees the keys before the tail, and key
    seq_len - tail_len + i where bit i is set. Its position, from which a sliding window counts, is not that of its slot
    but seq_len - tail_len + popcount(bits) - 1; the other keys of the tail that it sees, its ancestors, have the
    positions just before. A request whose `tail_lens` is 0 is causal.

    `taps` takes states on their way through the model (capability `taps`).

    A decode batch that is captured, or replayed, is `fixed`: its tensors are those of the graph, and only their
    contents change. Of its `batch_size` requests the first `real_size` are real (-1: all of them); those behind are
    padding, with row 0, slot 0, position 0 and a length of 1.

    An extend or mixed batch may be `fixed`, too: then also the number of its tokens is fixed. Up to `prefills` of its
    requests bring several new tokens, in any place; all others bring one, or are padding. Padding requests have row 0,
    no keys and no new tokens; the last request always is one. Padding tokens belong to no request and stand behind all
    others, with slot 0 and position 0: what attention answers for them is of no use, and may be NaN.

    All requests share the KV of their first `common_prefix` tokens, whole pages, slot by slot: a backend with the
    capability `shared_prefix` may read it once for all of them, and any other one reads it for each. 0 in a `fixed`
    batch, and where it would not pay (`AttentionBackend.prefix_pays_from`).

    `states` is set by a device part where the model's layers keep states (`ModelSpec.states`).

    `additions` is set by a device part: networks of a family with the capability `additions` call it at each site.

    `watch` is set in a batch whose older KV is still coming: a runner with the capability `layer_watch` calls it before
    and after each layer's attention, or reads its flags. Others never see one.
    """

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: NDArray[np.int64]
    kv_groups: tuple[KVGroupView, ...]
    kv_pool: KVPool
    attn_backend: Attention
    extend_lens: torch.Tensor | None = None
    extend_prefix_lens: torch.Tensor | None = None
    extend_start_loc: torch.Tensor | None = None
    extend_lens_cpu: NDArray[np.int64] | None = None
    extend_prefix_lens_cpu: NDArray[np.int64] | None = None
    logits_indices: torch.Tensor | None = None
    overlay: EmbedOverlay | None = None
    logprob_rows: torch.Tensor | None = None
    logprob_targets: torch.Tensor | None = None
    logprob_requests: tuple[LogprobRequest, ...] = ()
    hidden_rows: torch.Tensor | None = None
    tail_lens: torch.Tensor | None = None
    tail_bits: torch.Tensor | None = None
    tail_lens_cpu: NDArray[np.int64] | None = None
    taps: Taps | None = None
    watch: LayerWatch | None = None
    additions: Additions | None = None
    states: BatchStates | None = None
    real_size: int = -1
    fixed: bool = False
    prefills: int = 0
    common_prefix: int = 0
    attn_metadata: Any = None
    extras: dict[str, Any] = field(default_factory=dict)
    """Values of plugins, by prefixed name (``"<plugin>.<what>"``)."""

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(slots=True)
class LogprobOutput:
    """Logprobs of sampled rows, after processors and temperature-free (log_softmax of the processed logits).

    `token_logprobs` float32 [n]; `top_values` and `top_ids` [n, k] with k the largest `top` in the batch (None when 0);
    `chosen` maps a row to the logprobs float32 of its requested token ids.
    """

    token_logprobs: torch.Tensor
    top_values: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)

    def tops(self, row: int, top: int) -> list[tuple[float, int]]:
        """Return the `top` largest logprobs of one row, each with its token. On the host."""
        if not top or self.top_values is None or self.top_ids is None:
            return []
        return list(zip(self.top_values[row, :top].tolist(), self.top_ids[row, :top].tolist(), strict=True))


@dataclass(slots=True)
class ForwardOutput:
    """Result of one batch: `next_token_ids` int64 [sampled] on the device; the others only where asked for.

    `logits` float32 [sampled, vocab] are the processed ones, masks included. `hidden_states` [sampled, hidden] need the
    capability. `prompt_logprobs` belong to `ForwardBatch.logprob_rows` (of the model's own logits, unprocessed),
    `row_states` [h, hidden] to its `hidden_rows`: after the final norm. `sampled_by` is the sampler that has drawn the
    tokens, for errors; None where the runner has done so itself.

    The worker adds for device parts: `newest` int64 [sampled requests], the last token that each has gained, and
    `accepted`, what stands of tokens ahead, where the batch had some.
    """

    next_token_ids: torch.Tensor
    logprobs: LogprobOutput | None = None
    logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    prompt_logprobs: LogprobOutput | None = None
    row_states: torch.Tensor | None = None
    sampled_by: object = None
    newest: torch.Tensor | None = None
    accepted: Accepted | None = None
