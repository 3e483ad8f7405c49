"""Pages of KV groups: how memory is shared between layers that keep all tokens and those that keep a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.toolkit.cache.windows import most_pages

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec, ModelSpec

_TYPICAL = 4096
"""Tokens of a request for which groups get memory, where the config does not say."""


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Bytes of a page of each group, the first one's first; pages of a `typical` request in the first; `most` pages
    that one needs in each further group while it decodes, and pages that one `step` takes beside these.
    """

    page_bytes: tuple[int, ...]
    typical: int
    most: tuple[int, ...]
    step: int

    @classmethod
    def of(
        cls,
        pool: type[KVPool],
        layers: tuple[LayerSpec, ...],
        spec: ModelSpec,
        dtype: torch.dtype,
        size: int,
        typical: int | None,
        step: int,
    ) -> GroupSizes:
        """Return those of a model whose `layers`, and those of plugins, are kept in `dtype`, in pages of `size` tokens.
        A `typical` request has so many tokens, None: 4,096 or the context; a step computes up to `step` of prompts.
        """
        each = [tuple(layer for layer in layers if layer.kv_group == group) for group in range(len(spec.kv_groups))]
        length = typical or min(_TYPICAL, spec.max_context_len)
        return cls(
            tuple(pool.bytes_per_token(own, dtype) * size for own in each),
            -(-length // size),
            tuple(most_pages(group.window or 1, size) for group in spec.kv_groups[1:]),
            -(-step // size),
        )

    def further(self, num_pages: int) -> tuple[int, ...]:
        """Return the pages of further groups beside `num_pages` of the first: as many typical requests fit into each,
        and one request and a step at least. None has more than the first.
        """
        shares = (-(-num_pages * min(most, self.typical) // self.typical) for most in self.most)
        return tuple(
            min(num_pages, max(share, most) + self.step) for share, most in zip(shares, self.most, strict=True)
        )

    def nbytes(self, num_pages: int) -> int:
        """Return the bytes of `num_pages` of the first group, and of what goes with them."""
        pages = (num_pages, *self.further(num_pages))
        return sum(size * count for size, count in zip(self.page_bytes, pages, strict=True))

    def fitting(self, free: float, at_most: int) -> int:
        """Return the pages of the first group that fit into `free` bytes with what goes with them."""
        low, high = 0, int(free // self.page_bytes[0]) if self.page_bytes[0] else at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(middle) <= free else (low, middle - 1)
        return low
