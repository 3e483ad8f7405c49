"""Plain descriptions of a model's attention layers and of the kinds of KV that they keep."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class KVKind(enum.Enum):
    """How long the state of a group's layers has to be kept."""

    FULL = "full"
    """Every token's K and V, for as long as the request lives."""
    WINDOW = "window"
    """Only the last `window` tokens are ever read again."""


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers whose KV lives and dies together, and so share one row table.

    `layer_ids` are the layers of the group. `window` (tokens) belongs to `KVKind.WINDOW` alone. A model whose window
    layers may simply keep everything declares one FULL group; the window is then only a mask (`LayerSpec.window`).
    """

    kind: KVKind
    layer_ids: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What an attention backend has to know of one layer.

    `layer_id` indexes the KV pool; `kv_group` indexes `ForwardBatch.kv_groups`. `scale` multiplies q·k.
    `window`: a query at position p sees keys at positions > p - window (transformers' convention: `window` keys, itself
    included). If `chunked`, it sees those of its chunk of `window` positions: from p // window * window on (Llama 4).
    `logit_cap` c replaces a score s by c·tanh(s / c). `num_sinks` per-head sink logits, where a model has
    them, are passed with the call. A `latent` layer keeps one vector per token (MLA): its one KV head's keys, of which
    the first `v_head_dim` numbers are the values as well.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    logit_cap: float | None = None
    num_sinks: int = 0
    kv_group: int = 0
    latent: bool = False
    chunked: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads <= 0 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"layer {self.layer_id}: {self.num_heads} query heads are not a multiple of "
                f"{self.num_kv_heads} kv heads"
            )
        if self.window is not None and self.window <= 0:
            raise ValueError(f"layer {self.layer_id}: window must be positive or None, got {self.window}")
        if self.chunked and self.window is None:
            raise ValueError(f"layer {self.layer_id}: a chunked layer needs a window, the size of its chunks")
        if self.latent and (self.num_kv_heads != 1 or self.v_head_dim > self.qk_head_dim):
            raise ValueError(
                f"layer {self.layer_id}: a latent layer has one KV head, whose values are part of its keys, not "
                f"{self.num_kv_heads} heads with {self.qk_head_dim} and {self.v_head_dim} numbers"
            )

    def first_seen(self, position: int) -> int:
        """Return the position of the first key that a query at `position` sees."""
        if self.window is None:
            return 0
        return position // self.window * self.window if self.chunked else max(0, position - self.window + 1)

    @property
    def kept(self) -> tuple[int, ...]:
        """Numbers that are kept of a token: those of its keys and of its values, or of its latent."""
        keys, values = self.num_kv_heads * self.qk_head_dim, self.num_kv_heads * self.v_head_dim
        return (keys,) if self.latent else (keys, values)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor that a layer keeps of all tokens so far in place of keys and values: a recurrent state, or the last
    inputs of a convolution. `name` is unique in the model. `shape` is that of one request; `dtype` is a floating type's
    name, such as "float32".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the pipeline has to know of a model: sizes, and what its layers keep.

    `max_context_len` counts prompt and output tokens together. `eos_token_ids` come from the model's own configuration.
    `position_axes` is 3 for a model whose prompts may have a position per axis (M-RoPE, `TokenPositions`), and 1 for
    others. `states` are what layers keep beside keys and values; the network finds them in `ForwardBatch.states`. A
    model all of whose layers keep states has no `layers`, and one FULL group without any.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_context_len: int
    layers: tuple[LayerSpec, ...]
    kv_groups: tuple[KVGroupSpec, ...]
    eos_token_ids: frozenset[int] = frozenset()
    position_axes: int = 1
    states: tuple[StateSpec, ...] = ()
