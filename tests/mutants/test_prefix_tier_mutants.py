"""Broken caches with tiers, and the tests of the suite that notice."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.prefix_cache import PrefixCacheContract
from pegboard.plugins.cache_hiradix.prefetching import NothingMore
from pegboard.plugins.cache_radix.cache import RadixCache
from pegboard.plugins.kv_tiers.api import PageLoad, Prefetch
from pegboard.plugins.kv_tiers.suite.tiered_cache import TieredPrefixCacheContract
from tests.mutants import tier_caches as broken


class LoadsWithoutATier(RadixCache):
    def load(self, handle, slots) -> PageLoad:
        return PageLoad(1, np.empty(0, np.int64), np.empty(0, np.int64))


class PrefetchesWithoutStorages(RadixCache):
    def prefetch(self, key) -> Prefetch:
        return NothingMore(0)


CAUGHT = {
    LoadsWithoutATier: "test_without_a_host_tier_nothing_is_loaded",
    PrefetchesWithoutStorages: "test_without_prefetch_it_is_refused",
    broken.FindsNothingOnTheHost: "test_what_was_evicted_comes_back_from_the_host",
    broken.LoadsInTheWrongOrder: "test_what_was_evicted_comes_back_from_the_host",
    broken.MiscountsOrigins: "test_the_host_goes_on_where_the_device_ends",
    broken.NamesOtherOrigins: "test_the_host_goes_on_where_the_device_ends",
    broken.NamesNoLoader: "test_what_was_evicted_comes_back_from_the_host",
    broken.CountsTheDeviceAlone: "test_the_host_goes_on_where_the_device_ends",
    broken.NoEpoch: "test_a_copy_of_a_page_that_was_evicted_meanwhile_is_none",
    broken.BelievesCopies: "test_a_copy_that_failed_is_none",
    broken.FindsWhatIsOnItsWay: "test_copies_that_are_under_way_are_not_found",
    broken.EvictionWaits: "test_copies_that_are_under_way_are_not_found",
    broken.LocksNoTails: "test_a_lock_keeps_what_was_found_on_the_host",
    broken.UnpinsAtLaunch: "test_what_is_being_loaded_stays_as_it_is",
    broken.FailedLoadsForget: "test_a_load_that_failed_changes_nothing",
    broken.NeverLoading: "test_that_another_one_loads_is_told",
    broken.LoadsAreNoNews: "test_that_another_one_loads_is_told",
    broken.LoadsWhatIsNotLocked: "test_loads_are_refused_where_they_make_no_sense",
    broken.LoadsWhatFits: "test_loads_are_refused_where_they_make_no_sense",
    broken.EndsTwice: "test_loads_are_refused_where_they_make_no_sense",
    broken.ResetKeepsTheHost: "test_a_reset_forgets_the_host",
    broken.ResetsUnderALockedTail: "test_a_reset_forgets_the_host",
    broken.GivesPagesOfRunningJobs: "test_a_reset_forgets_the_host",
    broken.WantsHostPages: "test_without_host_pages_it_is_a_cache_like_others",
    broken.NeverCloses: "test_after_close_nothing_is_begun",
    broken.BroughtForEver: "test_what_a_storage_has_comes_to_the_host",
    broken.FetchesWithoutAsking: "test_a_miss_is_over_soon_and_takes_no_pages",
    broken.StoresWithoutNamespaces: "test_storages_keep_namespaces_apart",
    broken.BelievesBlocks: "test_what_has_come_is_kept_and_the_rest_is_not_there",
    broken.PrefetchesForEver: "test_what_goes_on_is_not_in_the_way",
    broken.FetchesTwice: "test_two_who_want_the_same_get_it_once",
    broken.WaitsWithoutStorages: "test_nothing_is_awaited_without_storages",
}
WITHOUT = {LoadsWithoutATier, PrefetchesWithoutStorages}
MUTANTS = [
    Mutant(cls, suite=PrefixCacheContract if cls in WITHOUT else TieredPrefixCacheContract, caught_by=test)
    for cls, test in CAUGHT.items()
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
