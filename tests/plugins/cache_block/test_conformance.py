from pegboard.core.testing.prefix_cache import PrefixCacheContract


class TestBlockCache(PrefixCacheContract):
    provider = "block"
