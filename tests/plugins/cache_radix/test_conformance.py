from pegboard.conformance.prefix_cache import PrefixCacheContract
from pegboard.core.interfaces.prefix_cache import PrefixCache
from pegboard.plugins.cache_radix.cache import RadixCache


class TestRadixCache(PrefixCacheContract):
    provider = "radix"


class TestRadixCacheLfu(PrefixCacheContract):
    provider = "radix"
    options = {"eviction": "lfu"}


class TestRadixCacheFifo(PrefixCacheContract):
    provider = "radix"
    options = {"eviction": "fifo"}


class TestRadixCacheSlru(PrefixCacheContract):
    provider = "radix"
    options = {"eviction": "slru", "protected_share": 0.2}  # so small that protection is lost again all the time


class TestRadixCachePriority(PrefixCacheContract):
    provider = "radix"
    options = {"eviction": "priority"}


class Plain(RadixCache):
    """A cache that leaves to its contract what the contract has a default for."""

    extend = PrefixCache.extend


class TestContractsDefaults(PrefixCacheContract):
    factory = Plain
