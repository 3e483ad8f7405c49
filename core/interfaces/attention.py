"""Contract: attention over paged keys and values."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pegboard.core.interfaces.on_device import on_device
from pegboard.core.interfaces.options import Component, OptionsT

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.core.interfaces.on_device import Bring, HostArray


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What a backend is built from. `dtype` is that of q, k, v and of the output; `kv_dtype` that of the pool, None for
    the same. `max_batch` and `max_context_len` bound its buffers. `graph_sizes` are the sizes of decode batches that
    are captured and replayed, in ascending order. `bring` takes arrays to the device, see `on_device`.
    """

    layers: tuple[LayerSpec, ...]
    page_size: int
    dtype: torch.dtype
    device: torch.device
    max_batch: int
    max_context_len: int
    kv_dtype: torch.dtype | None = None
    graph_sizes: tuple[int, ...] = ()
    bring: Bring | None = None

    def on_device(self, *arrays: HostArray) -> tuple[torch.Tensor, ...]:
        """Return arrays of a batch's plan on the device, for libraries that plan on the host. Each call is one copy
        beside the step's, and none waits for the device. What follows from lengths is better computed there, from those
        of the batch.
        """
        return on_device(self.device, self.bring, arrays)

    @property
    def pool_dtype(self) -> torch.dtype:
        """The type in which keys and values are kept."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype


class AttentionBackend(Component[OptionsT, AttentionContext]):
    """Causal attention of a batch's new tokens over their requests' KV, old and new.

    The pipeline calls `prepare` once per batch; the model then calls `forward` once per layer. A backend reads no
    slot but those of a request's own row below its `seq_lens`: free slots may hold NaN. For a layer with a window it
    reads only pages with a key that some new token sees: of other pages the row's entries may be out of date.
    """

    prefix_pays_from: ClassVar[int] = 4096
    """With the capability `shared_prefix`: the tokens of KV that a decode batch has to read less, over all of its
    requests but one, to make up for what reading a common prefix by itself costs. Of batches that would save less,
    `common_prefix` is 0.
    """

    @abc.abstractmethod
    def prepare(self, batch: ForwardBatch) -> None:
        """Compute what all layers share (indices, masks, splits) and keep it in `batch.attn_metadata`.

        It is called on the host before every batch and before every replay of a graph, and is never captured. With the
        capability `graph`, for a batch that is `fixed`: everything that `forward` reads lies where it lay for the last
        fixed batch of that size, and what `forward` decides on the host depends on that size alone. With the capability
        `graph_extend` the same holds for extend and mixed batches that are `fixed`: their size is that of `batch_size`,
        `num_tokens` and `prefills`.
        """

    @abc.abstractmethod
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
        """Write k and v at the group's `out_cache_loc`, then attend.

        q [tokens, num_heads, qk_head_dim], k [tokens, num_kv_heads, qk_head_dim], v [tokens, num_kv_heads,
        v_head_dim], packed as `batch.input_ids` is; k and v None where they are in the pool already: the network has
        stored them itself, or the layer shares another one's KV. `sinks` float [num_heads] are logits that take part
        in the softmax without a value (capability `sinks`). Of a latent layer (capability `latent`) v is the first
        v_head_dim numbers of k. Returns [tokens, num_heads, v_head_dim] in q's dtype.
        Raises Unsupported for what a capability that it does not declare would need.
        """
