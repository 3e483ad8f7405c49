"""The one cache key of every prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")


class PrefixMemo:
    """What caches have worked out about one sequence of tokens (its pages' hashes, say), so that it is done once.

    It belongs to the sequence's owner and goes along in every key of it, whatever the key's length. The sequence
    may grow and never changes otherwise, and it stays in one namespace. A memo is a help and no proof: a cache answers
    the same with a memo as without.

    >>> memo = PrefixMemo()
    >>> memo.of("sums", list).append(3)
    >>> memo.of("sums", list)
    [3]
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[object, Any] = {}

    def of(self, name: object, make: Callable[[], T]) -> T:
        """Return the value kept under `name` (hashable, by convention led by the plugin's name), made at first use."""
        value: T | None = self._values.get(name)
        if value is None:
            value = self._values[name] = make()
        return value


@dataclass(frozen=True, slots=True, eq=False)
class PrefixKey:
    """What identifies a prefix: tokens int64 [n] and a namespace.

    Whatever makes equal tokens mean different KV (an adapter, a cache salt) goes into `namespace`. Where something
    other than its id identifies a token (`KeyedTokens`), a negative number stands in `tokens`. Two keys share a prefix
    only within one namespace. The array belongs to the caller and must not change while a cache call runs; a cache
    copies what it keeps. `memo` is the sequence's, where its owner keeps one.
    """

    tokens: NDArray[np.int64]
    namespace: str = ""
    memo: PrefixMemo | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def head(self, n: int) -> PrefixKey:
        """Return the same key cut to its first `n` tokens (a view, no copy)."""
        return PrefixKey(self.tokens[:n], self.namespace, self.memo)
