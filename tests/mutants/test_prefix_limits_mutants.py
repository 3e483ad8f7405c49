"""Prefix caches that take one sequence for another, grow, or accept what they must refuse, as plugin authors have
written them: each caught by the test that is meant for it, with a message that says what is wrong.

What the subclasses of `TextbookCache` get wrong is one line each.
"""

from __future__ import annotations

import hashlib
import zlib

import numpy as np
import pytest
from hypothesis import Phase, settings

from pegboard.conformance import prefix_cache
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.prefix_cache import PrefixCacheContract
from pegboard.conformance.properties import properties
from pegboard.plugins.cache_block.cache import BlockCache
from pegboard.plugins.cache_radix.cache import RadixCache
from pegboard.toolkit.cache.pages import slots_of
from tests.mutants.textbook_cache import TextbookCache


class KeyedByTokens(TextbookCache):
    """With `digest`, what stands for the first tokens of a key."""

    def digest(self, tokens):
        raise NotImplementedError

    def name(self, key, end, parent):
        return key.namespace, end, self.digest(key.tokens[:end])


class BySum(KeyedByTokens):
    def digest(self, tokens):
        return int(tokens.sum())


class ByXor(KeyedByTokens):
    def digest(self, tokens):
        return int(np.bitwise_xor.reduce(tokens))


class BySortedTokens(KeyedByTokens):
    def digest(self, tokens):
        return tuple(sorted(tokens.tolist()))


class BySet(KeyedByTokens):
    def digest(self, tokens):
        return frozenset(tokens.tolist())


class ByHash(KeyedByTokens):
    def digest(self, tokens):
        return hash(tuple(tokens.tolist()))


class ByCrc(KeyedByTokens):
    def digest(self, tokens):
        return zlib.crc32(tokens.tobytes())


class ByAdler(KeyedByTokens):
    def digest(self, tokens):
        return zlib.adler32(tokens.tobytes())


class ByShortDigest(KeyedByTokens):
    def digest(self, tokens):
        return hashlib.sha256(tokens.tobytes()).digest()[:2]


class ByInt32(KeyedByTokens):
    def digest(self, tokens):
        return tokens.astype(np.int32).tobytes()


class ByUint16(KeyedByTokens):
    def digest(self, tokens):
        return (tokens & 0xFFFF).astype(np.uint16).tobytes()


class ByFloat32(KeyedByTokens):
    def digest(self, tokens):
        return tokens.astype(np.float32).tobytes()


class ByFloat64(KeyedByTokens):
    def digest(self, tokens):
        return tokens.astype(np.float64).tobytes()


class ByVocabulary(KeyedByTokens):
    """As if all tokens were a vocabulary's, of which none is negative."""

    def digest(self, tokens):
        return np.maximum(tokens, 0).tobytes()


class By61Bits(KeyedByTokens):
    """As if numbers of media needed no more."""

    def digest(self, tokens):
        return np.maximum(tokens, -(1 << 61)).tobytes()


class ByDigits(KeyedByTokens):
    def digest(self, tokens):
        return "".join(map(str, tokens.tolist()))


class ByShownArray(KeyedByTokens):
    """numpy leaves out the middle of what is long."""

    def digest(self, tokens):
        return np.array2string(tokens, threshold=12, edgeitems=3)


class ByFirstAndLast(KeyedByTokens):
    def digest(self, tokens):
        return int(tokens[0]), int(tokens[-1])


class ByTheEnd(KeyedByTokens):
    def digest(self, tokens):
        return tokens[-2 * self.page_size :].tobytes()


class ByNamespaceJoined(TextbookCache):
    def name(self, key, end, parent):
        return key.namespace + ",".join(map(str, key.tokens[:end].tolist()))


class ByStrippedNamespace(TextbookCache):
    def name(self, key, end, parent):
        return key.namespace.strip().lower(), key.tokens[:end].tobytes()


class ByThePageBefore(TextbookCache):
    def name(self, key, end, parent):
        return key.namespace, end, key.tokens[max(0, end - 2 * self.page_size) : end].tobytes()


class LocksWhatIsGone(TextbookCache):
    def lock(self, handle):
        for page in handle.path:
            page.locks += 1
        handle.locks += 1


class LocksWhatIsLeft(TextbookCache):
    def lock(self, handle):
        handle.path = [page for page in handle.path if not page.gone]
        super().lock(handle)


class LocksByName(TextbookCache):
    """What has come back under the same tokens will do, it thinks."""

    def lock(self, handle):
        handle.path = [self.table.get(page.name, page) for page in handle.path]
        super().lock(handle)


class CountsLocksPerPath(TextbookCache):
    def unlock(self, handle):
        if not all(page.locks for page in handle.path):
            raise ValueError("not locked")
        handle.locks = max(handle.locks, 1)
        super().unlock(handle)


class AcceptsForeignPages(TextbookCache):
    def refuse(self, path, pages):
        pass


class LooksAtNewPagesOnly(TextbookCache):
    def refuse(self, path, pages):
        super().refuse([], pages[len(path) :])


class RefusesTooLate(TextbookCache):
    def insert(self, key, slots, *, priority=0):
        result = super().insert(key.head(self.page_size), slots[: self.page_size])
        return super().insert(key, slots) if len(key) > self.page_size else result


class TakesAnySlots(TextbookCache):
    def insert(self, key, slots, *, priority=0):
        size = self.page_size
        whole = len(slots) // size * size
        straight = slots_of(slots[:whole:size] // size, size)
        return super().insert(key, np.concatenate((straight, slots[whole:])))


class TakesPagesOutsideThePool(TextbookCache):
    def refuse_outside(self, pages):
        pass


class TakesPageZero(TextbookCache):
    def refuse_outside(self, pages):
        if any(not 0 <= page <= self.allocator.num_pages for page in pages):
            raise ValueError("no such page")


class LocksAnything(TextbookCache):
    def lock(self, handle):
        if hasattr(handle, "path"):
            super().lock(handle)


class UnlocksAnything(TextbookCache):
    def unlock(self, handle):
        if hasattr(handle, "path"):
            super().unlock(handle)


class ResetsTheAllocator(TextbookCache):
    def reset(self):
        super().reset()
        self.allocator.reset()


class ResetsBitByBit(TextbookCache):
    def reset(self):
        self.evict(1)
        super().reset()


class ResetsWhatItCan(TextbookCache):
    def reset(self):
        self.evict(self.evictable_tokens)


class ForgetsItsHandlesAtReset(TextbookCache):
    def reset(self):
        if self.locked_tokens:
            raise RuntimeError("something is locked")
        pages = [page.page for page in self.table.values()]
        self.table.clear()
        self.give_back(pages)


class KeepsTheExtension(RadixCache):
    def check(self):
        pass

    def extend(self, handle, key, slots, *, priority=0):
        result = super().extend(handle, key, slots, priority=priority)
        node = result.handle.node  # type: ignore[attr-defined]
        if node is not None:
            node.tokens = key.tokens[node.start : node.end]
        return result


class WritesIntoTheSlots(TextbookCache):
    def insert(self, key, slots, *, priority=0):
        result = super().insert(key, slots)
        slots[:] = result.slots
        return result


class VersionGrowsWithMatches(TextbookCache):
    def match(self, key):
        self.version += 1
        return super().match(key)


class VersionGrowsWithLocks(TextbookCache):
    def lock(self, handle):
        self.version += 1
        super().lock(handle)


class CountsInNumpy(BlockCache):
    @property
    def locked_tokens(self):
        return np.int64(self._locked * self.page_size)


class NotesWhatIsGone(TextbookCache):
    def drop(self, page):
        self.ghosts = [*getattr(self, "ghosts", []), page.name]
        return super().drop(page)


class KeepsHandles(TextbookCache):
    def match(self, key):
        found = super().match(key)
        self.handles = [*getattr(self, "handles", []), found.handle]
        return found


class KeepsNamespaces(TextbookCache):
    def find(self, key):
        self.spaces = getattr(self, "spaces", {})
        self.spaces.setdefault(key.namespace, {})
        return super().find(key)


class KeepsPlaces(BlockCache):
    """Digests of blocks that are gone."""

    def _give_back(self, pages):
        self.old = getattr(self, "old", set())  # type: ignore[var-annotated]
        self.old.update(digest.tobytes() for digest in self._blocks.digests[pages])
        super()._give_back(pages)


class SearchesForEachVictim(TextbookCache):
    def evict(self, num_tokens):
        freed = []  # type: ignore[var-annotated]
        while len(freed) * self.page_size < num_tokens and (victims := self.victims()):
            freed.append(self.drop(victims[0]))
        return self.give_back(freed)


class CountsAfterEachVictim(RadixCache):
    def _drop(self, node):
        assert sum(len(one) for one in self._tree.nodes()) == self._tree.num_tokens
        return super()._drop(node)


TWINS = "test_no_two_sequences_are_taken_for_one"
COST = "test_eviction_does_not_look_at_everything_for_each_page"
GROWS = "test_what_is_evicted_leaves_nothing_behind"
STALE = "test_what_was_evicted_cannot_be_locked"
OUTSIDE = "test_slots_outside_of_the_pool_are_refused"
FOREIGN = "test_a_handle_of_something_else_is_refused"
CAUGHT = [
    (BySum, TWINS, "pages come in another order"),
    (ByXor, TWINS, "another order"),
    (BySortedTokens, TWINS, "another order"),
    (BySet, TWINS, "another order"),
    (ByHash, TWINS, "their hash() is equal"),
    (ByCrc, TWINS, "the CRC-32 of their bytes is equal"),
    (ByAdler, TWINS, "the Adler-32 of their bytes is equal"),
    (ByShortDigest, "test_digests_are_long_enough", ""),
    (ByInt32, TWINS, "they differ by 2**32"),
    (ByUint16, TWINS, "they differ by 2**16"),
    (ByFloat32, TWINS, "they are equal as float32"),
    (ByFloat64, TWINS, "they are equal as float64"),
    (ByVocabulary, TWINS, "they are negative, as at media"),
    (By61Bits, TWINS, "they are negative and have 62 bits"),
    (ByDigits, TWINS, "their digits are the same"),
    (ByShownArray, TWINS, "Compare namespace and tokens themselves"),
    (ByFirstAndLast, TWINS, "Compare namespace and tokens themselves"),
    (ByTheEnd, TWINS, "the end is the same"),
    (ByNamespaceJoined, TWINS, "look the same when joined"),
    (ByStrippedNamespace, TWINS, "namespaces differ in case"),
    (
        ByThePageBefore,
        "test_a_page_is_found_only_behind_what_it_was_computed_behind",
        "must cover all that comes before",
    ),
    (LocksWhatIsGone, STALE, "to lock a handle after its last page was evicted must raise ValueError"),
    (LocksWhatIsLeft, STALE, "to lock a handle after its last page was evicted must raise ValueError"),
    (LocksByName, STALE, "others inserted the same tokens"),
    (ForgetsItsHandlesAtReset, STALE, "to lock a handle after a reset must raise ValueError"),
    (CountsLocksPerPath, "test_each_handle_counts_its_own_locks", "to unlock a handle that is not locked itself"),
    (AcceptsForeignPages, "test_a_page_in_two_places_is_refused", "is accepted"),
    (LooksAtNewPagesOnly, "test_a_page_in_two_places_is_refused", "which would free them as duplicates"),
    (RefusesTooLate, "test_a_page_in_two_places_is_refused", "changed the cache before that"),
    (TakesAnySlots, "test_slots_that_fill_no_pages_are_refused", "to insert slots that begin within a page"),
    (TakesPagesOutsideThePool, OUTSIDE, "to insert slots of page 0 must raise ValueError, and is accepted"),
    (TakesPageZero, OUTSIDE, "to insert slots of page 0 must raise ValueError, and is accepted"),
    (LocksAnything, FOREIGN, "to lock an object that is not a handle of this cache must raise"),
    (UnlocksAnything, FOREIGN, "to unlock an object that is not a handle of this cache must raise"),
    (ResetsTheAllocator, "test_reset_leaves_the_callers_pages_alone", "in use, but were freed"),
    (ResetsBitByBit, "test_a_refused_reset_changes_nothing", "freed pages before that"),
    (ResetsWhatItCan, "test_a_refused_reset_changes_nothing", "must raise RuntimeError, and is accepted"),
    (KeepsTheExtension, "test_what_extended_a_path_may_be_overwritten", ""),
    (
        WritesIntoTheSlots,
        "test_duplicates_are_freed_and_answered_with_the_cached_slots",
        "wrote into the caller's slots",
    ),
    (VersionGrowsWithMatches, "test_what_changes_no_answer_leaves_the_version", "match changes nothing"),
    (VersionGrowsWithLocks, "test_what_changes_no_answer_leaves_the_version", "lock changes nothing"),
    (CountsInNumpy, "test_locks_count", "locked_tokens is a int64, not an int"),
    (NotesWhatIsGone, GROWS, "bytes with every prefix"),
    (KeepsHandles, GROWS, "bytes with every prefix"),
    (KeepsNamespaces, GROWS, "bytes with every prefix"),
    (KeepsPlaces, GROWS, "bytes with every prefix"),
    (SearchesForEachVictim, COST, "find all victims of a call in one go"),
    (CountsAfterEachVictim, COST, "find all victims of a call in one go"),
]
REUSE = frozenset({"reuse"})
MUTANTS = [
    Mutant(
        cls,
        suite=PrefixCacheContract,
        caught_by=test,
        says=says,
        provides=REUSE if issubclass(cls, TextbookCache) else None,
        base=TextbookCache if issubclass(cls, TextbookCache) else None,
    )
    for cls, test, says in CAUGHT
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


@pytest.mark.full
def test_the_state_machine_catches_stale_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    unshrunk = settings(properties(60, 40), phases=[Phase.generate])  # for speed: the counterexample is not shown
    monkeypatch.setattr(prefix_cache, "properties", lambda *sizes: unshrunk)
    test = "test_any_sequence_of_calls_agrees_with_a_dict"
    assert_caught(Mutant(LocksWhatIsLeft, suite=PrefixCacheContract, caught_by=test, provides=REUSE))
