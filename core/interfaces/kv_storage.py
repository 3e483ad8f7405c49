"""Contract: blocks of KV under keys, on a disk or behind a network."""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from pegboard.core.interfaces.options import OptionsT

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock


class StorageError(Exception):
    """A storage cannot do what it was asked for. The message is for the operator's log."""


@dataclass(frozen=True, slots=True)
class KVStorageContext:
    """`identity` (hexadecimal) says what the KV was computed by, and in which form it is kept: storages of another
    identity have nothing in common, even in one place. All blocks have `block_bytes`. Deadlines are of `clock`.
    """

    identity: str
    block_bytes: int
    clock: Clock = time.monotonic


class KVStorage(abc.ABC, Generic[OptionsT]):
    """Keeps blocks of bytes. A block is all there, as it was written, or it is not there: one that is torn, damaged or
    stands under another key is a miss, and is removed.

    Keys are any bytes, 32 to 64 of them; a key always stands for the same bytes, so what is there need not be written
    again. Calls come from several threads at once. What is returned counts from the first key on. No call goes on long
    beyond its `deadline`, seconds by the context's clock; it then returns what it has so far. A storage raises
    StorageError where it cannot work (and anything else it raises counts the same); a miss is not an error,
    and neither is a block that was dropped for lack of space.
    """

    def __init__(self, options: OptionsT, ctx: KVStorageContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: KVStorageContext) -> str | None:
        """Return None, or the reason why it cannot work here, with what to do: a folder that cannot be written to, say.
        It changes nothing.
        """
        return None

    @abc.abstractmethod
    def exists(self, keys: Sequence[bytes], deadline: float) -> int:
        """Count how many blocks are there, from the first on. What is there may still turn out to be damaged."""

    @abc.abstractmethod
    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> int:
        """Read blocks into these buffers of `block_bytes`; how many are there and verified, from the first on. What is
        in the other buffers is undefined.
        """

    @abc.abstractmethod
    def set(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> int:
        """Write blocks; how many are there now, from the first on. A block appears all at once."""

    @abc.abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove blocks; those that are not there do not matter."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Remove all blocks of this identity."""

    def stats(self) -> Mapping[str, float]:
        """Return what an operator may want to know (bytes held, blocks removed...), by name."""
        return {}

    def close(self) -> None:  # optional
        """Let go of threads, files and connections. No other call is under way, and none comes after."""
