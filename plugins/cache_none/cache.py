"""The null cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.prefix_cache import InsertResult, PrefixCache, PrefixMatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.keys import PrefixKey
    from pegboard.core.interfaces.prefix_cache import CacheHandle


class EmptyHandle:
    """The empty path. It counts its locks, so that a caller who unlocks too often finds out here as well."""

    __slots__ = ("locks",)

    def __init__(self) -> None:
        self.locks = 0


class NoCache(PrefixCache):
    """Finds nothing and takes nothing: every page stays with the request that brought it."""

    def match(self, key: PrefixKey) -> PrefixMatch:
        return PrefixMatch(np.empty(0, dtype=np.int64), EmptyHandle())

    def lock(self, handle: CacheHandle) -> None:
        self._checked(handle).locks += 1

    def unlock(self, handle: CacheHandle) -> None:
        held = self._checked(handle)
        if not held.locks:
            raise ValueError("this handle is not locked")
        held.locks -= 1

    def insert(self, key: PrefixKey, slots: NDArray[np.int64], *, priority: int = 0) -> InsertResult:
        if slots.shape != (len(key),):
            raise ValueError(f"{len(key)} tokens, but slots {list(slots.shape)}")
        return InsertResult(np.array(slots, dtype=np.int64), 0, EmptyHandle())

    def evict(self, num_tokens: int) -> int:
        return 0

    @property
    def evictable_tokens(self) -> int:
        return 0

    @property
    def locked_tokens(self) -> int:
        return 0

    def reset(self) -> None:
        pass

    def _checked(self, handle: CacheHandle) -> EmptyHandle:
        if not isinstance(handle, EmptyHandle):
            raise TypeError(f"this is not a handle of the null cache: {handle!r}")
        return handle
