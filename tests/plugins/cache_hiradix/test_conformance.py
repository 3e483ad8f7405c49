from pegboard.conformance.prefix_cache import PrefixCacheContract


class TestHiRadixCache(PrefixCacheContract):
    provider = "hiradix"


class TestHiRadixCacheSlru(PrefixCacheContract):
    provider = "hiradix"
    options = {"eviction": "slru", "protected_share": 0.2}
