"""Contract: where keys and values live."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.options import Component, OptionsT

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.layers import LayerSpec


@dataclass(frozen=True, slots=True)
class KVPoolContext:
    """`num_pages` usable pages (page 0 comes on top), their size in tokens, and the layers that write into them.

    `dtype` is the type in which they are kept, `compute_dtype` that of the k and v that come in; None for the same. The
    memory of layers whose ids are in `zeroed` starts as zeros: they are read before all of it is written.

    Layers of KV group 0 have `num_pages`, those of group g (`LayerSpec.kv_group`) `further_pages[g - 1]`, which are no
    more; where that is empty, all groups have `num_pages`.
    """

    num_pages: int
    page_size: int
    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device
    zeroed: frozenset[int] = frozenset()
    compute_dtype: torch.dtype | None = None
    further_pages: tuple[int, ...] = ()

    def pages_of(self, layer: LayerSpec) -> int:
        """Return the usable pages of a layer."""
        return self.further_pages[layer.kv_group - 1] if layer.kv_group and self.further_pages else self.num_pages


class KVPool(Component[OptionsT, KVPoolContext]):
    """Device buffers, one K and one V per layer, [num_slots, kv_heads, head_dim], slot-major and contiguous.

    So ``keys(i).view(-1, page_size, kv_heads, head_dim)`` is the paged view, of one page more than the layer's KV group
    has. `num_slots` counts the slots of group 0. What is in the buffers is all that is kept: kernels of a network may
    store there what `write` would. The pool owns the memory; what is in a free slot is undefined and may be NaN, so no
    code may read one, not even multiplied by zero.

    A latent layer (`LayerSpec.latent`) has one buffer, its keys: its values are a view of their first numbers.
    """

    def __init__(self, options: OptionsT, ctx: KVPoolContext) -> None:
        super().__init__(options, ctx)
        self.page_size = ctx.page_size
        self.num_slots = (ctx.num_pages + 1) * ctx.page_size
        self.layer_ids = tuple(layer.layer_id for layer in ctx.layers)
        self._latent = frozenset(layer.layer_id for layer in ctx.layers if layer.latent)

    @classmethod
    @abc.abstractmethod
    def bytes_per_token(cls, layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> int:
        """Return bytes that one token takes in all layers; asked before the pool is built, to size it."""

    @abc.abstractmethod
    def keys(self, layer_id: int) -> torch.Tensor:
        """K buffer [slots, kv_heads, qk_head_dim] of a layer, not a copy; it has the slots of the layer's KV group."""

    @abc.abstractmethod
    def values(self, layer_id: int) -> torch.Tensor:
        """V buffer [slots, kv_heads, v_head_dim] of a layer, not a copy; of a latent layer a view of its keys."""

    def buffers(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """Return the memory of a layer, each part once: K and V, or K alone of a latent layer."""
        keys = self.keys(layer_id)
        return (keys,) if layer_id in self._latent else (keys, self.values(layer_id))

    @abc.abstractmethod
    def write(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [n, kv_heads, qk_head_dim] and v [n, kv_heads, v_head_dim] at `slots` int64 [n].

        A pool of an 8-bit type stores k and v divided by the layer's `scales` and clamped to what the type holds: a
        cast that overflows is NaN in one version of torch and saturates in another. NaN stays NaN. Of a latent layer
        only k is stored.
        """

    def scales(self, layer_id: int) -> tuple[float, float]:
        """Return the factors of a layer's stored keys and values; 1.0 unless `set_scales` said otherwise."""
        return (1.0, 1.0)

    def set_scales(self, layer_id: int, k: float, v: float) -> None:
        """Set them, before any write. Raises ValueError unless both are positive and finite and the type has 8 bits."""
        raise ValueError("this pool does not scale what it stores")

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the K and V of all layers at the slots `sources` int64 [n] to `targets` int64 [n], distinct ones, of a
        pool with one KV group. All sources are read before a target is written, so that both may have slots in common.

        This default works on the `buffers` of each layer.
        """
        import torch

        for layer_id in self.layer_ids:
            for buffer in self.buffers(layer_id):
                # 8-bit floats move as bytes: torch has no index_copy_ for them.
                moved = buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer
                moved.index_copy_(0, targets, moved.index_select(0, sources))

    def prepare(self, seconds: float) -> int:
        """Have the system provide the memory of free slots now and not when they are first written to, for about
        `seconds` at most. The number of slots, from the first on, that are provided for. Called before the first
        request, when all slots are free; a pool whose memory is there from the beginning has nothing to do.
        """
        return self.num_slots

    def release(self) -> int:
        """Give the memory of all slots back until they are written to; its bytes. Raises Unsupported."""
        raise Unsupported(f"the KV pool {type(self).__name__}", "release")

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of all buffers."""
