"""What `pegboard plugins check hiradix` runs."""

from pegboard.plugins.kv_tiers.suite.tiered_cache import TieredPrefixCacheContract


class HiRadixConformance(TieredPrefixCacheContract):
    provider = "hiradix"
