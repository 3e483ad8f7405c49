"""Broken prefix caches, and the tests of the suite that notice.

Their own self-check is switched off: a third party's cache need not have one, so the suite has to notice by itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, settings

from pegboard.conformance import prefix_cache
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.prefix_cache import PrefixCacheContract
from pegboard.conformance.properties import properties
from pegboard.core.interfaces.keys import PrefixKey
from pegboard.core.interfaces.prefix_cache import InsertResult, PrefixMatch
from pegboard.plugins.cache_block.cache import BlockCache
from pegboard.plugins.cache_none.cache import NoCache
from pegboard.plugins.cache_radix.cache import RadixCache
from pegboard.toolkit.cache.block_keys import ChainDigests


class Radix(RadixCache):
    def check(self):
        pass


class Block(BlockCache):
    def check(self):
        pass


class _Deaf:
    """An allocator to which `free` means nothing."""

    def __init__(self, allocator):
        self._allocator = allocator

    def __getattr__(self, name):
        return getattr(self._allocator, name)

    def free(self, pages):
        pass


class ForgetsDuplicates(Radix):
    def insert(self, key, slots, *, priority=0):
        allocator, self.allocator = self.allocator, _Deaf(self.allocator)  # type: ignore[assignment]
        try:
            return super().insert(key, slots, priority=priority)
        finally:
            self.allocator = allocator


class FreesTheSamePages(Block):
    def insert(self, key, slots, *, priority=0):
        known = self.match(key).slots
        result = super().insert(key, slots, priority=priority)
        same = known[known == slots[: len(known)]]
        if same.size:
            self.allocator.free(np.unique(same // self.page_size))
        return result


class FreesDuplicatesTwice(Radix):
    def insert(self, key, slots, *, priority=0):
        known = self.match(key).slots
        result = super().insert(key, slots, priority=priority)
        other = known[known != slots[: len(known)]]
        if other.size:
            self.allocator.free(np.unique(slots[: len(known)] // self.page_size))
        return result


class TellsOfEachRunTwice(Radix):
    def describe(self, most):
        return [run for run in super().describe(most) for _ in range(2)][:most]


class TellsTheSmallestRuns(Radix):
    def describe(self, most):
        return super().describe(1000)[::-1][:most]


class TellsOfLocksOnAll(Radix):
    def describe(self, most):
        return [replace(run, locked=True) for run in super().describe(most)]


class TellsNoParents(Radix):
    def describe(self, most):
        return [replace(run, above=-1) for run in super().describe(most)]


class ForgetsHits(Radix):
    def describe(self, most):
        return [replace(run, hits=0) for run in super().describe(most)]


class AnswersWithTheGivenSlots(Radix):
    def insert(self, key, slots, *, priority=0):
        result = super().insert(key, slots, priority=priority)
        return InsertResult(slots.copy(), result.taken, result.handle)


class EvictsLocked(Block):
    def evict(self, num_tokens):
        freed = super().evict(num_tokens)
        if freed < num_tokens and self._locked:
            pages = np.flatnonzero(self._blocks.live)
            self._refs[pages] = 0
            self._locked = 0
            self._give_back(pages)
            freed += len(pages) * self.page_size
        return freed


class LocksOnlyTheEnd(Radix):
    def lock(self, handle):
        handle.locks += 1
        handle.node.data.locks += 1
        self._locked += len(handle.node) if handle.node.data.locks == 1 else 0

    def unlock(self, handle):
        handle.locks -= 1
        handle.node.data.locks -= 1
        self._locked -= len(handle.node) if handle.node.data.locks == 0 else 0


class SplitsForgetTheLocks(Radix):
    def _split_entry(self, entry, at):
        upper, lower = super()._split_entry(entry, at)
        upper.locks = 0
        return upper, lower


class SplitsForgetTheHandle(Radix):
    """Where a node is split, handles go on meaning the upper half, as in a tree that makes a new lower one."""

    def insert(self, key, slots, *, priority=0):
        result = super().insert(key, slots, priority=priority)
        self.handles = [*getattr(self, "handles", []), result.handle]
        return result

    def _find(self, key):  # type: ignore[override]
        starts = {node: node.start for node in self._tree.nodes()}
        path = super()._find(key)
        for handle in getattr(self, "handles", []):
            if handle.node in starts and handle.node.start != starts[handle.node] and not handle.locks:
                handle.node, handle.length = handle.node.parent, handle.node.parent.end
        return path


class OneLockIsEnough(Radix):
    def lock(self, handle):
        if handle.locks:
            handle.locks += 1
        else:
            super().lock(handle)

    def unlock(self, handle):
        if handle.locks:
            for _ in range(handle.locks - 1):
                handle.locks -= 1
        super().unlock(handle)


class UnlocksAnything(Block):
    def unlock(self, handle):
        if handle.locks:
            super().unlock(handle)


class LocksWhatItInserts(Block):
    def insert(self, key, slots, *, priority=0):
        result = super().insert(key, slots, priority=priority)
        self.lock(result.handle)
        return result


class IgnoresNamespaces(Radix):
    def match(self, key):
        return super().match(PrefixKey(key.tokens))

    def insert(self, key, slots, *, priority=0):
        return super().insert(PrefixKey(key.tokens), slots, priority=priority)


class LooksAtFirstTokens(Block):
    """Tells pages apart by all tokens but the last."""

    def _split(self, key):
        blocks = super()._split(key).copy()
        blocks[:, 1:] = blocks[:, :1]
        return blocks


class ReturnsItsOwnArray(Radix):
    def match(self, key):
        found = super().match(key)
        node = found.handle.node  # type: ignore[attr-defined]
        if self.page_size == 1 and node is not None and node.end == len(node):
            return PrefixMatch(node.data.pages, found.handle)
        return found


class KeepsTheCallersTokens(Radix):
    def insert(self, key, slots, *, priority=0):
        result = super().insert(key, slots, priority=priority)
        node = result.handle.node  # type: ignore[attr-defined]
        if node is not None:
            node.tokens = key.tokens[node.start : node.end]
        return result


class KeepsTheCallersSlots(Radix):
    def insert(self, key, slots, *, priority=0):
        result = super().insert(key, slots, priority=priority)
        node = result.handle.node  # type: ignore[attr-defined]
        if node is not None and self.page_size == 1:
            node.data.pages = slots[node.start : node.end]
        return result


class TakesPartOfAPage(Radix):
    def insert(self, key, slots, *, priority=0):
        result = super().insert(key, slots, priority=priority)
        return InsertResult(result.slots, len(slots), result.handle)


class LeavesTheLastPage(Block):
    def insert(self, key, slots, *, priority=0):
        result = super().insert(key, slots, priority=priority)
        return InsertResult(result.slots, max(0, result.taken - self.page_size), result.handle)


class EvictsBeginningsFirst(Block):
    def _put_back(self, path, start=0):
        self._idle.push(self._unlocked(path[start:])[::-1])


class ForgetsParentsAsVictims(Radix):
    def _drop(self, node):
        parent = node.parent
        pages = super()._drop(node)
        if parent.data.place >= 0:
            self._victims._take_out(parent.data.place)
        return pages


class EvictionKeepsThePages(Radix):
    def _give_back(self, freed):
        allocator, self.allocator = self.allocator, _Deaf(self.allocator)  # type: ignore[assignment]
        super()._give_back(freed)
        self.allocator = allocator


class ReportsWhatWasWanted(Block):
    def evict(self, num_tokens):
        super().evict(num_tokens)
        return num_tokens


class CountsLockedAsEvictable(Radix):
    @property
    def evictable_tokens(self):
        return self._tree.num_tokens


class SplitsCountTwice(Radix):
    def _split_entry(self, entry, at):
        if entry.locks:
            self._locked += at
        return super()._split_entry(entry, at)


class VersionStands(Radix):
    def evict(self, num_tokens):
        version = self.version
        freed = super().evict(num_tokens)
        self.version = version
        return freed


class ResetsWhileLocked(Block):
    def reset(self):
        self._idle.remove(np.array(self._idle.pages(), dtype=np.int64))
        self._give_back(np.flatnonzero(self._blocks.live))
        self._locked = 0


class FailsHalfwayThroughAReset(Radix):
    def reset(self):
        self.evict(self.evictable_tokens)
        super().reset()


class CutsLengthsToFit(Radix):
    def insert(self, key, slots, *, priority=0):
        length = min(len(key), len(slots))
        return super().insert(key.head(length), slots[:length], priority=priority)


class MissRaises(Block):
    def match(self, key):
        found = super().match(key)
        if not len(found):
            raise KeyError(key.namespace)
        return found


class ExtendsWithDuplicates(Radix):
    def extend(self, handle, key, slots, *, priority=0):
        allocator, self.allocator = self.allocator, _Deaf(self.allocator)  # type: ignore[assignment]
        try:
            return super().extend(handle, key, slots, priority=priority)
        finally:
            self.allocator = allocator


class ExtendsToTheRestAlone(Block):
    """The handle that it returns covers only what is new."""

    def extend(self, handle, key, slots, *, priority=0):
        result = super().extend(handle, key, slots, priority=priority)
        return InsertResult(result.slots, result.taken, self._handle(result.handle.pages[handle.pages.shape[0] :]))  # type: ignore[attr-defined]


class ExtensionSpeaksOfTheWhole(Radix):
    def extend(self, handle, key, slots, *, priority=0):
        result = super().extend(handle, key, slots, priority=priority)
        return InsertResult(result.slots, handle.length + result.taken, result.handle)


class ExtendsTheUpperHalf(Radix):
    """Where a path has been divided, what is new goes behind its first part."""

    def extend(self, handle, key, slots, *, priority=0):
        parent = handle.node.parent if handle.node else None
        if parent is None or not len(parent):
            return super().extend(handle, key, slots, priority=priority)
        cut = np.concatenate((key.tokens[: parent.end], key.tokens[handle.length :]))
        return self._insert(parent, PrefixKey(cut, key.namespace), slots, priority)


class ExtendsInNoNamespace(Radix):
    def extend(self, handle, key, slots, *, priority=0):
        return super().extend(handle, PrefixKey(key.tokens), slots, priority=priority)


class ExtensionIsNoChange(Block):
    def extend(self, handle, key, slots, *, priority=0):
        version = self.version
        result = super().extend(handle, key, slots, priority=priority)
        self.version = version
        return result


class ExtendsAcrossGaps(Radix):
    def extend(self, handle, key, slots, *, priority=0):
        return super().extend(handle, key.head(handle.length + len(slots)), slots, priority=priority)


class ExtensionLocksItsEnd(Block):
    def extend(self, handle, key, slots, *, priority=0):
        result = super().extend(handle, key, slots, priority=priority)
        self.lock(result.handle)
        return result


class ExtensionTakesPartOfAPage(Block):
    def extend(self, handle, key, slots, *, priority=0):
        result = super().extend(handle, key, slots, priority=priority)
        return InsertResult(result.slots, len(slots), result.handle)


class RemembersTheAnswer(Radix):
    """Takes a memo for a proof: what a sequence matched once it goes on to match."""

    def match(self, key):
        found = super().match(key)
        if key.memo is None:
            return found
        said = key.memo.of("said", list)
        said.append(found)
        return said[0]


class _Careless(ChainDigests):
    def note(self, start, digests):
        self._data += digests


class NotesWithGaps(Block):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._blocks._recall = lambda *args: None  # type: ignore[method-assign]

    def _memo(self, key):
        return None if key.memo is None else key.memo.of("careless", _Careless)


class TakesAfterAll(NoCache):
    def insert(self, key, slots, *, priority=0):
        result = super().insert(key, slots)
        return InsertResult(result.slots, len(slots), result.handle)


class FindsAfterAll(NoCache):
    def match(self, key):
        return PrefixMatch(np.arange(len(key), dtype=np.int64), super().match(key).handle)


class LooksAtTokensNotPages(Radix):
    def matched_length(self, key):
        found = super().matched_length(key)
        return found + (found < len(key) and found > 0)


class LooksAndLocks(Radix):
    def matched_length(self, key):
        found = self.match(key)
        self.lock(found.handle)
        return len(found)


CAUGHT = {
    TellsOfEachRunTwice: "test_the_runs_told_are_those_that_are_cached",
    TellsOfLocksOnAll: "test_the_runs_told_are_those_that_are_cached",
    TellsTheSmallestRuns: "test_the_largest_runs_come_first_and_no_more_than_asked_for",
    TellsNoParents: "test_a_run_names_the_one_before_it",
    ForgetsHits: "test_matches_are_counted",
    LooksAtTokensNotPages: "test_a_look_tells_what_a_match_finds",
    LooksAndLocks: "test_a_look_tells_what_a_match_finds",
    ForgetsDuplicates: "test_duplicates_are_freed_and_answered_with_the_cached_slots",
    FreesDuplicatesTwice: "test_duplicates_are_freed_and_answered_with_the_cached_slots",
    AnswersWithTheGivenSlots: "test_duplicates_are_freed_and_answered_with_the_cached_slots",
    FreesTheSamePages: "test_the_same_pages_are_not_freed",
    EvictsLocked: "test_a_lock_keeps_its_path",
    LocksOnlyTheEnd: "test_a_lock_survives_a_split",
    SplitsForgetTheLocks: "test_a_lock_survives_a_split",
    SplitsForgetTheHandle: "test_a_handle_survives_a_split",
    OneLockIsEnough: "test_locks_count",
    UnlocksAnything: "test_unlocking_what_is_not_locked_raises",
    LocksWhatItInserts: "test_an_insert_locks_nothing",
    IgnoresNamespaces: "test_namespaces_are_separate",
    LooksAtFirstTokens: "test_only_whole_pages_are_found",
    ReturnsItsOwnArray: "test_results_are_copies",
    KeepsTheCallersTokens: "test_the_caller_may_overwrite_its_arrays",
    KeepsTheCallersSlots: "test_the_caller_may_overwrite_its_arrays",
    TakesPartOfAPage: "test_a_partial_tail_stays_with_the_caller",
    LeavesTheLastPage: "test_an_inserted_prefix_is_found",
    EvictsBeginningsFirst: "test_ends_go_before_what_they_continue",
    ForgetsParentsAsVictims: "test_ends_go_before_what_they_continue",
    EvictionKeepsThePages: "test_evict_gives_whole_pages_and_tells_how_much",
    ReportsWhatWasWanted: "test_evict_gives_whole_pages_and_tells_how_much",
    CountsLockedAsEvictable: "test_a_lock_keeps_its_path",
    SplitsCountTwice: "test_a_lock_survives_a_split",
    VersionStands: "test_the_version_grows_with_every_change",
    ResetsWhileLocked: "test_reset_refuses_while_something_is_locked",
    FailsHalfwayThroughAReset: "test_reset_refuses_while_something_is_locked",
    CutsLengthsToFit: "test_lengths_that_differ_raise_and_change_nothing",
    MissRaises: "test_a_miss_is_empty",
    ExtendsWithDuplicates: "test_extending_frees_what_others_brought_meanwhile",
    ExtendsToTheRestAlone: "test_a_locked_path_is_extended",
    ExtensionSpeaksOfTheWhole: "test_a_locked_path_is_extended",
    ExtendsTheUpperHalf: "test_a_path_that_was_divided_is_extended",
    ExtendsInNoNamespace: "test_extending_keeps_to_its_namespace",
    ExtensionIsNoChange: "test_extending_is_a_change",
    ExtendsAcrossGaps: "test_extending_across_a_gap_raises_and_changes_nothing",
    ExtensionLocksItsEnd: "test_a_locked_path_is_extended",
    ExtensionTakesPartOfAPage: "test_extending_with_less_than_a_page_takes_nothing",
    RemembersTheAnswer: "test_a_memo_changes_no_answer",
    NotesWithGaps: "test_a_memo_changes_no_answer",
    TakesAfterAll: "test_without_reuse_nothing_is_taken_or_found",
    FindsAfterAll: "test_without_reuse_nothing_is_taken_or_found",
}
MUTANTS = [Mutant(cls, suite=PrefixCacheContract, caught_by=test) for cls, test in CAUGHT.items()]
# What the directed tests notice, the state machine has to notice by itself.
BY_MACHINE = [
    Mutant(cls, suite=PrefixCacheContract, caught_by="test_any_sequence_of_calls_agrees_with_a_dict")
    for cls in (
        *(ForgetsDuplicates, EvictsLocked, SplitsForgetTheLocks),
        *(OneLockIsEnough, LooksAtFirstTokens, ForgetsParentsAsVictims),
        ExtendsToTheRestAlone,
    )
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


@pytest.mark.parametrize("mutant", BY_MACHINE, ids=str)
def test_caught_by_the_state_machine(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody reads the counterexample here, so the time to shrink it is saved.
    unshrunk = settings(properties(60, 40), phases=[Phase.generate])
    monkeypatch.setattr(prefix_cache, "properties", lambda *sizes: unshrunk)
    assert_caught(mutant)
