from pegboard.core.testing.prefix_cache import PrefixCacheContract


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
