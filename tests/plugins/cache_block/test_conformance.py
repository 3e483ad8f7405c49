from pegboard.conformance.prefix_cache import PrefixCacheContract


class TestBlockCache(PrefixCacheContract):
    provider = "block"
