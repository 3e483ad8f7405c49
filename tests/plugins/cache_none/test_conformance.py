from pegboard.conformance.prefix_cache import PrefixCacheContract


class TestNoCache(PrefixCacheContract):
    provider = "none"
