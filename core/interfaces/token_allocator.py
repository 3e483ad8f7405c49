"""Contract: the allocator, sole owner of the KV pool's free pages."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.options import Component, OptionsT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenAllocatorContext:
    """`num_pages` usable pages of `page_size` tokens. Page 0, for padding, comes on top and is never handed out."""

    num_pages: int
    page_size: int


class TokenAllocator(Component[OptionsT, TokenAllocatorContext]):
    """Hands out and takes back pages 1..num_pages. Host-side and exact; not thread-safe."""

    def __init__(self, options: OptionsT, ctx: TokenAllocatorContext) -> None:
        super().__init__(options, ctx)
        self.num_pages = ctx.num_pages
        self.page_size = ctx.page_size

    @property
    @abc.abstractmethod
    def free_pages(self) -> int:
        """How many pages are free."""

    @property
    def free_tokens(self) -> int:
        """Tokens that fit into the free pages."""
        return self.free_pages * self.page_size

    @property
    def total_tokens(self) -> int:
        """Tokens that fit into all usable pages, free or not."""
        return self.num_pages * self.page_size

    @abc.abstractmethod
    def alloc(self, n: int) -> NDArray[np.int64] | None:
        """`n` distinct pages as int64 [n], owned by the caller; None, with nothing changed, when fewer are free.

        The array is the caller's own copy. `n` 0 gives an empty array. Raises ValueError for a negative `n`.
        """

    @abc.abstractmethod
    def free(self, pages: NDArray[np.int64]) -> None:
        """Take `pages` int64 [n] back, in any order.

        Raises ValueError, with nothing changed, for a page that is free already, given twice, or out of range.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Everything is free again, as after construction."""
