"""The one cache key of every prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class PrefixKey:
    """What identifies a prefix: tokens int64 [n] and a namespace.

    Whatever makes equal tokens mean different KV (an adapter, a cache salt) goes into `namespace`; multimodal content
    is hashed into the tokens. Two keys share a prefix only within one namespace. The array belongs to the caller and
    must not change while a cache call runs; a cache copies what it keeps.
    """

    tokens: NDArray[np.int64]
    namespace: str = ""

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def head(self, n: int) -> PrefixKey:
        """The same key cut to its first `n` tokens (a view, no copy)."""
        return PrefixKey(self.tokens[:n], self.namespace)
