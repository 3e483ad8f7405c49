"""A state machine that calls a prefix cache as many requests would, in any order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pegboard.conformance.prefix_cache.books import Books, Lock, run_of
from pegboard.core.interfaces.keys import PrefixMemo

NAMESPACES = st.sampled_from(["", "a"])


class CacheMachine(RuleBasedStateMachine):
    """Any calls in any order; `Books` is the oracle and compares after each of them."""

    page_size: int

    @initialize()
    def build(self) -> None:
        self.books: Books = self.make()
        self.unlocked: list[Lock] = []  # handles that may still be locked: nothing was evicted since
        self.stale: list[tuple[Lock, list[int]]] = []  # those from before, and the slots that they stood for
        self.memos: dict[tuple[str, tuple[int, ...]], PrefixMemo] = {}

    def make(self) -> Books:
        raise NotImplementedError

    def tokens_of(self, chars: Sequence[int], tail: int) -> list[int]:
        return [*run_of(*chars, page_size=self.page_size), *[7] * (tail % self.page_size)]

    def memo(self, tokens: Sequence[int], namespace: str) -> PrefixMemo:
        """Return the memo of a sequence that begins with these tokens."""
        return self.memos.setdefault((namespace, tuple(tokens)), PrefixMemo())

    def room(self, num_tokens: int) -> bool:
        """Make room as the pipeline does: evict what is missing."""
        missing = num_tokens - self.books.allocator.free_tokens
        if missing > 0:
            self.evict(missing)
        return num_tokens <= self.books.allocator.free_tokens

    @rule(
        chars=st.lists(st.integers(0, 2), max_size=6),
        tail=st.integers(0, 3),
        namespace=NAMESPACES,
        priority=st.integers(0, 2),
    )
    def finish(self, chars: list[int], tail: int, namespace: str, priority: int) -> None:
        """Play a request that computed everything itself, inserts it, and lets go of its tail."""
        tokens = self.tokens_of(chars, tail)
        if self.room(len(tokens) + self.page_size):
            result = self.books.insert(tokens, namespace, priority=priority)
            self.unlocked.append(Lock(result.handle, tuple(tokens), namespace, result.taken))
            self.let_go(result.slots[result.taken :])

    @rule(chars=st.lists(st.integers(0, 2), max_size=6), tail=st.integers(0, 3), namespace=NAMESPACES)
    def run(self, chars: list[int], tail: int, namespace: str) -> None:
        """Play a request that matches, computes the rest, inserts, and keeps running with its new handle locked."""
        tokens = self.tokens_of(chars, tail)
        lock = self.books.lock(tokens, namespace)
        slots = np.array(self.books.expected(tokens, namespace), dtype=np.int64)
        if not self.room(len(tokens) - lock.length + self.page_size):
            self.books.unlock(lock)
            return
        slots = np.concatenate((slots, self.books.alloc(len(tokens) - lock.length)))
        result = self.books.insert(tokens, namespace, slots=slots, memo=self.memo(tokens, namespace))
        self.books.lock_handle(result.handle, tokens, namespace, result.taken)
        self.books.unlock(lock)
        self.let_go(result.slots[result.taken :])

    @precondition(lambda self: self.books.locks)
    @rule(which=st.integers(0, 100), chars=st.lists(st.integers(0, 2), max_size=4), tail=st.integers(0, 3))
    def go_on(self, which: int, chars: list[int], tail: int) -> None:
        """Let a running request compute another chunk, and go on with that one locked too."""
        lock = self.books.locks[which % len(self.books.locks)]
        tokens = [*lock.tokens[: lock.length], *self.tokens_of(chars, tail)]
        if self.room(len(tokens) - lock.length + self.page_size):
            result = self.books.extend(lock, tokens, memo=self.memo(tokens, lock.namespace))
            taken = lock.length + result.taken
            self.books.lock_handle(result.handle, tokens, lock.namespace, taken)
            self.books.unlock(lock)
            self.let_go(result.slots[result.taken :])

    @rule(
        chars=st.lists(st.integers(0, 2), max_size=6), tail=st.integers(0, 3), namespace=NAMESPACES, lock=st.booleans()
    )
    def match(self, chars: list[int], tail: int, namespace: str, lock: bool) -> None:
        tokens = self.tokens_of(chars, tail)
        if lock:
            self.books.lock(tokens, namespace, memo=self.memo(tokens, namespace))
        else:
            self.books.match(tokens, namespace, memo=self.memo(tokens, namespace))

    @precondition(lambda self: self.unlocked)
    @rule(which=st.integers(0, 100))
    def lock_later(self, which: int) -> None:
        lock = self.unlocked.pop(which % len(self.unlocked))
        self.books.lock_handle(lock.handle, lock.tokens, lock.namespace, lock.length)

    @precondition(lambda self: self.books.locks)
    @rule(which=st.integers(0, 100))
    def lock_again(self, which: int) -> None:
        lock = self.books.locks[which % len(self.books.locks)]
        self.books.lock_handle(lock.handle, lock.tokens, lock.namespace, lock.length)

    @precondition(lambda self: self.books.locks)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        self.books.unlock(self.books.locks[which % len(self.books.locks)])

    @precondition(lambda self: self.stale)
    @rule(which=st.integers(0, 100))
    def lock_stale(self, which: int) -> None:
        self.books.lock_stale(*self.stale.pop(which % len(self.stale)))

    @rule(num_tokens=st.integers(0, 40))
    def evict(self, num_tokens: int) -> None:
        stale = self.standing()
        if self.books.evict(num_tokens):
            self.age(stale)

    def standing(self) -> list[tuple[Lock, list[int]]]:
        """Return some of the handles that may still be locked, with their slots."""
        some = self.unlocked[-2:]
        return [(one, self.books.expected(one.tokens[: one.length], one.namespace)) for one in some]

    def age(self, stale: list[tuple[Lock, list[int]]]) -> None:
        self.stale = [*self.stale, *stale][-4:]
        self.unlocked.clear()

    @rule()
    def reset(self) -> None:
        if self.books.locked:
            with pytest.raises(RuntimeError):
                self.books.cache.reset()
            self.books.check()
        else:
            stale = self.standing()
            self.books.reset()
            self.age(stale)

    def let_go(self, slots: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Free the caller's own pages."""
        own = np.unique(slots // self.page_size)
        self.books.allocator.free(own)
        self.books.held.difference_update(own.tolist())
        self.books.check()

    def teardown(self) -> None:
        """At the end everything comes back."""
        for lock in list(self.books.locks):
            self.books.unlock(lock)
        self.books.evict(self.books.allocator.total_tokens)
        assert self.books.allocator.free_pages == self.books.allocator.num_pages
