from pegboard.core.testing.prefix_cache import PrefixCacheContract


class TestNoCache(PrefixCacheContract):
    provider = "none"
