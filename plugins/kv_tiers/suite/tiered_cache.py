"""The suite of a prefix cache that is lent tiers: all that PrefixCacheContract tests, and more."""

from __future__ import annotations

from pegboard.conformance.prefix_cache import PrefixCacheContract
from pegboard.plugins.kv_tiers.suite.prefix_prefetch import PrefetchTests
from pegboard.plugins.kv_tiers.suite.prefix_tiers import HostTierTests


class TieredPrefixCacheContract(HostTierTests, PrefetchTests, PrefixCacheContract):
    """What is on the host is what was computed, whatever is evicted, copied or read meanwhile."""

    contract = "prefix_cache"
